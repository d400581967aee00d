"""What MODEL stands for: a folder, a config.json, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from tfbackend import meta
from tfbackend.errors import ConfigError
from tfbackend.inspection.headers import Headers, TensorHeader, read_folder

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


@dataclass(frozen=True)
class Target:
    """MODEL, found.

    Attributes:
        name: as the user wrote it.
        config: its config.
        headers: those of its weights; None where there are none at hand.
    """

    name: str
    config: PretrainedConfig
    headers: Headers | None


def find(model: str, *, trust_remote_code: bool = False) -> Target:
    """Read the config and, where there are any, the headers of the weights.

    Raises:
        ConfigError: there is no such folder, file or repository, the network is absent, or the config is not one.
        CheckpointError: an index file cannot be read.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return Target(model, meta.load_config(str(path), trust_remote_code=trust_remote_code), None)
    if path.is_dir():
        return Target(model, meta.load_config(str(path), trust_remote_code=trust_remote_code), read_folder(path))
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".json"):
        raise ConfigError("There is no such folder or file.", where=model, remedy="Check the path")
    return _from_hub(model, trust_remote_code)


def json_reader(model: str) -> Callable[[str], Any]:
    """Reads files of JSON beside the config of MODEL: their path in the folder -> what they hold, None for no file."""
    path = Path(model).expanduser()

    def read(name: str) -> Any:
        found = (
            None
            if path.is_file()
            else cached_file(
                str(path) if path.is_dir() else model,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        )
        return json.loads(Path(found).read_text(encoding="utf-8")) if found else None

    return read


def _from_hub(model: str, trust_remote_code: bool) -> Target:
    folder = Path(_config_of(model)).parent
    config = meta.load_config(str(folder) if not trust_remote_code else model, trust_remote_code=trust_remote_code)
    return Target(model, config, read_folder(folder) or _headers_of(model))


def _config_of(model: str) -> str:
    try:
        return str(huggingface_hub.hf_hub_download(model, "config.json"))
    except HFValidationError as error:
        raise ConfigError("This is neither a path nor the id of a repository.", where=model) from error
    except GatedRepoError as error:
        raise ConfigError(
            "The repository is gated.",
            where=model,
            remedy="Accept its terms on the Hub and log in with `hf auth login`",
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            "The Hub has no such repository, and there is no such folder.",
            where=model,
            remedy="Check the spelling, or log in with `hf auth login` if it is private",
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ConfigError("The repository has no config.json.", where=model) from error
        raise ConfigError(
            "There is no such folder, and the Hugging Face Hub cannot be reached.",
            where=model,
            remedy="Give a folder or a config.json, or try again with a network",
        ) from error


def _headers_of(model: str) -> Headers | None:
    """Headers through the Hub's ranged reads, a few kilobytes a file; None where the repository has no safetensors."""
    try:
        found = huggingface_hub.get_safetensors_metadata(model)
    except NotASafetensorsRepoError:
        return None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        return Headers((), (), note=f"the headers could not be fetched: {type(error).__name__}")
    tensors = tuple(
        TensorHeader(name, tuple(info.shape), info.dtype, file)
        for file, metadata in found.files_metadata.items()
        for name, info in metadata.tensors.items()
    )
    return Headers(tensors, tuple(found.files_metadata))


def pick_dtype(wanted: str, config: PretrainedConfig) -> torch.dtype:
    """The dtype that `vllm serve --dtype` would choose on a GPU: "auto" is the config's, float32 becoming bfloat16.

    Raises:
        ConfigError: `wanted` is no dtype that vLLM serves in.
    """
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ConfigError("This is not a dtype to serve in.", found=wanted, needed=", ".join(["auto", *DTYPES]))
        return DTYPES[wanted]
    for owner in (config.get_text_config(), config):
        found = getattr(owner, "dtype", None)
        named = DTYPES.get(found) if isinstance(found, str) else found
        if isinstance(named, torch.dtype) and named in (torch.bfloat16, torch.float16):
            return named
    return torch.bfloat16
