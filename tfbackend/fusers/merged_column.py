"""Sibling linears of one input, whatever becomes of their outputs -> one merged linear.

    a = self.a_proj(x); b = self.b_proj(x)    ->    a = (tfb := self.a_proj_b_proj(x).split(..., dim=-1))[0]; b = tfb[1]

Comes after the fusers that know what the siblings are for, and takes what they left.
"""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from torch import fx

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.fusers.linears import find_calls, is_linear, join_calls, linear, merged_name, same_bias, weight_entry
from tfbackend.layerspecs import COLWISE, MergedLinearSpec


class MergedColumnFuser:
    name: ClassVar[str] = "merged_column"

    def match(self, site: Site) -> Match | Miss:
        families: dict[fx.Node, list[str]] = defaultdict(list)
        for node in site.trace.graph.nodes:
            free = node.op == "call_module" and "." not in str(node.target) and node.target not in site.taken
            if free and is_linear(site, node) and node.args and isinstance(node.args[0], fx.Node):
                families[node.args[0]].append(str(node.target))
        reasons = []
        for children in families.values():
            if len(set(children)) < 2:
                continue
            answer = self._family(site, list(dict.fromkeys(children)))
            if isinstance(answer, Match):
                return answer
            reasons.append(answer)
        if reasons:
            return Miss(self.name, site.qualname, reasons[0], site.place())
        return Miss(self.name, site.qualname, "no two free linears share an input", near=False)

    def _family(self, site: Site, children: list[str]) -> Match | str:
        if site.serving.tp_size > 1:
            styles = {site.tp_style.get(site.path(child), "") for child in children}
            if styles != {COLWISE}:
                return f"{', '.join(children)} are not all sharded by columns"
        calls = find_calls(site, children)
        bias = same_bias(site, children)
        if isinstance(calls, str) or isinstance(bias, str):
            return calls if isinstance(calls, str) else str(bias)
        merged = merged_name(site, "_".join(children))
        edits = join_calls(site, calls, merged, children, self.name)
        return Match({"children": tuple(children), "merged": merged, "bias": bias}, edits, frozenset(children))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        children, merged = match.roles["children"], match.roles["merged"]
        linears = [linear(site, child) for child in children]
        spec = MergedLinearSpec(linears[0].in_features, tuple(x.out_features for x in linears), match.roles["bias"])
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=f"{', '.join(children)} -> {merged}: {spec}",
            children=((merged, spec),),
            removes=children,
            attributes=((f"{merged}_sizes", spec.out_features),),
            edits=match.edits,
            weights=tuple(weight_entry(site, child, merged, index) for index, child in enumerate(children)),
            claims=match.claims,
            captured=tuple((str(index), child) for index, child in enumerate(children)),
        )
