"""Latent attention -> attention over a cache of latents.

    latent, shared = ...                                          latent, shared = ...
    key, value = self.expand(latent, shared)              ->      pass
    attention_interface(self, query, key, value, ...)             attention_interface(self, query, shared, latent, ...)

where every head's key and value come from one linear of the latent, and all heads share the part of the key that has
positions. The linear goes into the attention layer, which has the latents alone in its cache. What becomes of query,
latent and shared part before, norms and rotation and all, stays the model's own.
"""

from __future__ import annotations

import ast
from typing import ClassVar

from torch import fx

from tfbackend.fusers.attention import call_problem, spec_of
from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.fusers.linears import across_heads, consumer, is_linear, linear, linear_sources, weight_entry
from tfbackend.graph.expansion import Expansion, find_expansion
from tfbackend.graph.query import sources, value_of
from tfbackend.layerspecs import COLWISE, ROWWISE
from tfbackend.mlaspec import MLASpec
from tfbackend.serving import MLA_OFF
from tfbackend.source.cut import removal
from tfbackend.source.edits import Edit
from tfbackend.source.forward import ForwardSource, SourceError

LAYER, EXPAND = "attn", "attn.kv_b_proj"
"""Where the layer is put, and where in it vLLM has the linear that makes keys and values."""


class MLAFuser:
    name: ClassVar[str] = "mla"

    def match(self, site: Site) -> Match | Miss:
        trace = site.trace
        if len(trace.attention) != 1 or not _from_latents(site):
            return Miss(self.name, site.qualname, "its keys and values come from no common linear", near=False)
        wanted = site.serving.mla
        if isinstance(wanted, str):
            return self._miss(site, wanted, near=wanted != MLA_OFF)
        node = linear_sources(site, _argument(trace.attention[0], 2))[0]
        if problem := _linear_problem(site, str(node.target)):
            return self._miss(site, problem)
        found = find_expansion(trace, node)
        if isinstance(found, str):
            return self._miss(site, found)
        if found.sizes != wanted:
            return self._miss(site, f"it has {found.sizes}, and the engine has kernels for {wanted}")
        query, out = _query_linear(site), consumer(site, trace.attention[0])
        if site.serving.tp_size > 1 and (problem := _sharing_problem(site, query, out)):
            return self._miss(site, problem)
        try:
            edits = _edits(site, found, self.name)
        except SourceError as error:
            return self._miss(site, str(error))
        roles = {"expand": str(node.target), "sizes": found.sizes, "query": query, "out": out}
        return Match(roles, edits, frozenset({LAYER, str(node.target)}))

    def _miss(self, site: Site, reason: str, *, near: bool = True) -> Miss:
        return Miss(self.name, site.qualname, f"keys and values are cached whole: {reason}", site.place(), near)

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        calls = site.observation.attention[site.qualname]
        selection = site.observation.selection
        several = "it calls the attention interface more than once" if len(calls) != 1 else ""
        longest = site.serving.max_model_len
        problem = several or call_problem(calls[0], selection, longest)
        if problem:
            return self._miss(site, problem)
        whole, roles = spec_of(calls[0], selection, longest), match.roles
        limits = (("window", whole.window), ("chunk", whole.chunk))
        for what, value in (*limits, ("soft cap", whole.soft_cap), ("sinks", whole.sinks)):
            if value is not None:
                return self._miss(site, f"it has a {what} of {value}" if what != "sinks" else "it has attention sinks")
        if whole.alibi_slopes is not None:
            return self._miss(site, "it has ALiBi")
        expand = roles["expand"]
        spec = MLASpec(whole.num_heads, roles["sizes"], whole.scale, expand, whole.max_context)
        styles = ((roles["query"], COLWISE), (roles["out"], ROWWISE))
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=f"{expand} -> {spec}",
            children=((LAYER, spec),),
            removes=(expand,),
            edits=match.edits,
            weights=(weight_entry(site, expand, EXPAND),),
            styles=styles if roles["query"] and roles["out"] else (),
            claims=match.claims,
            captured=tuple((role, roles[role]) for role in ("query", "expand", "out") if roles[role]),
        )


def _argument(node: fx.Node, index: int) -> fx.Node:
    argument = node.args[index]
    assert isinstance(argument, fx.Node)
    return argument


