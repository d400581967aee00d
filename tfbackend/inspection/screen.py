"""The inspection on a terminal: a first screen that answers, and the sections that explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

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
from tfbackend.inspection.layout import ServedParameter
from tfbackend.inspection.sizes import bytes_text, ranges, shape_text
from tfbackend.inspection.tree import Site
from tfbackend.inspection.verdict import NOT_SERVED, SERVES, WITH_LOSSES, WORDS, Finding

_MARKS = {SERVES: "✔", WITH_LOSSES: "!", NOT_SERVED: "✘"}
_COLOURS = {SERVES: "green", WITH_LOSSES: "yellow", NOT_SERVED: "red"}
STATE_COLOURS = {
    sites.REWRITTEN: "green",
    sites.MERGED: "cyan",
    sites.KEPT: "yellow",
    sites.REFUSED: "red",
    sites.PLAIN: "dim",
}
_ROWS, _FINDINGS = 12, 4
HINT = "dim"


def first_screen(found: Inspection) -> RenderableType:
    """Verdict, problems and losses, what was rewritten, memory, ledger, and where to look next."""
    parts: list[RenderableType] = [_verdict(found)]
    parts += _findings("Why not", found.problems, "red") + _findings("Losses", found.losses, "yellow")
    parts += [_rewrites(found), _facts(found), _hints(found)]
    return Group(*parts)


def _verdict(found: Inspection) -> RenderableType:
    colour = _COLOURS[found.status]
    head = Text.assemble((f"{_MARKS[found.status]} {found.request.model} {WORDS[found.status]}", f"bold {colour}"))
    return Group(head, Text(f"  {title_line(found)}"), Text())


def _findings(title: str, findings: Sequence[Finding], colour: str) -> list[RenderableType]:
    if not findings:
        return []
    lines: list[RenderableType] = [Text(f"{title}", style=f"bold {colour}")]
    lines += [Padding(Text(f"- {finding}"), (0, 0, 0, 2)) for finding in findings[:_FINDINGS]]
    if len(findings) > _FINDINGS:
        lines.append(Text(f"  - and {len(findings) - _FINDINGS} more: --full", style="dim"))
    return [*lines, Text()]


def _rewrites(found: Inspection) -> RenderableType:
    rows = list(rewrite_rows(found.tree))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=False)
    table.add_column("Rewritten", overflow="fold", max_width=36)
    table.add_column("sites", justify="right")
    table.add_column("becomes", overflow="fold")
    table.add_column("proof", no_wrap=True)
    for where, count, becomes, proof in rows[:_ROWS]:
        table.add_row(where, str(count), becomes, Text(proof, style="green" if proof == sites.PROVEN else "dim"))
    if len(rows) > _ROWS:
        table.add_row(f"and {len(rows) - _ROWS} more: --tree", "", "", "")
    return table


def rewrite_rows(root: Site) -> Iterator[tuple[str, int, str, str]]:
    """(where, how many sites, what they become, proof), one for each different outcome."""
    groups: dict[tuple[str, str], list[tuple[str, Site]]] = {}
    for path, site in root.walk_named():
        if site.state == sites.REWRITTEN:
            for line in site.becomes:
                short = line.partition(": ")[2] if line.startswith(f"{site.cls}: ") else line
                groups.setdefault((short, site.proof), []).append((path, site))
    for (becomes, proof), same in groups.items():
        more = f" (+{len(same) - 1})" if len(same) > 1 else ""
        yield same[0][0] + more, sum(site.count for _, site in same), becomes, proof


def _facts(found: Inspection) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    memory = [*memory_lines(found), *stage_lines(found)]
    for title, lines in (
        ("Class", class_lines(found)),
        *pooling_facts(found),
        ("Ranks", layout_lines(found)),
        ("Memory", memory),
        ("Weights", accounts_lines(found)),
    ):
        for index, line in enumerate(lines):
            table.add_row(title if index == 0 else "", line)
    return Group(table, Text())


def _hints(found: Inspection) -> RenderableType:
    more = [
        ("--tree", "every module"),
        ("--diff", "forwards before and after"),
        ("--layout", "every parameter"),
        ("--ledger", "every tensor"),
        ("--full", "all of it"),
        ("--html FILE", "as a page"),
    ]
    if found.request.gpu is None:
        more.insert(0, ("--gpu-memory 141GB", "longest context"))
    if found.request.tp == 1:
        more.insert(1, ("--tp N", "on N ranks"))
    text = Text("More  ", style="dim")
    for flag, what in more:
        text.append(flag, style="bold cyan").append(f" {what}  ", style="dim")
    return text


def module_tree(found: Inspection) -> RenderableType:
    """The whole tree, folded by repetition."""
    root = Tree(Text(f"{found.tree.name}: {found.tree.cls}", style="bold"), guide_style="dim")
    for child in found.tree.children:
        _grow(root, child)
    return _section("Modules", root)


def _grow(parent: Tree, site: Site) -> None:
    label = Text.assemble((site.name, "bold"), f" {site.cls}" + (f" x{site.count}" if site.count > 1 else ""))
    label.append(f"  {site.state}", style=STATE_COLOURS[site.state])
    if site.proof:
        label.append(f", {site.proof}", style="dim")
    for line in site.becomes:
        label.append(f"\n→ {line}")
    for fuser, reason, place in site.misses:
        label.append(f"\n✘ {fuser}: {reason}" + (f" ({place})" if place else ""), style="red")
    for name, shape, rank_shape in site.parameters:
        shared = f", {shape_text(rank_shape)} a rank" if rank_shape != shape else ""
        label.append(f"\n{name} {shape_text(shape)}{shared}", style="dim")
    branch = parent.add(label)
    for child in site.children:
        _grow(branch, child)


def parallel_layout(found: Inspection) -> RenderableType:
    """Each parameter with its share on a rank, folded over the layers; and the exchanges between ranks."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("parameter", "shape", "shared by", "a rank holds", "bytes a rank", "note"):
        table.add_column(title, overflow="fold", justify="right" if title.startswith("bytes") else "left")
    for name, parameter, count in folded_parameters(found):
        note = parameter.problem or (f"tied to {parameter.tied_to}" if parameter.tied_to else "")
        note = note or (f"each KV head on {parameter.replicas} ranks" if parameter.replicas > 1 else "")
        table.add_row(
            name,
            shape_text(parameter.shape),
            parameter.how,
            shape_text(parameter.rank_shape),
            bytes_text(parameter.rank_bytes * count),
            Text(note, style="red" if parameter.problem else "dim"),
        )
    lines = [Text(f"  {kind} after {where}") for kind, where in folded_collectives(found)]
    title = (
        f"Exchanges in one forward on {found.serving.tp_size} ranks"
        if found.serving.tp_size > 1
        else ("Exchanges in one forward, were there several ranks")
    )
    return _section("Parameters", Group(table, Text(title, style="bold"), *lines))


