"""What each rank needs memory for, counted as vLLM counts it before it starts.

The KV cache is a pool of blocks of 16 tokens. Layers that keep the same tokens form groups of equal size; a block
holds 16 tokens of every layer of one group, so a request takes blocks for each group. A full-attention group takes
one for every 16 tokens; a sliding-window group takes ceil((window - 1 + tokens in flight) / 16) + 1 at most, however
long the request. Groups are made as vLLM's hybrid KV cache manager (its default) makes them: as many layers as the
rarer kind of layer has, the last group of a kind padded; or as the commoner kind has, where that is less than half
again as many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfbackend.inspection.layout import ServedParameter
from tfbackend.layerspecs import AttentionSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.nativespec import NativeSpec, state_bytes
from tfbackend.statespec import StateSpec

BLOCK = 16
"""Tokens of a KV block, vLLM's default."""
BATCHED_TOKENS = 8192
"""vLLM's default --max-num-batched-tokens for its server on a large GPU."""
IN_FLIGHT_STEPS = 2
"""Batches that vLLM's asynchronous scheduling, its default, has under way."""
UTILISATION = 0.92
"""vLLM's default --gpu-memory-utilization."""
ALLOWANCE = 2 * 10**9
"""Bytes left for activations, CUDA graphs and communication. vLLM measures them at start-up; we cannot."""


@dataclass(frozen=True)
class Group:
    """Layers that share a block table.

    Attributes:
        layers: how many layers there are.
        window: how many tokens they keep, None for all.
        tables: how many block tables they are split into.
        block: tokens of one block.
    """

    layers: int
    window: int | None
    tables: int
    block: int = BLOCK

    def blocks(self, tokens: int) -> int:
        """Blocks of one request of so many tokens, over all tables of the group."""
        if self.window is None:
            return self.tables * math.ceil(tokens / self.block)
        kept = min(self.window - 1 + BATCHED_TOKENS * IN_FLIGHT_STEPS, tokens)
        return self.tables * (math.ceil(kept / self.block) + 1)


@dataclass(frozen=True)
class Cache:
    """The KV cache of one pipeline stage on one rank.

    Attributes:
        groups: see above.
        block_bytes: bytes of one block.
    """

    groups: tuple[Group, ...]
    block_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes once every window is full; of one layer where all layers have a window, 0."""
        return sum(g.tables * self.block_bytes // g.block for g in self.groups if g.window is None)

    def request_bytes(self, tokens: int) -> int:
        """Most bytes that one request of so many tokens holds."""
        return self.block_bytes * sum(group.blocks(tokens) for group in self.groups)

    def longest(self, available: int, limit: int) -> int:
        """Longest request, in tokens up to `limit`, that fits into so many bytes; 0 where not even one token does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.request_bytes(middle) <= available else (low, middle - 1)
        return low


