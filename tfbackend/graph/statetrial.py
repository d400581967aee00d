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
from tfbackend.graph.statecache import advance, run_alone, tensors_of
from tfbackend.graph.trial import apart, copied, materialise, plain_float32, random_inputs
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
    """`spec` with how the mixer is to be fed, or why it cannot be."""
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad(), plain_float32(), answering(unattended), whole_numbers():
        try:
            return _Trial(materialise(module, generator), spec, generator).judge(call)
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
            if _apart(whole, self._fed(hidden, _STEPS, lost=index)) < 10 * TOLERANCE:
                return f"nothing shows whether its {state.kind} state {state.number} is kept"
        loud = _LOUD * hidden
        rounds = ((hidden, whole), (loud, self._whole(loud)))
        steps, chunks = (max(_apart(y, self._fed(x, sizes)) for x, y in rounds) for sizes in (_STEPS, _CHUNKS))
        if not steps <= OWN_DIFFERENCE:
            return f"what it gives token by token differs by {steps:.2g} of the largest value from one run over all"
        own = steps if steps > TOLERANCE else 0.0
        return replace(self.spec, stepwise=not chunks <= max(TOLERANCE, own), apart=own)

    def _dropped_arguments(self, call: Any) -> str:
        """Why more of the model's call is needed than the tokens."""
        args, kwargs = random_inputs(call, self.mixer, self.generator)
        called = self.forward(self.mixer, *copied(args), **copied(kwargs))
        hidden = call_value(self.mixer, (args, kwargs), self.spec.hidden)
        before = [x for x in tree_leaves(called) if isinstance(x, torch.Tensor)]
        after = self._alone(hidden)
        if [x.shape for x in before] != [x.shape for x in after] or not _apart(before, after) <= TOLERANCE:
            return "what it gives depends on more than its tokens and its state"
        return ""

    def _alone(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return tensors_of(run_alone(self.forward, self.mixer, self.spec, hidden.clone()), self.spec)

    def _whole(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """What the mixer gives for each request, all its tokens at once."""
        rows = [self._alone(hidden[index : index + 1]) for index in range(_REQUESTS)]
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]

    def _fed(self, hidden: torch.Tensor, sizes: Sequence[int], lost: int | None = None) -> list[torch.Tensor]:
        """What the mixer gives where its tokens come in parts; state number `lost` is cleared between them."""
        states = [torch.zeros((hidden.shape[0], *state.shape)) for state in self.spec.states]
        given, at = [], 0
        for size in sizes:
            part = hidden[:, at : at + size].clone()
            output, after = advance(self.forward, self.mixer, self.spec, part, states, fresh=at == 0)
            if [tuple(x.shape) for x in after] != [tuple(x.shape) for x in states]:
                raise ValueError(f"its states became {[tuple(x.shape) for x in after]}")
            states = [x.clone() for x in after]
            if lost is not None:
                states[lost].zero_()
            given.append(tensors_of(output, self.spec))
            at += size
        return [torch.cat(parts, dim=1) for parts in zip(*given, strict=True)]


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
