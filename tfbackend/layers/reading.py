"""Reads the tensors of a checkpoint as vLLM's loader gives them, and says which file it is where one cannot be read.

vLLM's iterators open files lazily, so that a file that is missing or damaged fails in the middle of loading, with the
words of whatever was reading at the time.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tfbackend.errors import CheckpointError

_AGAIN = "Compare the sizes of the files with those that were published, and download the checkpoint again"


NO_WEIGHTS = "Cannot find any model weights"
"""How vLLM begins when a folder has no file of weights."""


def readable(weights: Iterable[tuple[str, torch.Tensor]], source: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors. `source` is the folder that they come from, or the name that it was downloaded by.

    Raises:
        CheckpointError: a file is missing, damaged, or a pickle that holds more than tensors.
    """
    last = ""
    try:
        for name, tensor in weights:
            last = name
            yield name, tensor
    except pickle.UnpicklingError as error:
        raise _pickled(source) from error
    except (SafetensorError, EOFError) as error:
        raise _damaged(source, last, error) from error
    except (OSError, ValueError, LookupError) as error:
        raise _unreadable(source, error) from error
    except RuntimeError as error:
        if not str(error).startswith(NO_WEIGHTS):
            raise
        raise _absent(source) from error


def _pickled(source: str) -> CheckpointError:
    return CheckpointError(
        "A pickled file of the checkpoint holds more than tensors; reading it would run code, so it was not read.",
        where=source or None,
        found=_names(source, "*.bin", "*.pt", "*.pth") or None,
        needed="tensors alone, in .safetensors files",
        remedy="Save it with `save_pretrained` on a machine that trusts it",
    )


def _damaged(source: str, last: str, error: Exception) -> CheckpointError:
    bad = [file.name for file in _files(source, "*.safetensors") if not _opens(file)]
    after = f"the file that was read after tensor {last}" if last else "the file that was read first"
    return CheckpointError(
        "A file of the checkpoint is damaged or was not downloaded completely.",
        where=f"{', '.join(bad)} in {source}" if bad else after,
        found=str(error),
        needed="a whole .safetensors file",
        remedy=_AGAIN,
    )


def _unreadable(source: str, error: Exception) -> CheckpointError:
    bad = [file.name for file in _files(source, "*.index.json") if not _is_index(file)]
    if bad:
        return CheckpointError(
            "The index of the checkpoint's files cannot be read.",
            where=f"{', '.join(bad)} in {source}",
            found=f"{type(error).__name__}: {error}",
            needed="JSON with a weight_map, tensor by tensor",
            remedy="Download the index again",
        )
    return CheckpointError(
        "The files of the checkpoint cannot be read.",
        where=source or None,
        found=f"{type(error).__name__}: {error}",
        remedy=_AGAIN,
    )


def _absent(source: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint has no weights.",
        where=source or None,
        found=_names(source, "*") or "no file",
        needed="*.safetensors",
        remedy="Give the folder that `save_pretrained` or a hub download wrote",
    )


def _files(source: str, pattern: str) -> list[Path]:
    """The matching files of a folder of this machine; none where the source is a name that was downloaded by."""
    return sorted(Path(source).glob(pattern)) if source and Path(source).is_dir() else []


def _names(source: str, *patterns: str) -> str:
    names = [file.name for pattern in patterns for file in _files(source, pattern)]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _opens(file: Path) -> bool:
    try:
        with safe_open(file, "pt"):
            return True
    except (SafetensorError, OSError):
        return False


def _is_index(file: Path) -> bool:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get("weight_map"), dict)
