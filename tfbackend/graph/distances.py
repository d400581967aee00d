"""A module that makes a bias for each query and key of how far back the key is, recognised by what it gives.

    bias = self.relative(x, query_positions, key_positions)      [1, heads, queries, keys]

Asked for one query that has as many keys before it as its bias reaches, it gives the row of a table of that query:
column c is the bias of the key `extent - 1 - c` tokens back. All that it gives for other positions must then be found
in that table, and 0 where a key is further back than the table reaches.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.observe import TOKENS
from tfbackend.graph.trial import apart, materialise, random_inputs
from tfbackend.layerspecs import by_distance

_MOST = 1 << 20
"""Numbers of a token's table over all heads; what an engine makes for each of some thousand tokens at a time."""
_TOLERANCE = 1e-5
_KEYS = 11
"""Keys of a trial, another number than that of its tokens."""


class DistanceError(Exception):
    """What a module gives is no table of distances. The message says why."""


@dataclass(frozen=True)
class DistanceTable:
    """How to have a module give tables.

    Attributes:
        queries, keys: its arguments for positions of queries and of keys.
        extent: distances that the table of a token has, 0 among them; further back there is no bias.
    """

    queries: str
    keys: str
    extent: int


def find_table(module: nn.Module, call: Any, longest: int) -> DistanceTable:
    """How `module` gives tables, tried out on random numbers.

    Args:
        module: on meta.
        call: (args, kwargs) of the one call that the model makes of it, tensors on meta.
        longest: tokens of the longest context there will be.

    Raises:
        DistanceError: its bias is not of the query token and the distance alone, or reaches too far.
    """
    trial = _Trial(module, call)
    problem = "it takes no positions of queries and of keys"
    for queries, keys in permutations(trial.counts, 2):
        if trial.takes(queries, keys):
            extent = trial.extent(queries, keys, longest)
            table = DistanceTable(queries, keys, extent)
            trial.check(table, longest)
            return table
        problem = "what it gives is not a row for each query and a column for each key"
    raise DistanceError(problem)


class _Trial:
    def __init__(self, module: nn.Module, call: Any) -> None:
        self.generator = torch.Generator().manual_seed(31)
        self.twin = materialise(module, self.generator)
        args, kwargs = random_inputs(call, module, self.generator)
        self.forward = inspect.unwrap(type(module).forward)
        self.given = inspect.signature(self.forward).bind(self.twin, *args, **kwargs)
        self.counts = [name for name, x in self.given.arguments.items() if _is_positions(x)]

    def run(
        self, queries: tuple[str, torch.Tensor], keys: tuple[str, torch.Tensor], tokens: Sequence[int] = range(TOKENS)
    ) -> torch.Tensor:
        """What it gives for some of the tokens, where they and keys are at these positions."""
        bound, first = copy.copy(self.given), dict(self.given.arguments)
        bound.arguments = {name: _taken(x, tokens) for name, x in first.items()}
        for name, places in (queries, keys):
            bound.arguments[name] = places.view(*first[name].shape[:-1], -1).to(first[name].dtype)
        made = self.forward(*bound.args, **bound.kwargs)
        if not isinstance(made, torch.Tensor) or made.dim() != 4:
            raise DistanceError("it gives something else than a bias for each head, query and key")
        return made

    def takes(self, queries: str, keys: str) -> bool:
        """Whether it gives a row for each position of `queries` and a column for each of `keys`."""
        try:
            made = self.run((queries, torch.arange(TOKENS)), (keys, torch.arange(_KEYS)))
        except RUN_ERRORS:
            return False
        return made.shape[0] == 1 and made.shape[2:] == (TOKENS, _KEYS)

    def extent(self, queries: str, keys: str, longest: int) -> int:
        """How far back the bias of one token reaches, up to the first of `longest` tokens."""
        row = self.run((queries, torch.tensor([longest - 1])), (keys, torch.arange(longest)), [0])
        reached = (row != 0).flatten(0, -2).any(0).nonzero()
        if not len(reached):
            raise DistanceError("what it gives is 0 for all distances")
        extent = longest - int(reached[0])
        if extent * row.shape[1] > _MOST:
            raise DistanceError(f"its bias reaches back over {extent} tokens, too many for a table for each token")
        return extent

    def check(self, table: DistanceTable, longest: int) -> None:
        """Compare what it gives at random positions, near its reach and anywhere, with what its table says."""
        extent = table.extent
        last, before = torch.full((TOKENS,), extent - 1), torch.arange(extent)
        rows = self.run((table.queries, last), (table.keys, before))
        alone = [self.run((table.queries, last[:1]), (table.keys, before), [token]) for token in range(TOKENS)]
        if not apart(rows, torch.cat(alone, dim=2)) <= _TOLERANCE:
            raise DistanceError("what it gives for a token depends on other tokens")
        for reach in (min(2 * extent + 2, longest), longest):
            for queries, keys in self._places(reach):
                made = self.run((table.queries, queries), (table.keys, keys))
                past = queries[:, None] >= keys[None, :]
                wanted = by_distance(rows, queries[:, None] - keys[None, :]).where(past, 0.0)
                if not apart(wanted, made.where(past, 0.0)) <= _TOLERANCE:
                    raise DistanceError("what it gives depends on more than the query token and the distance")

    def _places(self, reach: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for count in (_KEYS, 4 * _KEYS):
            yield tuple(torch.randint(0, reach, (n,), generator=self.generator) for n in (TOKENS, count))  # type: ignore[misc]


def _is_positions(x: Any) -> bool:
    whole = isinstance(x, torch.Tensor) and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    return whole and x.numel() == x.shape[-1] == TOKENS


def _taken(x: Any, tokens: Sequence[int]) -> Any:
    """Some tokens of a tensor that has a place for each, in a tensor of its own; anything else as it is."""
    if not isinstance(x, torch.Tensor) or TOKENS not in x.shape:
        return x
    return x.index_select(tuple(x.shape).index(TOKENS), torch.tensor(tokens))


def makes_bias(output: Any, shape: tuple[int, ...]) -> bool:
    """Whether a module returned one tensor, a bias of that shape or one for all heads."""
    leaves = tree_leaves(output)
    if len(leaves) != 1 or not isinstance(leaves[0], torch.Tensor) or not leaves[0].is_floating_point():
        return False
    return tuple(leaves[0].shape) in (tuple(shape), (1, 1, *shape[2:]))
