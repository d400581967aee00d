"""The ladder on a terminal: a live line while a rung is being asked, one line for each that has its answer."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tfbackend.verification.document import remark
from tfbackend.verification.ladder import TINY, Listener, Report
from tfbackend.verification.rungs import FAIL, NOT_RUN, PASS, UNKNOWN, Result, Rung, overall

_STYLES = {PASS: "green", FAIL: "bold red", UNKNOWN: "yellow", NOT_RUN: "dim"}
_MARKS = {PASS: "pass", FAIL: "FAIL", UNKNOWN: "  ? ", NOT_RUN: " -  "}
_TITLE = 42


class Screen(Listener):
    """Prints results as they come; the live line goes away."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=8)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, rung: Rung) -> None:
        self._live.update(Spinner("dots", Text(rung.title, style="cyan")))

    def end(self, result: Result) -> None:
        self._live.update(Text(""))
        self._console.print(line(result))


def line(result: Result) -> RenderableType:
    """One result: verdict, rung, figure, what it is of; below it what is wrong, and what that means."""
    finding, style = result.finding, _STYLES[result.finding.verdict]
    row = Table.grid(padding=(0, 1), expand=False)
    row.add_column(no_wrap=True)
    row.add_column(width=_TITLE, overflow="fold")
    row.add_column(overflow="fold")
    figure = Text(finding.figure or (f"not run, needs {finding.needs}" if finding.needs else ""))
    if finding.verdict == NOT_RUN:
        figure.stylize("dim")
    if note := remark(result):
        figure.append(f"  [{note}]", style="dim italic")
    if result.seconds >= 1:
        figure.append(f"  {result.seconds:.0f} s", style="dim")
    row.add_row(Text(_MARKS[finding.verdict], style=style), Text(result.rung.title, style=_title_style(result)), figure)
    below: list[RenderableType] = []
    if finding.detail:
        below.append(Text(finding.detail, style=style))
    if finding.verdict == FAIL:
        below.append(Text(result.rung.means, style="italic"))
    return Group(row, *(Padding(text, (0, 0, 0, 5)) for text in below))


def _title_style(result: Result) -> str:
    return "dim" if result.finding.verdict == NOT_RUN else ""


def summary(report: Report) -> RenderableType:
    """The last lines: the verdict, on what weights, and what was left out."""
    verdict = overall(report.results)
    found = [r.finding.verdict for r in report.results]
    text = Text()
    text.append({PASS: "PASS", FAIL: "FAIL", UNKNOWN: "COULD NOT TELL"}[verdict], style=_STYLES[verdict])
    text.append(f"  {report.architecture or report.request.model}: ")
    counts = ((PASS, "passed"), (FAIL, "failed"), (UNKNOWN, "could not tell"), (NOT_RUN, "not run"))
    text.append(", ".join(f"{found.count(kind)} {word}" for kind, word in counts if kind in found))
    text.append(f", {report.seconds:.0f} s")
    if report.weights == TINY:
        text.append(f"\nThere are no weights at hand: engines ran on a {TINY}, so nothing is said of the real weights.")
    return text
