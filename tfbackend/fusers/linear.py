"""Every linear that no other fuser took -> one of vLLM's, sharded as the model's tensor-parallel plan says."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from tfbackend.fusers.base import Match, Miss, Rewrite, Site, WeightEntry
from tfbackend.fusers.products import linear_shape
from tfbackend.layerspecs import REPLICATED, LinearSpec


class LinearFuser:
    name: ClassVar[str] = "linear"

    def match(self, site: Site) -> Match | Miss:
        if linear_shape(site.module) is None:
            if not isinstance(site.module, nn.Linear):
                return Miss(self.name, site.qualname, "not a linear", near=False)
            changed = f"{type(site.module).__name__} changes what nn.Linear does"
            return Miss(self.name, site.qualname, changed, site.place())
        if not site.observation.calls.get(site.qualname):
            return Miss(self.name, site.qualname, "is not called; its weight may be read in other ways", site.place())
        return Match({}, claims=frozenset({""}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        shape = linear_shape(site.module)
        assert shape is not None, site.qualname
        style = site.tp_style.get(site.qualname, REPLICATED)
        spec = LinearSpec(shape.in_features, shape.out_features, shape.bias, style)
        weights = (WeightEntry("", "", transposed=True),) if shape.transposed else ()
        summary = f"{spec}, from a weight [in, out]" if shape.transposed else str(spec)
        return Rewrite(site.qualname, self.name, summary, layer=spec, weights=weights, claims=match.claims)
