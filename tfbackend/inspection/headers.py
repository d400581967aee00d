"""Names, shapes and dtypes of a checkpoint's tensors, from the headers of its safetensors files alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tfbackend.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a checkpoint. `shape` is None where only an index names it; `dtype` is safetensors' own word."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    file: str

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file, 0 where its shape is not known."""
        return math.prod(self.shape) * _BYTES.get(self.dtype, 0) if self.shape is not None else 0


@dataclass(frozen=True)
class Headers:
    """What can be known of a checkpoint without reading a weight.

    Attributes:
        tensors: all of them, in the order of the files.
        files: names of the weight files.
        problems: what is wrong with the files, as sentences.
        note: what is worth knowing about where this was read from, "" for nothing.
    """

    tensors: tuple[TensorHeader, ...]
    files: tuple[str, ...]
    problems: tuple[str, ...] = ()
    note: str = ""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def read_folder(folder: Path) -> Headers | None:
    """Headers of the safetensors files that vLLM would load from `folder`; None where it holds no weights at all.

    An index decides which files count. Files that it names and that are not there are a problem, unless none is there:
    then the index alone gives the names.

    Raises:
        CheckpointError: the index cannot be read.
    """
    index = _read_index(folder / INDEX)
    if index is not None:
        names = sorted(set(index.values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if len(absent) == len(names):
            tensors = tuple(TensorHeader(name, None, "", file) for name, file in index.items())
            return Headers(tensors, tuple(names), note=f"only {INDEX} is here: names are known, shapes are not")
        return _read_files(folder, names, absent)
    names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if names:
        return _read_files(folder, names, [])
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return Headers(
            (),
            tuple(pickled),
            problems=(
                f"The weights are pickled ({pickled[0]}), which cannot be inspected without running them; "
                "save them as safetensors",
            ),
        )
    return None


def _read_index(path: Path) -> Mapping[str, str] | None:
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "The index of the checkpoint cannot be read.",
            where=str(path),
            found=repr(error),
            remedy="Download it again",
        ) from error


def _read_files(folder: Path, names: Iterable[str], absent: Iterable[str]) -> Headers:
    tensors: list[TensorHeader] = []
    problems = [f"{name} is named by {INDEX} and is not there; download it" for name in absent]
    present = [name for name in names if (folder / name).is_file()]
    for name in present:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118, it is no mapping
                    part = file.get_slice(key)
                    tensors.append(TensorHeader(key, tuple(part.get_shape()), str(part.get_dtype()), name))
        except (SafetensorError, OSError) as error:
            problems.append(f"{name} is damaged or was not downloaded completely ({error}); download it again")
    return Headers(tuple(tensors), tuple(present), tuple(problems))
