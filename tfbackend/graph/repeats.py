"""Layers that only repeat one seen before need not run again in an observed run: what is known of the first is theirs.

A layer repeats another if both are of one kind, whatever their layer number, are called with the same objects, but for
the activations that earlier layers made, and are given nothing that layers could talk through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tfbackend.graph.kinds import layer_key

if TYPE_CHECKING:
    from tfbackend.graph.observe import Observation


class Repeats:
    """Knows the layers of a model that have run."""

    def __init__(self, base: nn.Module) -> None:
        lists = [(path, m) for path, m in base.named_modules() if isinstance(m, nn.ModuleList)]
        self.members = {f"{path}.{name}" for path, m in lists for name, _ in m.named_children()}
        self._ran: dict[Any, str] = {}
        self._made: dict[int, torch.Tensor] = {}

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[str, Any]:
        """(path of the layer that this one repeats or "", key to note it by once it ran)."""
        if path not in self.members or not _only_plain((args, kwargs)):
            return "", None
        key = (layer_key(module), self._manner((args, kwargs)))
        first = self._ran.get(key, "")
        return (first, None) if first else ("", key)

    def after(self, path: str, key: Any, given: Any, output: Any) -> None:
        """Note that a layer ran; one that hands on what it was given is not a pattern for others."""
        leaves = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        if path in self.members:
            self._made |= {id(x): x for x in leaves}
        given_ids = {id(x) for x in tree_leaves(given)}
        if key is not None and not any(id(x) in given_ids for x in leaves):
            self._ran[key] = path

    def _manner(self, call: Any) -> Any:
        leaves, spec = tree_flatten(call)
        return str(spec), tuple(self._mark(x) for x in leaves)

    def _mark(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return (tuple(x.shape), x.dtype) if id(x) in self._made else id(x)
        return type(x), x


def repeat(seen: Observation, first: str, path: str) -> Any:
    """Copy what is known of layer `first` and all inside it to `path`; its output, as new tensors."""
    tables: tuple[dict[str, Any], ...] = (seen.calls, seen.outputs, seen.attention, seen.inline)
    for table in tables:
        for known in [*_inside(table, first)]:
            table[path + known.removeprefix(first)] = table[known]
    return tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, seen.outputs[first])


def _inside(table: Any, first: str) -> Iterator[str]:
    for known in table:
        if known == first or known.startswith(f"{first}."):
            yield known


def _only_plain(value: Any) -> bool:
    """Whether a call hands over tensors and plain values only, in tuples or as keywords."""
    args, kwargs = value
    return all(_plain(x) for x in (*args, *kwargs.values()))


def _plain(x: Any) -> bool:
    if isinstance(x, tuple):
        return all(_plain(item) for item in x)
    return isinstance(x, (torch.Tensor, bool, int, float, str, type(None)))
