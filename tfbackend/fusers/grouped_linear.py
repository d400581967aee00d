"""A stack of linears, each for a group of rows -> a layer that takes the counts of rows as a tensor.

    [F.linear(rows, self.weight[i]) for i, rows in enumerate(x.split(sizes))]

What the module computes was proven on numbers before it was let to run with counts in a tensor, see grouping.py.
"""

from __future__ import annotations

from typing import ClassVar

from tfbackend.fusers.base import Match, Miss, Rewrite, Site, WeightEntry
from tfbackend.graph.interface import GROUPED
from tfbackend.groupedspec import GroupedLinearSpec


class GroupedLinearFuser:
    name: ClassVar[str] = "grouped_linear"

    def match(self, site: Site) -> Match | Miss:
        spec = getattr(type(site.module), GROUPED, None)
        if not isinstance(spec, GroupedLinearSpec):
            return Miss(self.name, site.qualname, "is no stack of linears", near=False)
        if site.serving.quantization:
            return Miss(self.name, site.qualname, "quantized stacks of linears have no loader yet", site.place())
        return Match({"spec": spec, "weight": next(name for name, _ in site.module.named_parameters())})

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec, weight = match.roles["spec"], match.roles["weight"]
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            layer=spec,
            weights=(WeightEntry(weight, "weight"),) if weight != "weight" else (),
            claims=frozenset({""}),
        )