def _from_latents(site: Site) -> bool:
    """Whether the values come from one linear and the keys from that one too, whatever else they have."""
    node = site.trace.attention[0]
    values = linear_sources(site, _argument(node, 2))
    if len({value.target for value in values}) != 1 or values[0] in linear_sources(site, _argument(node, 0)):
        return False
    # Keys may be written into an empty tensor, which comes from nothing; those of other attention have a linear.
    keys = linear_sources(site, _argument(node, 1))
    before = sources(values[0], lambda n: n is not values[0] and is_linear(site, n))
    return values[0] in keys and any(is_linear(site, n) for n in before)


def _linear_problem(site: Site, name: str) -> str:
    if "." in name or name in site.taken:
        return f"{name} is not to be had"
    if len(site.trace.calls(name)) != 1:
        return f"{name} is called {len(site.trace.calls(name))} times"
    if linear(site, name).bias:
        return f"{name} has a bias, which a kernel over latents does not add"
    return f"already has an attribute called {LAYER}" if hasattr(site.module, LAYER) else ""


def _query_linear(site: Site) -> str:
    linears = linear_sources(site, _argument(site.trace.attention[0], 0))
    return str(linears[0].target) if len(linears) == 1 else ""


def _sharing_problem(site: Site, query: str, out: str) -> str:
    """Why the heads cannot be handed out to ranks; "" where they can."""
    if not query or not out:
        return "no one linear gives the query of all heads or takes their output"
    end, start = _argument(site.trace.attention[0], 0), site.trace.calls(query)[0]
    shape, width = value_of(end).shape, value_of(start).shape[-1]
    if shape[1] * shape[3] != width:
        return f"{query} gives {width} values and the query has {shape[1]} heads of {shape[3]}"
    return across_heads(site, start, end)


def _edits(site: Site, found: Expansion, by: str) -> tuple[Edit, ...]:
    """Hand the interface what is cached in place of keys and values, and take out what made those.

    Raises:
        SourceError: the source does not lend itself to that.
    """
    source, attention = site.source, site.trace.attention[0]
    if isinstance(source, str):
        raise SourceError(source)
    start, end = source.expression(found.linear.meta["span"]), source.expression(attention.meta["span"])
    if not isinstance(end, ast.Call) or len(end.args) < 4 or any(isinstance(a, ast.Starred) for a in end.args[:4]):
        raise SourceError("the attention interface is not called as f(self, query, key, value, ...)")
    frames = attention.meta.get("frames") or ()
    locals_ = frames[-1].tensors if frames else {}
    gone = removal(source, start, end, by)
    known = {name: tensor for name, tensor in locals_.items() if name not in gone.lost}
    shared = _spelled(found.shared, found.sizes.rope, known)
    latents = _spelled(found.latents, found.sizes.latent, known)
    if not shared:
        raise SourceError("no local variable holds the part of the keys that all heads share")
    if not latents:
        local, made = source.fresh("tfb_latent"), _taken_by(source, start, str(found.linear.target))
        gone = removal(source, start, end, by, f"{local} = {made}")
        latents = f"{local}.reshape(1, 1, -1, {found.sizes.latent})"
    others = [*end.args[:2], *end.args[4:], *(keyword.value for keyword in end.keywords)]
    gone.check(*others)
    pairs = ((end.args[2], shared), (end.args[3], latents))
    return (*(Edit(*source.offsets(given), text, by) for given, text in pairs), *gone.edits)


def _spelled(nodes: tuple[fx.Node, ...], width: int, known: dict[str, object]) -> str:
    """An expression of shape [1, 1, tokens, width] for one of the nodes, which hold the same; "" for none."""
    for node in nodes:
        for name, tensor in known.items():
            if tensor is node.meta["val"]:
                flat = value_of(node).dim() == 4 and value_of(node).shape[:2] == (1, 1)
                return name if flat else f"{name}.reshape(1, 1, -1, {width})"
    return ""


def _taken_by(source: ForwardSource, call: ast.expr, child: str) -> str:
    """The text of x in `self.child(x)`."""
    uses = source.self_uses(child)
    if not isinstance(call, ast.Call) or not any(call.func is use for use in uses) or len(call.args) != 1:
        raise SourceError("no local variable holds its latents")
    return source.segment(call.args[0])
