"""A mixer that keeps state between calls -> the engine's own layer for it.

    def forward(self, hidden_states, cache_params=None, ...):      def forward(self, hidden_states, ...):
        ...                                                   ->       return self.state(hidden_states)

as the state fuser has it, but for the layer: it computes with kernels of the engine and not with the mixer's code, its
parameters are shared out among ranks, and so is the state. What a mixer is as such a layer is told from its shapes and
then from its numbers (graph/ssd.py, graph/shortconv.py, graph/delta.py); where it is none, the state fuser has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from tfbackend.deltaspec import DeltaSpec
from tfbackend.fusers.base import Match, Miss, Rewrite, Site, WeightEntry
from tfbackend.fusers.state import LAYER, body_edit
from tfbackend.graph.delta import find_delta, read_delta
from tfbackend.graph.kinds import tampered
from tfbackend.graph.shortconv import find_short_conv, read_short_conv
from tfbackend.graph.ssd import SSDParts, find_ssd, read_ssd, scaled
from tfbackend.graph.stateful import find_state
from tfbackend.serving import GATED_DELTA, MAMBA2, NATIVE_OFF, SHORT_CONV, ServingSpec
from tfbackend.shortconvspec import ShortConvSpec
from tfbackend.ssdspec import SSDSpec
from tfbackend.statespec import StateSpec


def native_problem(serving: ServingSpec, kind: str) -> str:
    """Why the engine has no layer of a kind for a model that runs like this; "" where it has."""
    if isinstance(serving.natives, str):
        return serving.natives
    if kind not in serving.natives:
        return (
            f"the engine has no kernels for {kind} on {serving.device} in {str(serving.dtype).removeprefix('torch.')}"
        )
    if serving.quantization is not None:
        return "the shards of its quantized projections are not those of the checkpoint"
    return serving.stateless


class NativeFuser:
    """What the fusers of this kind have in common."""

    name: ClassVar[str]

    def find(self, module: nn.Module, state: StateSpec) -> Any:
        """(spec, weights) by shapes, or why it is none of this kind; "" where it does not look like one."""
        raise NotImplementedError

    def read(self, module: nn.Module, state: StateSpec, found: Any) -> Any:
        """(spec, weights) by numbers, or why it is none of this kind."""
        raise NotImplementedError

    def places(self, weights: Any) -> Mapping[str, str]:
        """What the layer calls each weight -> the name in the mixer; behind the name of a linear that is made of
        several, the number of the shard."""
        named: Mapping[str, str] = weights
        return named

    def own(self, spec: Any, module: nn.Module) -> Any:
        """The spec with what is of the one module and not of its kind, or why it is none."""
        return spec

    def match(self, site: Site) -> Match | Miss:
        state = find_state(site.module, site.observation.calls.get(site.qualname, []))
        if isinstance(state, str):
            return self._miss(site, "it keeps no state that could be kept", near=False)
        found = self.find(site.module, state)
        if isinstance(found, str):
            return self._miss(site, found or f"it has not the shapes of {self.name}", near=bool(found))
        problem = native_problem(site.serving, self.name) or found[0].problem(site.serving) or tampered(site.module)
        if problem:
            return self._miss(site, problem, near=problem != NATIVE_OFF)
        if isinstance(site.source, str):
            return self._miss(site, site.source)
        if hasattr(site.module, LAYER):
            return self._miss(site, f"already has an attribute called {LAYER}")
        found = self.read(site.module, state, found)
        problem = found if isinstance(found, str) else found[0].problem(site.serving)
        if problem:
            return self._miss(site, problem)
        weights = tuple(_entry(place, name) for place, name in self.places(found[1]).items())
        roles = {"spec": found[0], "weights": weights, "hidden": state.hidden}
        return Match(roles, (body_edit(site.source, state.hidden, self.name),), site.inside | {LAYER})

    def _miss(self, site: Site, reason: str, *, near: bool = True) -> Miss:
        return Miss(self.name, site.qualname, f"not the engine's own layer: {reason}", site.place(), near)

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec, weights = self.own(match.roles["spec"], site.module), match.roles["weights"]
        if isinstance(spec, str):
            return self._miss(site, spec)
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            children=((LAYER, spec),),
            removes=tuple(entry.source for entry in weights),
            edits=match.edits,
            weights=weights,
            claims=match.claims,
            captured=(
                ("tokens", match.roles["hidden"]),
                *((e.place.removeprefix(f"{LAYER}."), e.source) for e in weights),
            ),
        )


def _entry(place: str, name: str) -> WeightEntry:
    """Where the weight `name` of a mixer goes."""
    target, _, shard = place.rpartition(".")
    if not shard.isdigit():
        return WeightEntry(name, f"{LAYER}.{place}")
    return WeightEntry(name, f"{LAYER}.{target}", int(shard))


class SSDFuser(NativeFuser):
    """Mamba-2."""

    name: ClassVar[str] = MAMBA2

    def find(self, module: nn.Module, state: StateSpec) -> tuple[SSDSpec, SSDParts] | str:
        return find_ssd(module, state)

    def read(
        self, module: nn.Module, state: StateSpec, found: tuple[SSDSpec, SSDParts]
    ) -> tuple[SSDSpec, SSDParts] | str:
        return read_ssd(module, state, found)

    def own(self, spec: SSDSpec, module: nn.Module) -> SSDSpec | str:
        return scaled(spec, module)

    def places(self, weights: SSDParts) -> Mapping[str, str]:
        return weights.places


class ShortConvFuser(NativeFuser):
    """A gated short convolution."""

    name: ClassVar[str] = SHORT_CONV

    def find(self, module: nn.Module, state: StateSpec) -> tuple[ShortConvSpec, dict[str, str]] | str:
        return find_short_conv(module, state)

    def read(
        self, module: nn.Module, state: StateSpec, found: tuple[ShortConvSpec, dict[str, str]]
    ) -> tuple[ShortConvSpec, dict[str, str]] | str:
        return read_short_conv(module, state, found)


class DeltaFuser(NativeFuser):
    """A gated delta rule."""

    name: ClassVar[str] = GATED_DELTA

    def find(self, module: nn.Module, state: StateSpec) -> tuple[DeltaSpec, dict[str, str]] | str:
        return find_delta(module, state)

    def read(
        self, module: nn.Module, state: StateSpec, found: tuple[DeltaSpec, dict[str, str]]
    ) -> tuple[DeltaSpec, dict[str, str]] | str:
        return read_delta(module, state, found)
