"""What a proof depends on, as text that is the same in every process: the name that its result is kept under."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import marshal
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_map

from tfbackend import __version__
from tfbackend.fusers.base import Rewrite, Site
from tfbackend.graph.kinds import own_state

_NAMES_ONLY = ("_name_or_path", "name_or_path", "transformers_version", "architectures")


def content(rewrite: Rewrite) -> tuple[Any, ...]:
    """All of a rewrite but its site and its words."""
    return (
        rewrite.fuser,
        rewrite.layer,
        rewrite.children,
        rewrite.removes,
        rewrite.edits,
        rewrite.weights,
        rewrite.attributes,
        rewrite.styles,
        rewrite.outputs,
    )


def proof_key(site: Site, group: Sequence[Rewrite]) -> str:
    """Equal where the same code runs with the same numbers on the same shapes, on both sides."""
    calls = site.observation.calls.get(site.kind.first, [])
    return _digest([module_key(site.module, calls), [content(rewrite) for rewrite in group]])


def module_key(module: nn.Module, calls: Sequence[Any]) -> str:
    """Equal where the same code runs with the same numbers on the same shapes.

    Code counts by whole files, those of base classes included, because a forward calls helpers beside its class.
    """
    modules = list(module.named_modules())
    classes = {cls for _, inner in modules for cls in type(inner).__mro__ if not _is_torchs(cls)}
    parts = [
        sorted(map(_code, classes)),
        [(name, type(inner).__qualname__, _state(inner, inner is module)) for name, inner in modules],
        _outline(list(calls)),
        (__version__, torch.__version__, transformers.__version__),
        [_file_digest(str(path), path.stat().st_mtime_ns) for path in _own_files()],
    ]
    return _digest(parts)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _state(module: nn.Module, outermost: bool) -> Any:
    # Its own layer number is told by its kind where it matters.
    return own_state(module, () if outermost else ("layer_idx",), opaque=_lasting)


def _lasting(value: Any) -> Any:
    """An attribute that is no plain value, as text that outlives the process."""
    if hasattr(value, "to_dict"):
        fields = {key: item for key, item in value.to_dict().items() if key not in _NAMES_ONLY}
        return json.dumps(fields, sort_keys=True, default=str)
    if isinstance(value, functools.partial):
        return "partial", _lasting(value.func), repr(value.args), repr(sorted(value.keywords.items()))
    code = getattr(value, "__code__", None)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return name, hashlib.sha256(marshal.dumps(code)).hexdigest() if isinstance(code, CodeType) else ""


def _is_torchs(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("torch", "builtins", "typing", "abc")


def _code(cls: type) -> str:
    # A class knows its module by name, and that name may have been given to another file since; its functions know.
    files = [member.__code__.co_filename for member in vars(cls).values() if isinstance(member, FunctionType)]
    try:
        path = Path(files[0] if files else inspect.getsourcefile(cls) or "")
        return _file_digest(str(path), path.stat().st_mtime_ns)
    except (OSError, TypeError):
        forward = inspect.unwrap(getattr(cls, "forward", object))
        return f"{cls.__qualname__} {_lasting(forward)}"


@functools.lru_cache(maxsize=1024)
def _file_digest(path: str, mtime_ns: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _own_files() -> list[Path]:
    here = Path(__file__).parent
    return [
        here / name
        for name in (
            "proof.py",
            "proof_key.py",
            "proof_parts.py",
            "layerspecs.py",
            "activations.py",
            "expertspec.py",
            "mlaspec.py",
            "tablespec.py",
            "statespec.py",
            "ssdspec.py",
            "shortconvspec.py",
            "mixing.py",
            "graph/trial.py",
        )
    ]


def _outline(value: Any) -> Any:
    def outline(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return tuple(x.shape), str(x.dtype)
        return x if isinstance(x, (int, float, str, bool)) else str(type(x))

    return tree_map(outline, value)
