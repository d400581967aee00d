"""State that a mixer keeps between calls, as frozen data; see layerspecs.

A mixer (a state space, a linear attention, a short convolution) sees the tokens of a request in order and carries what
it needs of the past in tensors of fixed shape. The shapes are those that the mixer itself asked its cache for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CONV, RECURRENT = "conv", "recurrent"
"""The two kinds of state of Transformers' cache: the latest inputs of a convolution, and what a recurrence carries."""
ALIGNMENT = 16
"""Bytes that the place of each state in a page is a multiple of, so that it can be seen as any dtype."""


@dataclass(frozen=True)
class State:
    """One tensor of a request's state.

    Attributes:
        kind: CONV or RECURRENT.
        number: which of that kind it is to the mixer, as a rule 0.
        shape: without the axis of requests.
        dtype: as the mixer gave it.
    """

    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class StateSpec:
    """A mixer that is run with the state of each request.

    Attributes:
        hidden: the argument of its forward that takes the tokens, [requests, tokens, width].
        cache: the argument that takes the cache.
        absent: arguments that have no default, and None in the model's own call.
        states: what it keeps of a request.
        outputs: the shape of each tensor it returns, behind [requests, tokens]; None where it returns None.
        tupled: whether it returns a tuple.
        stepwise: whether it goes wrong where it is given several tokens at once after the first call.
        apart: by how much of the largest value its own decoding differs from its own run over all tokens at once;
            0 where no more than rounding does.
    """

    hidden: str
    cache: str
    absent: tuple[str, ...]
    states: tuple[State, ...]
    outputs: tuple[tuple[int, ...] | None, ...]
    tupled: bool
    stepwise: bool = False
    apart: float = 0.0

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in a request's page each state begins, in bytes."""
        ends, at = [], 0
        for state in self.states:
            ends.append(at)
            at += -(-state.nbytes // ALIGNMENT) * ALIGNMENT
        return tuple(ends)

    @property
    def nbytes(self) -> int:
        """Bytes of a request's state, a whole number of alignments."""
        return sum(-(-state.nbytes // ALIGNMENT) * ALIGNMENT for state in self.states)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of a token in each tensor it returns."""
        return tuple(math.prod(shape) for shape in self.outputs if shape is not None)

    def __str__(self) -> str:
        parts = [f"state of {self.nbytes:,} B a request ({', '.join(map(str, self.states))})"]
        parts += ["token by token after the first call"] if self.stepwise else []
        if self.apart:
            parts.append(f"decoded as Transformers decodes, {self.apart:.1g} off its own run over whole texts")
        return ", ".join(parts)
