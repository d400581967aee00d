"""Whether a mixer is a gated delta rule: its shapes say which, and its numbers whether it is one.

A mixer with the states, linears and vectors of one is run on random numbers, and so is the reference of a DeltaSpec
with the same weights. Which linear gives what, which vector is which, how far a write may go and what the gate is are
what makes them equal.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from tfbackend.deltaspec import GATES, PARTS, DeltaReference, DeltaSpec, projection_places
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
from tfbackend.statespec import CONV, RECURRENT, StateSpec

_TOKENS, _PROMPT = 11, 6
_QUIET, _LOUD = 1e-3, 4.0
"""Next to quiet numbers an eps shows."""
_STRENGTHS = (1.0, 2.0)

Found = tuple[DeltaSpec, dict[str, str]]
"""What a mixer is, and its name for what the engine's layer calls a weight."""


def find_delta(module: nn.Module, state: StateSpec) -> Found | str:
    """What a mixer that keeps `state` is as a gated delta rule by its shapes alone, or why it is none; "" where it does
    not look like one. Which of its linears of one width and which of its vectors is which is then a guess."""
    specs = [*_sized(module, state)]
    if not specs:
        return ""
    spec = specs[0]
    convs, vectors = depthwise(module, spec.conv_dim, spec.kernel), vectors_of(module, spec.heads)
    norms = [n for n, c in module.named_children() if [tuple(p.shape) for p in c.parameters()] == [(spec.value_dim,)]]
    if len(convs) != 1 or len(vectors) != 2 or len(norms) != 1:
        return ""
    linears = linears_of(module, None, None)
    if strays := stray_weights(module, {*linears, *convs, *vectors, *norms}):
        return f"it has {', '.join(strays)}, which a gated delta rule has not"
    biased = [name for name in (*linears, *convs) if getattr(module.get_submodule(name), "bias", None) is not None]
    if biased:
        return f"{', '.join(biased)} have a bias, which vLLM's layer has not"
    if len(state.outputs) != 1:
        return f"it returns {len(state.outputs)} values"
    places = {"conv1d": convs[0], "norm": norms[0], "A_log": vectors[1], "dt_bias": vectors[0]}
    for out in linears:
        ins = [name for name in linears if name != out]
        for given in _assigned(module, spec, ins):
            return spec, places | given | {"out_proj": out}
    return ""


def read_delta(module: nn.Module, state: StateSpec, found: Found) -> Found | str:
    """The same by its numbers."""
    return read_by_numbers(module, 37, lambda mixer, generator: _Reader(mixer, state, *found, generator).read())


def _sized(module: nn.Module, state: StateSpec) -> Iterator[DeltaSpec]:
    """The sizes that the states have as those of a gated delta rule, in each layout that the linears have the widths
    of."""
    kinds = [(s.kind, len(s.shape)) for s in state.states]
    if kinds != [(CONV, 2), (RECURRENT, 3)]:
        return
    (channels, kernel), (heads, key_dim, value_dim) = state.states[0].shape, state.states[1].shape
    key_heads, rest = divmod(channels - heads * value_dim, 2 * key_dim)
    if rest or key_heads < 1 or heads % key_heads:
        return
    linears = Counter(_shape(module.get_submodule(name)) for name in linears_of(module, None, None))
    for layout, hidden in itertools.product(PARTS, sorted({width for width, _ in linears})):
        sizes = (hidden, key_heads, heads, key_dim, value_dim, kernel)
        spec = DeltaSpec(*sizes, layout, recurrent=state.states[1].dtype)
        if linears == Counter([*((hidden, width) for width in spec.parts.values()), (spec.inner, hidden)]):
            yield spec


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    return int(linear.in_features), int(linear.out_features)  # type: ignore[arg-type]


def _assigned(module: nn.Module, spec: DeltaSpec, linears: list[str]) -> Iterator[dict[str, str]]:
    """Each way in which the widths allow the linears to be the projections, by what the engine's layer calls them."""
    shapes = {name: _shape(module.get_submodule(name)) for name in linears}
    wanted = [(spec.hidden_size, width) for width in spec.parts.values()]
    for names in itertools.permutations(linears):
        if [shapes[name] for name in names] == wanted:
            given = dict(zip(spec.parts, names, strict=True))
            yield {place: given[part] for part, place in projection_places(spec.layout)}


