"""The inspection as one self-contained page: no network, no other file."""

from __future__ import annotations

from typing import Any

import jinja2

from tfbackend import __version__
from tfbackend.inspection import tree as sites
from tfbackend.inspection.examine import Inspection
from tfbackend.inspection.facts import (
    accounts_lines,
    class_lines,
    layout_lines,
    memory_lines,
    pooling_facts,
    stage_lines,
    title_line,
)
from tfbackend.inspection.memory import ALLOWANCE
from tfbackend.inspection.screen import folded_collectives, folded_parameters
from tfbackend.inspection.sizes import bytes_text, count_text, shape_text
from tfbackend.inspection.tree import Site
from tfbackend.inspection.verdict import WORDS

LEGEND = (
    (sites.REWRITTEN, "replaced or its forward rewritten"),
    (sites.MERGED, "its weights moved into a merged layer"),
    (sites.KEPT, "kept as Transformers wrote it, with parameters"),
    (sites.REFUSED, "a pattern was found and not applied"),
    (sites.PLAIN, "nothing to rewrite"),
)


def render_page(found: Inspection) -> str:
    """The whole page as HTML. Everything that came with the model is escaped."""
    loader = jinja2.PackageLoader("tfbackend.inspection", "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=jinja2.select_autoescape(default=True, default_for_string=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shape": shape_text, "bytes": bytes_text}
    return environment.get_template("page.html.j2").render(_values(found))


def _values(found: Inspection) -> dict[str, Any]:
    return {
        "version": __version__,
        "found": found,
        "verdict": WORDS[found.status],
        "title": title_line(found),
        "tiles": _tiles(found),
        "legend": LEGEND,
        "facts": (("Class", class_lines(found)), *pooling_facts(found), ("Ranks", layout_lines(found)),
                  ("Memory", [*memory_lines(found), *stage_lines(found)]), ("Weights", accounts_lines(found))),
        "bar": _memory_bar(found),
        "parameters": list(folded_parameters(found)),
        "exchanges": list(folded_collectives(found)),
        "ledger": _ledger(found),
        "merged_of": _merged,
        "others_of": _others,
    }  # fmt: skip


def _tiles(found: Inspection) -> list[tuple[str, str, str]]:
    """(figure, what it is, more) of the most asked for figures."""
    counts = sites.states(found.tree)
    rewritten = [site for site in found.tree.walk() if site.state == sites.REWRITTEN]
    total = sum(site.count for site in rewritten)
    unproven = sum(site.count for site in rewritten if site.proof == sites.UNPROVEN)
    tiles = [
        (count_text(sum(p.count for p in found.parameters)), "parameters", f"{len(found.parameters):,} tensors served"),
        (f"{total:,}", "sites rewritten", f"{unproven:,} unproven" if unproven else "each kind of them proven"),
        (f"{counts[sites.REFUSED] + counts[sites.KEPT]:,}", "sites kept or refused", "each with a reason"),
        (bytes_text(found.memory.weights), "weights a rank", "estimated" if found.memory.estimated else ""),
        _cache_tile(found),
    ]
    if found.accounts is not None:
        placed = f"{found.accounts.counts['placed']:,} of {len(found.accounts.entries):,}"
        tiles.append((placed, "tensors placed", "every parameter filled" if found.accounts.complete else "incomplete"))
    return tiles


_UNKNOWN = ("unknown", "KV cache a token", "no attention planned")


def _cache_tile(found: Inspection) -> tuple[str, str, str]:
    state = found.memory.state_bytes_per_request
    if not any(stage.cache.groups for stage in found.memory.stages):
        return (bytes_text(state), "state a request", "") if state else _UNKNOWN
    size, beside = found.memory.kv_bytes_per_token, f"and {bytes_text(state)} of state a request" if state else ""
    return (
        (bytes_text(size), "KV cache a token", beside) if size else ("bounded", "KV cache", "by every layer's window")
    )


def _memory_bar(found: Inspection) -> list[tuple[str, str, float]]:
    """(what, amount, percent) of one GPU's memory; nothing where no GPU was given or nothing fits."""
    fit = found.memory.fit
    if fit is None or fit.available <= 0:
        return []
    usable = fit.gpu * fit.utilisation
    weights = usable - ALLOWANCE - fit.available
    parts = (
        ("weights", weights),
        ("activations (allowance)", ALLOWANCE),
        ("KV cache", fit.available),
        ("left to others", fit.gpu - usable),
    )
    return [(name, bytes_text(size), 100 * size / fit.gpu) for name, size in parts]


def _ledger(found: Inspection) -> list[list[str]]:
    """[tensor, shape, dtype, outcome, place or reason] of each tensor, for the page's own search."""
    if found.accounts is None:
        return []
    return [
        [e.tensor.name, "?" if e.tensor.shape is None else shape_text(e.tensor.shape), e.tensor.dtype, e.outcome,
         " ".join(part for part in (e.place, e.note) if part)]
        for e in found.accounts.entries
    ]  # fmt: skip


def _merged(site: Site) -> list[Site]:
    return [child for child in site.children if child.state == sites.MERGED]


def _others(site: Site) -> list[Site]:
    return [child for child in site.children if child.state != sites.MERGED]
