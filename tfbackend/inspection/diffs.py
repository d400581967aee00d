"""Each distinct forward, or other method, that the plan edits, before and after."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass

from tfbackend.inspection.sizes import ranges
from tfbackend.meta import MetaModel
from tfbackend.plan import Plan
from tfbackend.source.forward import defined_name, function_source


@dataclass(frozen=True)
class ForwardDiff:
    """One edited forward: of which class, where its source stands, at which sites, and the unified diff."""

    cls: str
    place: str
    sites: tuple[str, ...]
    text: str


def forward_diffs(meta: MetaModel, plan: Plan) -> tuple[ForwardDiff, ...]:
    """In order of the first site."""
    groups: dict[tuple[type, str], list[str]] = {}
    for path, after in (*plan.forwards.items(), *plan.methods.items()):
        groups.setdefault((type(meta.base.get_submodule(path)), after), []).append(path)
    found = []
    for (cls, after), paths in groups.items():
        source = function_source(inspect.unwrap(getattr(cls, defined_name(after))), with_super=True)
        lines = difflib.unified_diff(
            source.text.splitlines(),
            after.splitlines(),
            f"{cls.__name__}.{source.name} ({source.place()})",
            f"{cls.__name__}.{source.name} as served",
            lineterm="",
            n=2,
        )
        found.append(ForwardDiff(cls.__name__, source.place(), tuple(fold_paths(paths)), "\n".join(lines)))
    return tuple(found)


def fold_paths(paths: list[str]) -> list[str]:
    """Paths that differ in their first number only, joined: layers.0.mlp, layers.1.mlp -> layers.0-1.mlp."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            groups.setdefault((path, ""), [])
        else:
            stem = ".".join(parts[:at]), ".".join(parts[at + 1 :])
            groups.setdefault(stem, []).append(int(parts[at]))
    return [
        ".".join(part for part in (before, ranges(numbers) if numbers else "", after) if part)
        for (before, after), numbers in groups.items()
    ]
