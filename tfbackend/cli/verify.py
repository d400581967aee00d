"""`tfbackend verify MODEL`: is it served right? A ladder of evidence, each rung with a verdict and a figure."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import typer

from tfbackend.cli.inspect import proof_folder
from tfbackend.errors import ConfigError, TfbackendError

if TYPE_CHECKING:
    from rich.console import Console

    from tfbackend.verification.ladder import Listener, Report, Request

VERIFY_HELP = "Say whether MODEL is served right: its answers against Transformers', and against themselves."
COULD_NOT_TELL = 2
_WIDTH = 120

Model = typer.Argument(
    metavar="MODEL", help="A folder, a config.json, or a repository of the Hugging Face Hub.", show_default=False
)


def verify_command(
    model: str = Model,
    quick: bool = typer.Option(False, "--quick", help="Up to equality with Transformers, on a few short prompts."),
    full: bool = typer.Option(False, "--full", help="Compiled, and on two ranks, too."),
    trust_remote_code: bool = typer.Option(False, help="Run code that comes with the model."),
    as_json: bool = typer.Option(False, "--json", help="All of it as JSON, on standard output."),
) -> None:
    """Say whether MODEL is served right: its answers against Transformers', and against themselves.

    Without weights at hand, a tiny random checkpoint of the same architecture stands in for them.

    Exit status: 0 pass, 1 fail, 2 could not tell.
    """
    level = "quick" if quick else "full" if full else "default"
    try:
        if quick and full:
            raise ConfigError("Both --quick and --full are given.", remedy="Leave one of them out")
        report = _climb(model, level, trust_remote_code, as_json)
    except TfbackendError as error:
        if as_json:
            from tfbackend.verification.document import failure

            print(json.dumps(failure(model, level, str(error)), indent=1))
        else:
            print(f"tfbackend: error: {error}", file=sys.stderr)
        raise typer.Exit(COULD_NOT_TELL) from error
    from tfbackend.verification.rungs import STATUS, overall

    raise typer.Exit(STATUS[overall(report.results)])


def _climb(model: str, level: str, trust_remote_code: bool, as_json: bool) -> Report:
    from tfbackend.verification.ladder import Listener, Request
    from tfbackend.verification.screen import Screen, summary

    request = Request(model, level, trust_remote_code, proof_folder())
    if as_json:
        from tfbackend.verification.document import document

        report = _run(request, Listener())
        json.dump(document(report), sys.stdout, indent=1)
        print()
        return report
    console = _console()
    with Screen(console) as screen:
        report = _run(request, screen)
    console.print()
    console.print(summary(report))
    return report


def _run(request: Request, listener: Listener) -> Report:
    from transformers.utils import logging

    from tfbackend.verification.ladder import climb
    from tfbackend.verification.workers import Workers

    logging.set_verbosity_error()
    workers = Workers()
    try:
        return climb(request, workers, listener)
    finally:
        workers.close()


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=int(os.environ.get("COLUMNS") or _WIDTH))
    return console
