"""Query, key and value projections of one input -> one QKV projection, sharded by heads.

    q = self.q_proj(x)...                q = (tfb_qkv_proj := self.qkv_proj(x).split(self.qkv_proj_sizes, dim=-1))[0]...
    k = self.k_proj(x)...          ->    k = tfb_qkv_proj[1]...
    v = self.v_proj(x)...                v = tfb_qkv_proj[2]...

Which linear is which is read from the dataflow: the one that query is computed from, and so on. Names play no part.
"""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.fusers.linears import (
    across_heads,
    consumer,
    find_calls,
    join_calls,
    linear,
    linear_sources,
    merged_name,
    same_bias,
    weight_entry,
)
from tfbackend.graph.query import value_of
from tfbackend.layerspecs import ROWWISE, QKVSpec

ROLES = ("q", "k", "v")


class QKVFuser:
    name: ClassVar[str] = "qkv"

    def match(self, site: Site) -> Match | Miss:
        if not site.trace.attention:
            return Miss(self.name, site.qualname, "does not call the attention interface", near=False)
        if _packed(site):
            return Miss(self.name, site.qualname, "query, key and value come from one linear", near=False)
        if _latent(site):
            return Miss(self.name, site.qualname, "key and value come from latents", near=False)
        roles = self._roles(site)
        if isinstance(roles, str):
            return Miss(self.name, site.qualname, roles, site.place())
        calls = find_calls(site, list(roles.values()))
        if isinstance(calls, str):
            return Miss(self.name, site.qualname, calls, site.place())
        bias = same_bias(site, list(roles.values()))
        if isinstance(bias, str):
            return Miss(self.name, site.qualname, bias, site.place())
        out = consumer(site, site.trace.attention[0])
        if site.serving.tp_size > 1 and not out:
            return Miss(self.name, site.qualname, "no one linear takes the output of all heads", site.place())
        merged = merged_name(site, "qkv_proj")
        edits = join_calls(site, calls, merged, [roles[r] for r in ROLES], self.name)
        return Match({**roles, "merged": merged, "bias": bias, "out": out}, edits, frozenset(roles.values()))

    def _roles(self, site: Site) -> dict[str, str] | str:
        if len(site.trace.attention) != 1:
            return "calls the attention interface more than once"
        node = site.trace.attention[0]
        roles: dict[str, str] = {}
        for role, argument in zip(ROLES, node.args, strict=False):
            assert isinstance(argument, fx.Node)
            linears = linear_sources(site, argument)
            if len(linears) != 1:
                return f"{role} is computed from {len(linears)} linears"
            roles[role] = str(linears[0].target)
            if problem := self._width_problem(site, role, linears[0], argument):
                return problem
        if len(set(roles.values())) != 3:
            return "query, key and value do not come from three linears"
        return roles

    def _width_problem(self, site: Site, role: str, start: fx.Node, end: fx.Node) -> str:
        """Several heads can be handed out to ranks only where every operation stays within a head."""
        shape, width = value_of(end).shape, value_of(start).shape[-1]
        if shape[1] * shape[3] != width:
            return f"{start.target} gives {width} values and {role} has {shape[1]} heads of {shape[3]}"
        return across_heads(site, start, end) if site.serving.tp_size > 1 else ""

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        call = site.observation.attention[site.qualname][0]
        roles = match.roles
        spec = QKVSpec(
            in_features=linear(site, roles["q"]).in_features,
            head_dim=call.query[3],
            v_head_dim=call.value[3],
            num_heads=call.query[1],
            num_kv_heads=call.key[1],
            bias=roles["bias"],
        )
        merged = roles["merged"]
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=f"{', '.join(roles[r] for r in ROLES)} -> {merged}: {spec}",
            children=((merged, spec),),
            removes=tuple(roles[r] for r in ROLES),
            attributes=((f"{merged}_sizes", spec.sizes),),
            edits=match.edits,
            weights=tuple(weight_entry(site, roles[r], merged, r) for r in ROLES),
            styles=((roles["out"], ROWWISE),) if roles["out"] else (),
            claims=match.claims,
            captured=tuple((r, roles[r]) for r in ROLES),
        )


def _packed(site: Site) -> bool:
    """Whether one linear gives query, key and value, which is PackedQKVFuser's to answer for."""
    found = [
        linear_sources(site, argument) for argument in site.trace.attention[0].args[:3] if isinstance(argument, fx.Node)
    ]
    return all(len(linears) == 1 for linears in found) and len({linears[0] for linears in found}) == 1


def _latent(site: Site) -> bool:
    """Whether the linear that gives the values went into an attention layer, which is MLAFuser's doing."""
    value = site.trace.attention[0].args[2]
    assert isinstance(value, fx.Node)
    return any(str(node.target) in site.taken for node in linear_sources(site, value))
