"""`tfbackend inspect MODEL`: what would be served, how it is laid out, and whether every weight has a place.

Needs neither a GPU nor vLLM, and reads of the weights only their headers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tfbackend.errors import ConfigError, TfbackendError

if TYPE_CHECKING:
    from rich.console import Console

    from tfbackend.inspection.examine import Inspection

INSPECT_HELP = "Say what would become of MODEL: rewrites, ranks, memory, weights. Needs no GPU and no weights."
FAILED = 2
_WIDTH = 100

Model = typer.Argument(
    metavar="MODEL", help="A folder, a config.json, or a repository of the Hugging Face Hub.", show_default=False
)

Page = typer.Option(None, "--html", metavar="FILE", dir_okay=False, help="All of it as one page, into FILE.")


def inspect_command(
    model: str = Model,
    tp: int = typer.Option(1, "--tp", "--tensor-parallel-size", min=1, help="Ranks that share each layer."),
    pp: int = typer.Option(1, "--pp", "--pipeline-parallel-size", min=1, help="Stages that share the layers."),
    ep: bool = typer.Option(False, "--ep", "--enable-expert-parallel", help="Spread experts over the ranks."),
    dtype: str = typer.Option("auto", help="auto, bfloat16, float16 or float32."),
    max_model_len: int | None = typer.Option(None, min=1, help="Longest context, in tokens. [default: the model's]"),
    gpu_memory: str | None = typer.Option(None, help="Memory of one GPU, 141GB or 80GiB: how long a context fits?"),
    utilisation: float = typer.Option(0.92, "--gpu-memory-utilization", min=0.01, max=1.0, help="As vLLM's."),
    trust_remote_code: bool = typer.Option(False, help="Run code that comes with the model."),
    tree: bool = typer.Option(False, "--tree", help="Every module, and what it becomes."),
    diff: bool = typer.Option(False, "--diff", help="Each edited forward, before and after."),
    layout: bool = typer.Option(False, "--layout", help="Every parameter, and what a rank holds of it."),
    ledger: bool = typer.Option(False, "--ledger", help="Every tensor of the checkpoint, and where it goes."),
    full: bool = typer.Option(False, "--full", help="All of these."),
    as_json: bool = typer.Option(False, "--json", help="All of it as JSON, on standard output."),
    html: Path | None = Page,
) -> None:
    """Say what would become of MODEL: rewrites, ranks, memory, weights. Needs no GPU and no weights.

    Exit status: 0 it serves, 1 it serves with losses, 2 it does not serve.
    """
    wanted = {"tree": tree or full, "diff": diff or full, "layout": layout or full, "ledger": ledger or full}
    try:
        found = _look(model, tp, pp, ep, dtype, max_model_len, gpu_memory, utilisation, trust_remote_code, as_json)
        if html is not None:
            _write_page(found, html)
    except TfbackendError as error:
        _fail(model, error, as_json)
    if as_json:
        from tfbackend.inspection.document import document

        json.dump(document(found), sys.stdout, indent=1)
        print()
    else:
        _print(found, wanted, html)
    raise typer.Exit(found.status)


def _look(
    model: str, tp: int, pp: int, ep: bool, dtype: str, max_model_len: int | None, gpu_memory: str | None,
    utilisation: float, trust_remote_code: bool, quiet: bool,
) -> Inspection:  # fmt: skip
    with _progress(quiet) as advance:
        from transformers.utils import logging

        from tfbackend.inspection.examine import Request, inspect_model
        from tfbackend.inspection.sizes import parse_bytes

        logging.set_verbosity_error()
        gpu = parse_bytes(gpu_memory) if gpu_memory is not None else None
        request = Request(model, tp, pp, ep, dtype, max_model_len, gpu, utilisation, trust_remote_code, proof_folder())
        return inspect_model(request, advance)


def proof_folder() -> Path | None:
    """Where the engine keeps its proofs too: TFBACKEND_CACHE, or a folder in vLLM's cache; None if it can't be made."""
    path = _cache() / "proofs"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return path if os.access(path, os.W_OK) else None


def _cache() -> Path:
    if own := os.environ.get("TFBACKEND_CACHE"):
        return Path(own)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(home, "vllm")
    return Path(root).expanduser() / "tfbackend"


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar with the present step, on standard error while that is a terminal; it leaves nothing behind."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
    with bar:
        task = bar.add_task("Starting", total=6)

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=step)

        yield advance


def _write_page(found: Inspection, path: Path) -> None:
    from tfbackend.inspection.page import render_page

    text = render_page(found)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError("The page cannot be written.", where=str(path), found=str(error)) from error


def _fail(model: str, error: TfbackendError, as_json: bool) -> None:
    """One sentence, or the same as JSON; the model does not serve, as far as can be known."""
    if as_json:
        from tfbackend.inspection.document import failure

        print(json.dumps(failure(model, str(error)), indent=1))
    else:
        print(f"tfbackend: error: {error}", file=sys.stderr)
    raise typer.Exit(FAILED) from error


def _print(found: Inspection, wanted: dict[str, bool], page: Path | None) -> None:
    from rich.console import Console

    from tfbackend.inspection import screen

    console = Console()
    if not console.is_terminal:
        console = Console(width=int(os.environ.get("COLUMNS") or _WIDTH))
    print_report(console, found, wanted)
    if page is not None:
        console.print(f"The page is in {page}", highlight=False, style=screen.HINT)


def print_report(console: Console, found: Inspection, wanted: dict[str, bool]) -> None:
    """The first screen, then the sections that are wanted."""
    from tfbackend.inspection import screen

    sections = {
        "tree": screen.module_tree,
        "diff": screen.forwards,
        "layout": screen.parallel_layout,
        "ledger": screen.ledger,
    }
    parts = [screen.first_screen(found)]
    if any(wanted.values()):
        parts.append(screen.everything_found(found))
    parts += [make(found) for name, make in sections.items() if wanted.get(name)]
    screen.print_sections(console, parts)
