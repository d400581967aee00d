"""The plan and the ledger as plain text, for people."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tfbackend import __version__
from tfbackend.fusers.base import Miss, Rewrite
from tfbackend.plan import Plan
from tfbackend.weights import Ledger


def report(plan: Plan, ledger: Ledger | None = None) -> str:
    """What was rewritten, what was not and why, and where the weights went."""
    proven, cached = plan.proofs
    lines = [f"tfbackend {__version__}: {plan.architecture}", "", "Rewritten"]
    lines += [f"  {where:<32} {what}" for where, what in _folded_rewrites(plan.rewrites)]
    if plan.head is not None:
        lines += [f"  {plan.head_path or '':<32} {'tied ' if plan.tied else ''}head: {plan.head}"]
    if plan.classifier is not None:
        lines += [f"  {'':<32} {plan.classifier}"]
    if plan.numbering is not None:
        lines += [f"  {'':<32} {plan.numbering}"]
    lines += ["", f"Proven: {proven} kinds of site, {cached} of them remembered"]
    lines += [f"  unproven: {text}" for text in plan.unproven]
    lines += ["", "Not rewritten" if plan.misses else "Not rewritten: nothing that looked like a pattern was left"]
    lines += [f"  {where:<32} {what}" for where, what in _folded_misses(plan.misses)]
    if ledger is not None:
        lines += ["", "Weights", *(f"  {line}" for line in ledger.summary().splitlines())]
    return "\n".join(lines) + "\n"


def write_report(directory: Path, plan: Plan, ledger: Ledger | None = None) -> Path:
    """Write the report to a file named by the plan's own content, and return its path."""
    text = report(plan)
    path = directory / f"{plan.architecture}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt"
    directory.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(report(plan, ledger))
    temporary.replace(path)
    return path


def _folded_rewrites(rewrites: Sequence[Rewrite]) -> list[tuple[str, str]]:
    return _fold([(r.qualname, r.summary) for r in rewrites])


def _folded_misses(misses: Sequence[Miss]) -> list[tuple[str, str]]:
    return _fold([(m.qualname, f"{m.fuser}: {m.reason}" + (f" ({m.place})" if m.place else "")) for m in misses])


def _fold(items: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join lines that differ by layer number only: layers.0.mlp, layers.1.mlp -> layers.{0-1}.mlp."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path, text in items:
        number = re.search(r"(?<=\.)\d+(?=\.|$)", path)
        stem = path[: number.start()] + "{}" + path[number.end() :] if number else path
        groups.setdefault((stem, text), []).extend([int(number.group())] if number else [])
    return [(stem.replace("{}", _ranges(numbers)), text) for (stem, text), numbers in groups.items()]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return parts[0] if len(parts) == 1 and "-" not in parts[0] else "{" + ",".join(parts) + "}"
