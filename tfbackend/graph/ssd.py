"""Whether a mixer is a Mamba-2: its shapes say which, and its numbers whether it is one.

A mixer with the states, linears and vectors of one is run on random numbers, and so is the reference of an SSDSpec with
the same weights. Which vector is which, what the norm is and how the time step is limited are what makes them equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from tfbackend.graph.mixerparts import (
    Seen,
    depthwise,
    linears_of,
    read_by_numbers,
    run_decoding,
    run_whole,
    small_numbers,
    stray_weights,
    vectors_of,
    watching,
)
from tfbackend.graph.statetrial import TOLERANCE
from tfbackend.graph.trial import apart
from tfbackend.ssdspec import NO_LIMIT, SSDReference, SSDSpec
from tfbackend.statespec import CONV, RECURRENT, StateSpec

_TOKENS, _PROMPT = 11, 6
_QUIET, _LOUD = 1e-3, 4.0
_STEEP = 12.0
"""A bias of the time step that takes it to where a limit shows, as it is or negated."""


@dataclass(frozen=True)
class SSDParts:
    """Names in the mixer of what the layer has weights for; `norm` is "" for none."""

    in_proj: str
    conv: str
    out_proj: str
    norm: str
    a_log: str
    skip: str
    dt_bias: str

    @property
    def places(self) -> dict[str, str]:
        """What the layer calls each of its weights -> the name here."""
        places = {"in_proj": self.in_proj, "conv1d": self.conv, "out_proj": self.out_proj, "norm": self.norm}
        places |= {"A": self.a_log, "D": self.skip, "dt_bias": self.dt_bias}
        return {place: name for place, name in places.items() if name}


def find_ssd(module: nn.Module, state: StateSpec) -> tuple[SSDSpec, SSDParts] | str:
    """What a mixer that keeps `state` is as a Mamba-2 by its shapes alone, or why it is none; "" where it does not look
    like one. Which vector is which is then a guess, and there is no norm."""
    return _shaped(module, state) or ""


def scaled(spec: SSDSpec, module: nn.Module) -> SSDSpec | str:
    """`spec` with the factors that a mixer has in a buffer for what comes out of its first projection, or why it cannot
    be. They are numbers of the one module, where all else is of its kind."""
    total = sum(spec.widths)
    vectors = [b for _, b in module.named_buffers() if b.is_floating_point() and b.numel() == total]
    if not vectors:
        return spec
    split = torch.split(vectors[0].flatten(), [*spec.widths])
    if vectors[0].is_meta or any(part.min() != part.max() for part in split):
        return "it scales the channels of one part of its first projection differently"
    return replace(spec, scales=tuple(float(part[0]) for part in split))


def read_ssd(module: nn.Module, state: StateSpec, found: tuple[SSDSpec, SSDParts]) -> tuple[SSDSpec, SSDParts] | str:
    """The same by its numbers."""
    return read_by_numbers(module, 29, lambda mixer, generator: _Reader(mixer, state, *found, generator).read())


def _shaped(module: nn.Module, state: StateSpec) -> tuple[SSDSpec, SSDParts] | str | None:
    """Sizes and parts by shapes alone; which vector is which is a guess by their order."""
    kinds = [s.kind for s in state.states]
    if kinds != [CONV, RECURRENT] or len(state.states[1].shape) != 3 or len(state.states[0].shape) != 2:
        return None
    (channels, kernel), (heads, head_dim, size) = state.states[0].shape, state.states[1].shape
    inner = heads * head_dim
    groups, rest = divmod(channels - inner, 2 * size)
    if rest or groups < 1 or heads % groups:
        return None
    ins = linears_of(module, None, inner + channels + heads)
    outs = [name for name in linears_of(module, inner, None) if name not in ins]
    convs = depthwise(module, channels, kernel)
    vectors = vectors_of(module, heads)
    if len(ins) != 1 or len(outs) != 1 or len(convs) != 1 or len(vectors) != 3:
        return None
    norms = [n for n, c in module.named_children() if [tuple(p.shape) for p in c.parameters()] == [(inner,)]]
    parts = SSDParts(ins[0], convs[0], outs[0], norms[0] if norms else "", vectors[1], vectors[2], vectors[0])
    if strays := stray_weights(module, {*parts.places.values()}):
        return f"it has {', '.join(strays)}, which a Mamba-2 has not"
    if len(state.outputs) != 1:
        return f"it returns {len(state.outputs)} values"
    into, conv, out = (module.get_submodule(name) for name in (ins[0], convs[0], outs[0]))
    hidden_size = int(into.in_features)  # type: ignore[arg-type]
    biases = [getattr(child, "bias", None) is not None for child in (into, conv, out)]
    spec = SSDSpec(
        *(hidden_size, heads, head_dim, groups, size, kernel),
        in_bias=biases[0],
        conv_bias=biases[1],
        out_bias=biases[2],
        norm_groups=0,
        recurrent=state.states[1].dtype,
    )
    return (spec, parts) if out.out_features == hidden_size else None


class _Reader:
    """Finds by trying, step by step, what shapes do not say. Each step returns why it failed, or ""."""

    def __init__(
        self, mixer: nn.Module, state: StateSpec, spec: SSDSpec, parts: SSDParts, generator: torch.Generator
    ) -> None:
        self.mixer, self.state, self.spec, self.parts = mixer, state, spec, parts
        self.hidden = torch.randn((1, _TOKENS, spec.hidden_size), generator=generator)

    def read(self) -> tuple[SSDSpec, SSDParts] | str:
        seen = self._run(self.hidden)
        for step in (self._scales, self._vectors, self._norm):
            if problem := step(seen):
                return problem
        if problem := self._limit() or self._steps():
            return problem
        loud = _LOUD * self.hidden
        for theirs, hidden in ((seen.output, self.hidden), (self._run(loud).output, loud)):
            worst = apart(theirs, self._reference()(hidden))
            if not worst <= TOLERANCE:
                return f"what it gives differs by {worst:.2g} of the largest value from a Mamba-2"
        return self.spec, self.parts

    def _reference(self) -> SSDReference:
        return self.spec.reference().bind(self.mixer, self.parts.places)

    def _run(self, hidden: torch.Tensor) -> Seen:
        children = (self.parts.in_proj, self.parts.norm, self.parts.out_proj)
        with watching(self.mixer, tuple(name for name in children if name)) as seen:
            seen.output = run_whole(self.mixer, self.state, hidden)
        return seen

    def _scales(self, seen: Seen) -> str:
        given = seen.inputs[self.parts.in_proj][0]
        scale = ((given * self.hidden).sum() / self.hidden.pow(2).sum()).item()
        if not apart(given, self.hidden * scale) <= TOLERANCE:
            return "more than a factor is between its tokens and its first linear"
        self.spec = replace(self.spec, in_scale=_exact(scale, self.mixer))
        spec = scaled(self.spec, self.mixer)
        if isinstance(spec, str):
            return spec
        self.spec = spec
        return ""

    def _scanned(self, seen: Seen) -> torch.Tensor:
        """What the norm, or else the last linear is given first."""
        given: torch.Tensor = seen.inputs[self.parts.norm or self.parts.out_proj][0]
        return given

    def _mine(self) -> torch.Tensor:
        """The same of the reference."""
        reference = self._reference()
        z, scanned = reference.scan(self.hidden)
        return scanned if self.parts.norm else reference.gate(scanned, z)

    def _vectors(self, seen: Seen) -> str:
        given = self.parts
        for limit in self._limits():
            for names in itertools.permutations((given.a_log, given.skip, given.dt_bias)):
                self.parts = SSDParts(given.in_proj, given.conv, given.out_proj, given.norm, *names)
                self.spec = replace(self.spec, dt_limit=limit)
                if apart(self._scanned(seen), self._mine()) <= TOLERANCE:
                    return ""
        return "its scan is not that of a Mamba-2"

    def _norm(self, seen: Seen) -> str:
        name = self.parts.norm
        if not name:
            return ""
        if len(seen.inputs[name]) != 2 or seen.keywords[name]:
            return "its norm is given more than what it norms and the gate"
        norm, (scanned, z) = self.mixer.get_submodule(name), seen.inputs[name]
        for parts, eps in itertools.product(dict.fromkeys((1, self.spec.groups)), small_numbers(norm)):
            self.spec = replace(self.spec, norm_groups=parts, eps=eps)
            reference = self._reference()
            # Next to numbers of 1 an eps is below rounding.
            pairs = ((norm(scanned * size, z), reference.gate(scanned * size, z)) for size in (1.0, _QUIET))
            if all(apart(theirs, mine) <= TOLERANCE for theirs, mine in pairs):
                return ""
        return "its norm is not one of gated values, over all of them or over each group"

    def _limits(self) -> Iterator[tuple[float, float]]:
        """No limit, and the pairs of numbers that the mixer has as attributes."""
        yield NO_LIMIT
        for value in vars(self.mixer).values():
            pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else ()
            if pair and all(isinstance(number, (int, float)) for number in pair) and tuple(pair) != NO_LIMIT:
                yield float(pair[0]), float(pair[1])

    def _limit(self) -> str:
        """Where the time step alone decides what is given, its limits show."""
        for limit in self._limits():
            self.spec = replace(self.spec, dt_limit=limit)
            if all(self._fits_steep(bias) for bias in (-_STEEP, _STEEP)):
                return ""
        return "it limits its time step in a way that none of its attributes says"

    def _fits_steep(self, bias: float) -> bool:
        with _filled(self.mixer, {self.parts.dt_bias: bias, self.parts.skip: 0.0}):
            return apart(self._scanned(self._run(self.hidden)), self._mine()) <= TOLERANCE

    def _steps(self) -> str:
        """Whether the limits hold for tokens that are decoded one by one."""
        if self.spec.dt_limit == NO_LIMIT:
            return ""
        for limited in (True, False):
            self.spec = replace(self.spec, limited_steps=limited)
            if all(self._decodes_alike(bias) for bias in (-_STEEP, _STEEP)):
                return ""
        return "it limits its time step otherwise where it decodes"

    def _decodes_alike(self, bias: float) -> bool:
        with _filled(self.mixer, {self.parts.dt_bias: bias, self.parts.skip: 0.0}):
            theirs = run_decoding(self.mixer, self.state, self.hidden, _PROMPT)
            return apart(theirs, self._reference()(self.hidden, _PROMPT)) <= TOLERANCE


@contextmanager
def _filled(mixer: nn.Module, numbers: dict[str, float]) -> Iterator[None]:
    """While entered, parameters hold one number each."""
    kept = {name: mixer.get_parameter(name).data.clone() for name in numbers}
    for name, number in numbers.items():
        mixer.get_parameter(name).data.fill_(number)
    try:
        yield
    finally:
        for name, tensor in kept.items():
            mixer.get_parameter(name).data.copy_(tensor)


def _exact(scale: float, mixer: nn.Module) -> float:
    """A factor that was told from numbers, as the mixer has it for an attribute where it does; 1 needs none."""
    values = [1.0, *(value for value in vars(mixer).values() if isinstance(value, float))]
    return next((value for value in values if math.isclose(scale, value, rel_tol=1e-5)), scale)