class _Reader:
    """Finds by trying, step by step, what shapes do not say. Each step returns why it failed, or ""."""

    def __init__(
        self,
        mixer: nn.Module,
        state: StateSpec,
        spec: DeltaSpec,
        places: Mapping[str, str],
        generator: torch.Generator,
    ) -> None:
        self.mixer, self.state, self.spec, self.places = mixer, state, spec, dict(places)
        linears = {self.places[place] for _, place in projection_places(spec.layout)} | {self.places["out_proj"]}
        self.linears = [name for name, _ in mixer.named_children() if name in linears]
        self.hidden = torch.randn((1, _TOKENS, spec.hidden_size), generator=generator)

    def read(self) -> Found | str:
        seen = self._run(self.hidden)
        for step in (self._ends, self._rule, self._norm):
            if problem := step(seen):
                return problem
        for size in (1.0, _QUIET, _LOUD):
            hidden = size * self.hidden
            worst = apart(self._run(hidden).output, self._reference()(hidden))
            if not worst <= TOLERANCE:
                return f"what it gives differs by {worst:.2g} of the largest value from a gated delta rule"
        decoded = run_decoding(self.mixer, self.state, self.hidden, _PROMPT)
        if not apart(decoded, self._reference()(self.hidden)) <= TOLERANCE:
            return "it decodes tokens otherwise than a gated delta rule"
        return self.spec, self.places

    def _reference(self) -> DeltaReference:
        return self.spec.reference().bind(self.mixer, self.places)

    def _run(self, hidden: torch.Tensor) -> Seen:
        with watching(self.mixer, (*self.linears, self.places["norm"])) as seen:
            seen.output = run_whole(self.mixer, self.state, hidden)
        return seen

    def _ends(self, seen: Seen) -> str:
        """The last linear is the one that is not given the tokens."""
        first = [name for name in self.linears if name in seen.inputs and self._is_hidden(seen.inputs[name][0])]
        last = [name for name in self.linears if name not in first]
        if len(last) != 1 or last[0] not in seen.inputs:
            return "not all of its linears but one are given its tokens as they are"
        self.places["out_proj"] = last[0]
        return ""

    def _is_hidden(self, given: torch.Tensor) -> bool:
        return given.shape == self.hidden.shape and torch.equal(given, self.hidden)

    def _rule(self, seen: Seen) -> str:
        """Which projection gives what and which vector is which, so that what is normed is what the rule gives."""
        made: torch.Tensor = seen.inputs[self.places["norm"]][0]
        vectors = self.places["A_log"], self.places["dt_bias"]
        ins = [name for name in self.linears if name != self.places["out_proj"]]
        ways = itertools.product(_assigned(self.mixer, self.spec, ins), itertools.permutations(vectors), _STRENGTHS)
        for given, (a_log, dt_bias), beta in ways:
            self.places |= given | {"A_log": a_log, "dt_bias": dt_bias}
            self.spec = replace(self.spec, beta=beta)
            if apart(made.flatten(), self._reference().scan(self.hidden)[0].flatten()) <= TOLERANCE:
                return ""
        return "what it norms is not what a gated delta rule gives"

    def _norm(self, seen: Seen) -> str:
        name = self.places["norm"]
        if len(seen.inputs[name]) != 2 or seen.keywords[name]:
            return "its norm is given more than what it norms and the gate"
        norm, (made, z) = self.mixer.get_submodule(name), seen.inputs[name]
        for gate, eps in itertools.product(GATES, small_numbers(norm)):
            self.spec = replace(self.spec, gate=gate, eps=eps)
            reference = self._reference()
            pairs = ((norm(made * size, z), reference.gate(made * size, z)) for size in (1.0, _QUIET))
            if all(apart(theirs, mine) <= TOLERANCE for theirs, mine in pairs):
                return ""
        return "its norm is not one of each head's values, which are then gated"
