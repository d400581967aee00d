"""Which tensors of a run depend on tokens that the model counted itself, and where it did.

An engine's batch is a row of tokens of many requests, each at a position of its own that the engine knows. A model that
numbers its tokens 0, 1, 2 ..., takes the first rows of a table or adds up a mask, instead of using the positions it is
given, numbers them wrongly there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tfbackend.graph.query import is_in_place
from tfbackend.graph.tracing import Span, span_of

_COUNTING = frozenset({"arange", "range", "linspace", "cumsum", "cumulative_sum", "cumcount"})


_REPEATING = frozenset("expand expand_as broadcast_to repeat tile repeat_interleave broadcast_tensors".split())
"""Names of operations that make an axis of tokens by giving each the same."""


class Count(NamedTuple):
    """One place where a model counted the tokens of a call.

    Attributes:
        path: the module that was running, relative to the base model.
        method: the method of its class that counts, "" where the place is in none.
        span: the expression there.
        start: the number that the first token got, the others one more each; None where they got something else.
        axis: None where the numbers themselves were made, else the axis of a table whose rows were taken.
        place: "file.py:line".
    """

    path: str
    method: str
    span: Span | None
    start: int | None
    axis: int | None
    place: str


class CountedTokens(TorchFunctionMode):
    """Follows, while entered, everything computed from a count of `tokens` tokens.

    Counting as many things as there are tokens is taken for counting tokens, and as many rows of `tables` for a row for
    each token; experts, chunks and elements of a head are counted too.
    """

    def __init__(
        self,
        tokens: int,
        running: Sequence[tuple[str, nn.Module]] = (),
        tables: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.tokens, self.running = tokens, running
        self.counts: list[Count] = []
        self._counted: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}
        self._tables = {id(table): table for table in tables}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._counted

    def behind(self, tensor: torch.Tensor) -> list[Count]:
        """The counts that the tensor was computed from."""
        known = self._counted.get(id(tensor))
        return [self.counts[number] for number in sorted(known[1])] if known else []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and note its result where an input was noted or it counts."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        origins = frozenset[int]().union(*(self._counted[id(x)][1] for x in given if x in self))
        if name in _COUNTING and self.tokens in result.shape:
            origins |= {self._note(_first_number(func, name, args, kwargs), None)}
        elif (rows := self._rows(name, args, given, result)) is not None:
            origins |= {self._note(*rows)}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if origins:
            made += given[:1] if is_in_place(name) else []
            self._counted |= {id(x): (x, origins) for x in made}
        elif given and all(id(x) in self._tables for x in given):
            self._tables |= {id(x): x for x in made}
        return result

    def _rows(
        self, name: str, args: Any, given: Sequence[torch.Tensor], result: Any
    ) -> tuple[int | None, int | None] | None:
        """(first row, axis) where as many rows of a table are taken as there are tokens; without them where they are
        taken in another way than as one slice."""
        if not given or not all(id(x) in self._tables for x in given):
            return None
        if name in _REPEATING or name.startswith("new_") or any(self.tokens in x.shape for x in given):
            return None
        pieces = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if not any(self.tokens in piece.shape for piece in pieces):
            return None
        index = args[1] if name == "__getitem__" else None
        index = index if isinstance(index, tuple) else (index,)
        for axis, taken in enumerate(index):
            if not isinstance(taken, (slice, int)):
                break
            if isinstance(taken, slice) and taken.step in (None, 1) and pieces[0].dim() == args[0].dim():
                start, stop, _ = taken.indices(args[0].shape[axis])
                if stop - start == self.tokens:
                    return start, axis
        return None, None

    def _note(self, start: int | None, axis: int | None) -> int:
        path, module = self.running[-1] if self.running else ("", None)
        frame = _caller()
        method = _method_of(type(module), frame) if module is not None else ""
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame else ""
        count = Count(path, method, span_of(frame) if frame else None, start, axis, place)
        if count not in self.counts:
            self.counts.append(count)
        return self.counts.index(count)


def _first_number(func: Any, name: str, args: Any, kwargs: Any) -> int | None:
    """Where the numbers made are whole and rise by one: the first of them."""
    if name != "arange":
        return None
    numbers = func(*args, **{**kwargs, "device": "cpu"})
    first = int(numbers[0])
    return first if torch.equal(numbers.double(), torch.arange(first, first + len(numbers)).double()) else None


def _caller() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "tfbackend"):
            return frame
        frame = frame.f_back
    return None


def _method_of(cls: type[nn.Module], frame: FrameType | None) -> str:
    """Name of the plain method of `cls` that runs in `frame`, the forward beneath its decorators; "" if none does."""
    name = frame.f_code.co_name if frame is not None else ""
    member = inspect.unwrap(cls.forward) if name == "forward" else inspect.getattr_static(cls, name, None)
    return name if frame and isinstance(member, FunctionType) and member.__code__ is frame.f_code else ""
