"""State that a mixer keeps between calls, as frozen data; see layerspecs.

A mixer (a state space, a linear attention, a short convolution) sees the tokens of a request in order and carries what
it needs of the past in tensors of fixed shape. The shapes are those that the mixer itself asked its cache for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

CONV, RECURRENT = "conv", "recurrent"
"""The two kinds of state of Transformers' cache: the latest inputs of a convolution, and what a recurrence carries."""
KEPT = "kept"
"""State that a mixer keeps elsewhere, in a place that it was seen to use, see Holder."""
ALIGNMENT = 16
"""Bytes that the place of each state in a page is a multiple of, so that it can be seen as any dtype."""


@dataclass(frozen=True)
class State:
    """One tensor of a request's state.

    Attributes:
        kind: CONV, RECURRENT or KEPT.
        number: which of that kind it is to the mixer, as a rule 0.
        shape: without the axis of requests.
        dtype: as the mixer gave it.
        initial: what all of it is before the first token.
    """

    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float = 0.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


Path = tuple[Any, ...]
"""The way to a tensor in a structure: names of attributes, numbers of elements, keys."""


@dataclass(frozen=True)
class Slot:
    """Stands in a template where the tensor of a state goes: in a copy of the template with `filled` it is there."""

    number: int

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        tensors = memo.get(id(Slot))
        return self if tensors is None else tensors[self.number]


def filled(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A copy of a structure with the tensors in place of its Slots."""
    return copy.deepcopy(template, {id(Slot): tensors})


@dataclass(frozen=True)
class Holder:
    """Where a mixer that asks no cache of Transformers keeps its state.

    Attributes:
        argument: the argument that its states are handed over in; "" where they are attributes of the mixer and of what
            is inside it.
        fresh: what that argument is for the first tokens, a structure with Slots; of attributes, those that are there
            before the first tokens, as a dict of Slots by path.
        begun: likewise for later tokens.
        places: where each state is after a call: a path in the argument, in what the mixer returns, or from the mixer.
        returned: whether the mixer returns its states.
        axes: for each state, the axis behind that of requests along which the structure has the states of all layers
            in one tensor, and its length; None where it has a tensor for each.
    """

    argument: str
    fresh: Any = field(repr=False)
    begun: Any = field(repr=False)
    places: tuple[Path, ...]
    returned: bool = False
    axes: tuple[tuple[int, int] | None, ...] = ()


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
        separate: whether it goes wrong where it is given the next tokens of several requests at once.
        positions: the argument that takes the positions [requests, tokens], "" for none.
        flags: arguments that are plain values where a model keeps state.
        holder: where it keeps its states; None for a cache of Transformers.
    """

    hidden: str
    cache: str
    absent: tuple[str, ...]
    states: tuple[State, ...]
    outputs: tuple[tuple[int, ...] | None, ...]
    tupled: bool
    stepwise: bool = False
    apart: float = 0.0
    separate: bool = False
    positions: str = ""
    flags: tuple[tuple[str, Any], ...] = ()
    holder: Holder | None = None

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
        parts += ["request by request"] if self.separate else []
        if self.apart:
            parts.append(f"decoded as Transformers decodes, {self.apart:.1g} off its own run over whole texts")
        return ", ".join(parts)
