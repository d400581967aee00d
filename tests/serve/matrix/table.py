"""The matrix for people: a rich table of every kind on the terminal."""

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tests.serve.matrix.kinds import KINDS
from tests.serve.matrix.results import BACKENDS, VERDICTS, Result, Store

_STYLES = {"equal": "green", "wrong": "bold red", "refused": "yellow", "crashed": "red", "unmade": "magenta"}
_NONE = Result("")


def fused(result: Result) -> str:
    """How many sites of a live model are fused, "-" if none lived; what was left as it was does not count."""
    return (
        str(sum(count for kind, count in result.sites.items() if not kind.startswith("left_"))) if result.sites else "-"
    )


def tally(store: Store, names: Iterable[str], kind: str, backend: str) -> Counter[str]:
    """Verdicts of one kind under one backend."""
    rows = (store.rows[name] for name in names if name in store.rows)
    return Counter(row.results[backend].verdict for row in rows if row.kind == kind and backend in row.results)


def summary(counts: Counter[str]) -> str:
    """For instance "40 equal, 3 refused"."""
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]) or "none"


def print_table(store: Store, names: list[str]) -> None:
    """Print what is known of the names, kind by kind, then the counts."""
    console = Console()
    for kind in (*KINDS, ""):
        of_kind = [name for name in names if name in store.rows and store.rows[name].kind == kind]
        if of_kind:
            console.print(_table(store, of_kind, kind or "no checkpoint"))
    for kind in KINDS:
        counts = {backend: tally(store, names, kind, backend) for backend in BACKENDS}
        if any(counts.values()):
            console.print(f"{kind:14} ours: {summary(counts['ours'])}; in-tree: {summary(counts['intree'])}")


def _table(store: Store, names: list[str], title: str) -> Table:
    table = Table(title=f"{title} ({len(names)})", title_justify="left")
    table.add_column("architecture", no_wrap=True)
    for heading in ("ours", "in-tree"):
        table.add_column(heading)
    table.add_column("fused", justify="right")
    table.add_column("why not equal", overflow="fold")
    for name in names:
        results = store.rows[name].results
        ours, intree = results.get("ours", _NONE), results.get("intree", _NONE)
        verdicts = (f"[{_STYLES.get(r.verdict, '')}]{r.verdict}[/]" if r.verdict else "" for r in (ours, intree))
        table.add_row(name, *verdicts, f"{fused(ours)}/{fused(intree)}", ours.reason[:300].replace("[", "\\["))
    return table
