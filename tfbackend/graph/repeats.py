"""Layers that only repeat one seen before need not run again in an observed run: what is known of the first is theirs.

A layer repeats another if both are of one kind, whatever their layer number, are called with the same objects, but for
the activations that earlier layers made, and are given nothing that layers could talk through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tfbackend.graph.kinds import layer_key
from tfbackend.graph.query import is_within

if TYPE_CHECKING:
    from tfbackend.graph.observe import Observation


@dataclass(frozen=True)
class Ran:
    """One call of a layer: what it and all inside it were called with, asked of attention and returned, by the path
    below the layer. A layer may be called several times in one run, each time in another way."""

    calls: dict[str, list[Any]]
    attention: dict[str, list[Any]]
    outputs: dict[str, Any]
    inline: dict[str, int]


Marks = tuple[dict[str, int], dict[str, int], dict[str, int]]


class Repeats:
    """Knows the layers of a model that have run."""

    def __init__(self, base: nn.Module) -> None:
        lists = [(path, m) for path, m in base.named_modules() if isinstance(m, nn.ModuleList)]
        self.members = {f"{path}.{name}" for path, m in lists for name, _ in m.named_children()}
        self._ran: dict[Any, Ran] = {}
        self._made: dict[int, torch.Tensor] = {}

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Ran | None, Any]:
        """(the call that this one repeats or None, key to note it by once it ran)."""
        if path not in self.members or not _only_plain((args, kwargs)):
            return None, None
        key = (layer_key(module), self._manner((args, kwargs)))
        first = self._ran.get(key)
        return (first, None) if first else (None, key)

    def after(self, path: str, key: Any, given: Any, output: Any, ran: Ran | None) -> None:
        """Note that a layer ran; one that hands on what it was given is not a pattern for others."""
        leaves = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        if path in self.members:
            self._made |= {id(x): x for x in leaves}
        given_ids = {id(x) for x in tree_leaves(given)}
        if ran is not None and not any(id(x) in given_ids for x in leaves):
            self._ran[key] = ran

    def _manner(self, call: Any) -> Any:
        leaves, spec = tree_flatten(call)
        return str(spec), tuple(self._mark(x) for x in leaves)

    def _mark(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return (tuple(x.shape), x.dtype) if id(x) in self._made else id(x)
        return type(x), x


def mark(seen: Observation, path: str) -> Marks:
    """How much is known of layer `path` and all inside it."""
    calls, attention = ({name: len(table[name]) for name in _inside(table, path)} for table in _lists(seen))
    return calls, attention, {name: seen.inline[name] for name in _inside(seen.inline, path)}


def since(seen: Observation, path: str, marks: Marks, output: Any) -> Ran:
    """What was seen of one call of layer `path`, which began at `marks` and gave `output`."""
    calls, attention = (
        {name.removeprefix(path): table[name][begun.get(name, 0) :] for name in _inside(table, path)}
        for table, begun in zip(_lists(seen), marks[:2], strict=True)
    )
    inline = {n.removeprefix(path): seen.inline[n] - marks[2].get(n, 0) for n in _inside(seen.inline, path)}
    outputs = {name.removeprefix(path): seen.outputs[name] for name in _inside(seen.outputs, path)}
    return Ran(calls, attention, outputs | {"": output}, inline)


def repeat(seen: Observation, ran: Ran, path: str) -> Any:
    """Note for layer `path` the same as was seen of another layer's call; its output, as new tensors."""
    for table, known in zip(_lists(seen), (ran.calls, ran.attention), strict=True):
        for below, entries in known.items():
            table.setdefault(path + below, []).extend(entries)
    for below, count in ran.inline.items():
        seen.inline[path + below] = seen.inline.get(path + below, 0) + count
    seen.outputs |= {path + below: output for below, output in ran.outputs.items()}
    return tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, ran.outputs[""])


def _lists(seen: Observation) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    return seen.calls, seen.attention


def _inside(table: Any, first: str) -> Iterator[str]:
    for known in table:
        if is_within(known, first):
            yield known


def _only_plain(value: Any) -> bool:
    """Whether a call hands over tensors and plain values only, in tuples or as keywords."""
    args, kwargs = value
    return all(_plain(x) for x in (*args, *kwargs.values()))


def _plain(x: Any) -> bool:
    if isinstance(x, tuple):
        return all(_plain(item) for item in x)
    return isinstance(x, (torch.Tensor, bool, int, float, str, type(None)))
