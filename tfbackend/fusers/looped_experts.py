"""Experts that a model goes through in a loop of its own -> a routed-experts layer in place of the module.

    for expert in one_hot(ids).sum(...).nonzero():
        out.index_add_(0, tokens, down[expert](act(gate[expert](x[tokens])) * up[expert](x[tokens])) * weights[...])

Such a module is known by its call, tokens with the ids and weights of their experts, and by what it computes: it is run
on numbers, on a narrow twin where it is large, beside every reading of its parameters that their shapes allow. That run
is the proof; nothing is read from the code. The loop asks which experts have tokens, so it runs neither on meta nor
compiled nor captured, and a model whose experts match no reading is refused.
"""

from __future__ import annotations

from typing import ClassVar

from tfbackend.fusers.base import Match, Miss, Rewrite, Site, WeightEntry
from tfbackend.fusers.experts import has_kernel
from tfbackend.fusers.looping import read_experts
from tfbackend.graph.interface import has_experts_interface
from tfbackend.graph.routed import routed_call
from tfbackend.loopedspec import LoopedExpertsSpec


class LoopedExpertsFuser:
    name: ClassVar[str] = "looped_experts"

    def match(self, site: Site) -> Match | Miss:
        module, calls = site.module, site.observation.calls.get(site.qualname, [])
        call = routed_call(*calls[0]) if len(calls) == 1 else None
        if call is None or has_experts_interface(module) or len(list(module.parameters())) < 2:
            return Miss(self.name, site.qualname, "is not called with tokens and their experts", near=False)
        if site.serving.quantization:
            return Miss(self.name, site.qualname, "quantized experts have no loader yet", site.place())
        found = read_experts(module, call)
        if isinstance(found, str):
            return Miss(self.name, site.qualname, found, site.place())
        if not has_kernel(found.experts, site.serving):
            found = found.without_kernel()
        return Match({"spec": found}, claims=site.inside)

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec: LoopedExpertsSpec = match.roles["spec"]
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            layer=spec,
            weights=tuple(
                WeightEntry(part.source, f"routed.runner.routed_experts.{part.target}", part.shard)
                for part in spec.parts
            ),
            claims=match.claims,
            captured=tuple((part.source, f"{part.target}" + _half(part.shard)) for part in spec.parts),
        )


def _half(shard: int | None) -> str:
    return "" if shard is None else f", {('gate', 'up')[shard]}"