def make_cache(specs: Iterable[AttentionSpec | MLASpec], tp: int, itemsize: int) -> Cache:
    """The cache for attention layers of these specs.

    Args:
        tp: tensor-parallel ranks.
        itemsize: bytes of a cached number.
    """
    kinds: Counter[tuple[int, int | None]] = Counter()
    for spec in specs:
        kinds[spec.cached_numbers(tp) * itemsize, spec.window or spec.chunk] += 1
    if not kinds:
        return Cache((), 0)
    if len({window for _, window in kinds}) == 1:
        row = sum(row * count for (row, _), count in kinds.items())
        return Cache((Group(sum(kinds.values()), next(iter(kinds))[1], 1),), BLOCK * row)
    widest, size = max(row for row, _ in kinds), _group_size(list(kinds.values()))
    groups = []
    for (row, window), count in kinds.items():
        block = BLOCK * (widest // row) if widest % row == 0 else BLOCK
        groups.append(Group(count, window, math.ceil(count / size), block))
    return Cache(tuple(groups), BLOCK * widest * size)


def _group_size(counts: Sequence[int]) -> int:
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def stages(layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage: equal shares, the rest one each from the last but one stage backward."""
    sizes = [layers // pp] * pp
    for back in range(2, layers % pp + 2):
        sizes[-back] += 1
    starts = [sum(sizes[:index]) for index in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class StageMemory:
    """One pipeline stage on one rank: its layers, bytes of weights, its cache, and the bytes of state that each
    request has in it, however long it is."""

    layers: range
    weights: int
    cache: Cache
    state: int = 0

    def request_bytes(self, tokens: int) -> int:
        """Most bytes that one request of so many tokens holds."""
        return self.state + self.cache.request_bytes(tokens)

    def longest(self, available: int, limit: int) -> int:
        """Longest request, in tokens up to `limit`, that fits into so many bytes; 0 where not even one token does."""
        return self.cache.longest(available - self.state, limit) if available >= self.state else 0


@dataclass(frozen=True)
class Fit:
    """What a GPU of a given size holds.

    Attributes:
        gpu: bytes of memory.
        utilisation: share of it that vLLM may use.
        available: bytes left for the KV cache on the fullest stage, negative where the weights do not fit.
        longest: longest request in tokens, up to `limit`.
        limit: longest that the model allows.
        requests: how many requests of the longest length fit at once.
    """

    gpu: int
    utilisation: float
    available: int
    longest: int
    limit: int
    requests: float


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, by pipeline stage. `fit` is None where no size of GPU was given."""

    stages: tuple[StageMemory, ...]
    fit: Fit | None
    estimated: bool = False

    @property
    def weights(self) -> int:
        """Bytes of weights on the fullest stage."""
        return max(stage.weights for stage in self.stages)

    @property
    def kv_bytes_per_token(self) -> int:
        return max(stage.cache.bytes_per_token for stage in self.stages)

    @property
    def state_bytes_per_request(self) -> int:
        """On each rank of the stage that keeps the most."""
        return max(stage.state for stage in self.stages)


def measure(
    parameters: Sequence[ServedParameter],
    attention: Sequence[tuple[int | None, AttentionSpec | MLASpec]],
    states: Sequence[tuple[int | None, StateSpec | NativeSpec]] = (),
    *,
    tp: int,
    pp: int,
    itemsize: int,
    bits: float | None = None,
) -> tuple[StageMemory, ...]:
    """Weights and cache of each stage.

    Args:
        attention: (number of the layer, its attention).
        states: (number of the layer, its state), counted without the padding of pages.
        bits: of a weight of a linear in a quantized checkpoint, None for unquantized.
    """
    count = 1 + max((p.layer for p in parameters if p.layer is not None), default=-1)
    parts = stages(count, pp)
    made = []
    for index, part in enumerate(parts):
        own = [p for p in parameters if _on_stage(p, part, index == 0, index == pp - 1)]
        caches = [spec for layer, spec in attention if (layer in part) or (layer is None and index == 0)]
        weights = sum(_bytes(p, bits) for p in own)
        if index and index == pp - 1:  # the head's table, tied to one of another stage
            weights += sum(_untied_bytes(p) for p in own if p.tied_to)
        held = [spec for layer, spec in states if (layer in part) or (layer is None and index == 0)]
        kept = sum(state_bytes(spec, tp, itemsize) for spec in held)
        made.append(StageMemory(part, weights, make_cache(caches, tp, itemsize), kept))
    return tuple(made)


def _on_stage(parameter: ServedParameter, part: range, first: bool, last: bool) -> bool:
    if parameter.layer is not None:
        return parameter.layer in part
    early = parameter.how == "vocabulary" and parameter.name.startswith("model.")
    return first if early else last


def _bytes(parameter: ServedParameter, bits: float | None) -> int:
    if bits is not None and parameter.linear and parameter.layer is not None:
        return math.ceil(math.prod(parameter.rank_shape) * bits / 8)
    return parameter.rank_bytes


def _untied_bytes(parameter: ServedParameter) -> int:
    return math.prod(parameter.rank_shape) * parameter.dtype.itemsize


def fit(parts: Sequence[StageMemory], gpu: int, utilisation: float, limit: int) -> Fit:
    """What fits on GPUs of `gpu` bytes each; every stage has to hold the request."""
    rooms = [int(gpu * utilisation) - stage.weights - ALLOWANCE for stage in parts]
    longest = min(stage.longest(room, limit) for stage, room in zip(parts, rooms, strict=True))
    requests = math.inf
    for stage, room in zip(parts, rooms, strict=True):
        need = stage.request_bytes(longest) if longest else 0
        requests = min(requests, room / need) if need else requests
    return Fit(gpu, utilisation, min(rooms), longest, limit, 0.0 if not longest else requests)
