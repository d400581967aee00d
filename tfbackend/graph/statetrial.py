"""A mixer tried out on random numbers: what it gives where its tokens come in parts must be what it gives for them all.

An engine hands over a request in parts, the first of any length, later ones of one token or of many. How a mixer takes
them is found by running it, with the same call that the engine's layer makes. A trial shows something only where the
past matters, so each state is also lost once, and must be missed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tfbackend.graph.interface import RUN_ERRORS, answering, unattended
from tfbackend.graph.statecache import advance, beginning, run_alone, tensors_of
from tfbackend.graph.trial import apart, copied, materialise, plain_float32, random_inputs, saved_buffers
from tfbackend.statespec import StateSpec

TOLERANCE = 1e-4
"""Largest difference that is rounding, relative to the largest value: a scan adds up in another order than a step."""
OWN_DIFFERENCE = 1e-2
"""Largest difference that a mixer's own decoding may have from its own run over all tokens."""
_LOUD = 4.0
"""What the tokens are multiplied by in a second round: a clamp is not met by numbers around 1."""
_REQUESTS = 2
_STEPS = (5, *[1] * 8)
_CHUNKS = (2, 4, 7)
_LENGTH = sum(_CHUNKS)


def tried(module: nn.Module, call: Any, spec: StateSpec) -> StateSpec | str:
    """`spec` with how the mixer is to be fed, or why it cannot be.

    Saved buffers are random, as parameters are, unless a mixer is right with no others than those that it makes: what
    it does with whole texts and what it does step by step may each have a buffer, the one made of the other.
    """
    together = _judged(module, call, spec, buffers=True)
    if isinstance(together, str) and any(saved_buffers(module)):
        together = _judged(module, call, spec, buffers=False) if spec.holder else together
        buffers = False
    else:
        buffers = True
    if isinstance(together, StateSpec) and not together.apart:
        return together
    separate = _judged(module, call, replace(spec, separate=True), buffers=buffers)
    better = isinstance(separate, StateSpec) and (isinstance(together, str) or not separate.apart)
    return separate if better else together


def _judged(module: nn.Module, call: Any, spec: StateSpec, *, buffers: bool) -> StateSpec | str:
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad(), plain_float32(), answering(unattended), whole_numbers():
        try:
            return _Trial(materialise(module, generator, buffers=buffers), spec, generator).judge(call)
        except RUN_ERRORS as error:
            return f"it does not run on the CPU: {type(error).__name__}: {error}"


@contextmanager
def whole_numbers() -> Iterator[None]:
    """While entered, float32 products on the CPU are of float32."""
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)


class _Trial:
    def __init__(self, mixer: nn.Module, spec: StateSpec, generator: torch.Generator) -> None:
        self.mixer, self.spec, self.generator = mixer, spec, generator
        self.forward = type(mixer).forward

    def judge(self, call: Any) -> StateSpec | str:
        if problem := self._dropped_arguments(call):
            return problem
        width = call_value(self.mixer, call, self.spec.hidden).shape[-1]
        hidden = torch.randn((_REQUESTS, _LENGTH, width), generator=self.generator)
        whole = self._whole(hidden)
        for index, state in enumerate(self.spec.states):
            if not self._missed(index, hidden, whole):
                return f"nothing shows whether its {state.kind} state {state.number} is kept"
        loud = _LOUD * hidden
        rounds = ((hidden, whole), (loud, self._whole(loud)))
        steps, chunks = (max(_apart(y, self._fed(x, sizes)[0]) for x, y in rounds) for sizes in (_STEPS, _CHUNKS))
        if not steps <= OWN_DIFFERENCE:
            return f"what it gives token by token differs by {steps:.2g} of the largest value from one run over all"
        own = steps if steps > TOLERANCE else 0.0
        return replace(self.spec, stepwise=not chunks <= max(TOLERANCE, own), apart=own)

    def _missed(self, index: int, hidden: torch.Tensor, whole: list[torch.Tensor]) -> bool:
        """Whether it shows in what the mixer gives where state number `index` is lost, or else, where a norm hides it,
        in that state, which otherwise is what it is after all tokens at once."""
        given, after = self._fed(hidden, _STEPS, lost=index)
        if not _apart(whole, given) < 10 * TOLERANCE:
            return True
        kept, at_once = (self._fed(hidden, sizes)[1][index] for sizes in (_STEPS, (_LENGTH,)))
        return apart(at_once, kept) <= TOLERANCE and not apart(at_once, after[index]) < 10 * TOLERANCE

    def _dropped_arguments(self, call: Any) -> str:
        """Why more of the model's call is needed than the tokens."""
        args, kwargs = random_inputs(call, self.mixer, self.generator)
        called = self.forward(self.mixer, *copied(args), **copied(kwargs))
        hidden = call_value(self.mixer, (args, kwargs), self.spec.hidden)
        positions = call_value(self.mixer, (args, kwargs), self.spec.positions) if self.spec.positions else None
        # What it keeps outside a cache, and returns, nobody reads.
        before = tensors_of(called, self.spec) if self.spec.holder else tree_leaves(called)
        before = [x for x in before if isinstance(x, torch.Tensor)]
        after = self._alone(hidden, positions)
        if [x.shape for x in before] != [x.shape for x in after] or not _apart(before, after) <= TOLERANCE:
            return "what it gives depends on more than its tokens and its state"
        return ""

    def _alone(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> list[torch.Tensor]:
        positions = _positions(hidden) if positions is None else positions
        return tensors_of(run_alone(self.forward, self.mixer, self.spec, hidden.clone(), positions), self.spec)

    def _whole(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """What the mixer gives for each request, all its tokens at once."""
        rows = [self._alone(hidden[index : index + 1]) for index in range(_REQUESTS)]
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]

    def _fed(
        self, hidden: torch.Tensor, sizes: Sequence[int], lost: int | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the mixer gives where its tokens come in parts, and its states after the last of them; state number
        `lost` is cleared before each part."""
        if self.spec.separate and len(hidden) > 1:
            rows = [self._fed(row[None], sizes, lost) for row in hidden]
            given, after = ([torch.cat(parts) for parts in zip(*both, strict=True)] for both in zip(*rows, strict=True))
            return given, after
        states = [state.float() for state in beginning(self.spec, len(hidden))]
        places = _positions(hidden)
        made, at = [], 0
        for size in sizes:
            if lost is not None:
                states[lost].zero_()
            part, where = hidden[:, at : at + size].clone(), places[:, at : at + size]
            output, new = advance(self.forward, self.mixer, self.spec, part, states, where, fresh=at == 0)
            if [tuple(x.shape) for x in new] != [tuple(x.shape) for x in states]:
                raise ValueError(f"its states became {[tuple(x.shape) for x in new]}")
            states = [x.clone() for x in new]
            made.append(tensors_of(output, self.spec))
            at += size
        return [torch.cat(parts, dim=1) for parts in zip(*made, strict=True)], states


def _positions(hidden: torch.Tensor) -> torch.Tensor:
    return torch.arange(hidden.shape[1]).expand(hidden.shape[:2])


def call_value(module: nn.Module, call: Any, name: str) -> torch.Tensor:
    """The tensor that a call of a module gives for an argument."""
    args, kwargs = call
    signature = inspect.signature(inspect.unwrap(type(module).forward))
    value = signature.bind(module, *args, **kwargs).arguments[name]
    assert isinstance(value, torch.Tensor)
    return value


def _apart(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The largest difference relative to the largest value; NaN where there are NaNs."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        found = apart(a, b)
        if not found <= worst:
            worst = found
    return worst