def folded_parameters(found: Inspection) -> Iterator[tuple[str, ServedParameter, int]]:
    """(name with folded layer numbers, the first of them, how many) for parameters that differ in their layer only."""
    groups: dict[tuple[object, ...], list[ServedParameter]] = {}
    for p in found.parameters:
        stem = p.name if p.layer is None else p.name.replace(f".{p.layer}.", ".{}.", 1)
        groups.setdefault((stem, p.shape, p.rank_shape, p.how, p.dtype, p.problem), []).append(p)
    for key, same in groups.items():
        layers = [p.layer for p in same if p.layer is not None]
        yield str(key[0]).replace("{}", ranges(layers)), same[0], len(same)


def folded_collectives(found: Inspection) -> Iterator[tuple[str, str]]:
    """(kind, where) of the exchanges, folded over the layers."""
    groups: dict[tuple[str, str], list[int]] = {}
    for exchange in found.collectives:
        stem = exchange.after if exchange.layer is None else exchange.after.replace(f".{exchange.layer}", ".{}", 1)
        groups.setdefault((exchange.kind, stem), []).extend([] if exchange.layer is None else [exchange.layer])
    for (kind, stem), layers in groups.items():
        yield kind, stem.replace("{}", ranges(layers))


def ledger(found: Inspection) -> RenderableType:
    """What would become of each tensor."""
    if found.accounts is None:
        return _section("Ledger", Text("no weights are at hand"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("tensor", "shape", "dtype", "outcome", "place or reason"):
        table.add_column(title, overflow="fold")
    for entry in found.accounts.entries:
        shape = shape_text(entry.tensor.shape) if entry.tensor.shape is not None else "?"
        style = "" if entry.outcome == "placed" else "cyan" if entry.outcome == "dropped" else "red"
        table.add_row(
            entry.tensor.name,
            shape,
            entry.tensor.dtype,
            Text(entry.outcome, style=style),
            " ".join(part for part in (entry.place, entry.note) if part),
        )
    rules = [Text(f"  {rule}: {why}.") for rule, why in found.accounts.rules.items()]
    gaps = [Text(f"  unfilled: {gap.place}, wanted {gap.wanted}", style="red") for gap in found.accounts.gaps]
    return _section("Ledger", Group(table, *rules, *gaps))


def forwards(found: Inspection) -> RenderableType:
    """Each edited forward as a unified diff."""
    if not found.diffs:
        return _section("Forwards", Text("none is edited"))
    parts: list[RenderableType] = []
    for diff in found.diffs:
        parts.append(Text(f"{diff.cls} ({diff.place}) at {', '.join(diff.sites)}", style="bold"))
        parts += [Syntax(diff.text, "diff", theme="ansi_dark", background_color="default", word_wrap=True), Text()]
    return _section("Forwards", Group(*parts))


def everything_found(found: Inspection) -> RenderableType:
    """All problems and losses, unabridged."""
    lines = [Text(f"- {finding}") for finding in (*found.problems, *found.losses)]
    return _section("Findings", Group(*lines) if lines else Text("nothing is in the way and nothing is lost"))


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(f"── {title} ──", style="bold blue"), body, Text())


def print_sections(console: Console, sections: Sequence[RenderableType]) -> None:
    """Print with soft wrapping off, so that tables keep to the console's width."""
    for section in sections:
        console.print(section, highlight=False)
