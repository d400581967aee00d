"""Every nn.Linear that no other fuser took -> one of vLLM's, sharded as the model's tensor-parallel plan says."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.layerspecs import REPLICATED, LinearSpec


class LinearFuser:
    name: ClassVar[str] = "linear"

    def match(self, site: Site) -> Match | Miss:
        if not isinstance(site.module, nn.Linear):
            return Miss(self.name, site.qualname, "not a linear", near=False)
        if type(site.module) is not nn.Linear:
            return Miss(
                self.name, site.qualname, f"{type(site.module).__name__} changes what nn.Linear does", site.place()
            )
        if not site.observation.calls.get(site.qualname):
            return Miss(self.name, site.qualname, "is not called; its weight may be read in other ways", site.place())
        return Match({}, claims=frozenset({""}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        module = site.module
        assert isinstance(module, nn.Linear)
        style = site.tp_style.get(site.qualname, REPLICATED)
        spec = LinearSpec(module.in_features, module.out_features, module.bias is not None, style)
        return Rewrite(site.qualname, self.name, str(spec), layer=spec, claims=match.claims)
