"""The `tfbackend` command. Nothing here imports torch or vLLM: `tfbackend --help` has to answer at once."""

from __future__ import annotations

import sys
from typing import Any

import typer
import typer.core

import tfbackend
from tfbackend.cli.inspect import INSPECT_HELP, inspect_command
from tfbackend.cli.serve import SERVE_HELP, PassThroughCommand, serve_command
from tfbackend.cli.verify import VERIFY_HELP, verify_command
from tfbackend.errors import TfbackendError


class _ErrorsAsSentences(typer.core.TyperGroup):
    """Shows our own exceptions as the sentence they carry: a traceback would tell the user nothing more."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TfbackendError as error:
            print(f"tfbackend: error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_ErrorsAsSentences,
    help="Serve any Hugging Face Transformers model in vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="serve", cls=PassThroughCommand, add_help_option=False, help=SERVE_HELP)(serve_command)
app.command(name="inspect", help=INSPECT_HELP)(inspect_command)
app.command(name="verify", help=VERIFY_HELP)(verify_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(tfbackend.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    """Serve any Hugging Face Transformers model in vLLM."""
