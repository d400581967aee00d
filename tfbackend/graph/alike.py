"""Modules of which one speaks for all, also of their buffers' values and of what they are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tfbackend.graph.kinds import branches_on, own_state
from tfbackend.graph.observe import Observation


def representatives(base: nn.Module, paths: Iterable[str], seen: Observation) -> dict[str, str]:
    """Path -> the first path of which the module does the same on real numbers, weights aside.

    Two are alike that share class, attributes but for layer numbers, and values of buffers, and are called with the
    same objects but for what modules with weights made.
    """
    drawn = {id(x) for path, output in seen.outputs.items() if _has_weights(base, path) for x in tree_leaves(output)}
    known: list[tuple[str, Any, dict[str, torch.Tensor]]] = []
    found = {}
    for path in paths:
        module = base.get_submodule(path)
        key = (_inside(module, path), [_mark(x, drawn) for x in tree_leaves(seen.calls[path])])
        buffers = dict(module.named_buffers())
        alike = (other for other, its, theirs in known if its == key and _equal(buffers, theirs))
        found[path] = next(alike, path)
        if found[path] == path:
            known.append((path, key, buffers))
    return found


def _has_weights(base: nn.Module, path: str) -> bool:
    return bool(path) and next(base.get_submodule(path).parameters(), None) is not None


def _inside(module: nn.Module, path: str) -> Any:
    return [
        (name, type(child), own_state(child, _layer_numbers(child, f"{path}.{name}")))
        for name, child in module.named_modules()
    ]


def _layer_numbers(module: nn.Module, path: str) -> tuple[str, ...]:
    """Attributes that hold the number of the layer and are no more than handed to the cache."""
    cls: Any = type(module)
    numbers = {int(part) for part in path.split(".") if part.isdigit()}
    named = [name for name, value in vars(module).items() if type(value) is int and value in numbers]
    return tuple(name for name in named if not branches_on(cls, name))


def _mark(x: Any, drawn: set[int]) -> Any:
    if isinstance(x, torch.Tensor):
        return ("drawn", tuple(x.shape), x.dtype) if id(x) in drawn else id(x)
    return x if isinstance(x, (bool, int, float, str, type(None))) else id(x)


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
