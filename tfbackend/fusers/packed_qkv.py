"""One linear that holds query, key and value as three blocks of rows -> one QKV projection, sharded by heads.

    qkv = self.qkv_proj(x)                        qkv = (tfb_qkv := self.qkv_proj(x).split(self.qkv_proj_sizes, dim=-1))
    q = qkv[..., :n]                        ->    q = tfb_qkv[0]
    k = qkv[..., n : n + m]                       k = tfb_qkv[1]

    q, k, v = self.c_attn(x).split(n, dim=2)      q, k, v = self.c_attn(x).split(self.c_attn_sizes, dim=-1)

Where a row goes is found by sending row numbers through the operations that only move elements. On one rank nothing in
the forward has to change; on several, the slices are replaced, since their bounds count the heads of all ranks.
Layouts that interleave q, k and v head by head stay one colwise linear, which keeps a rank's heads together as it is.
"""

from __future__ import annotations

import ast
from typing import ClassVar

import torch
from torch import fx
from torch.utils._pytree import tree_map

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.fusers.linears import Call, across_heads, consumer, linear, linear_sources, weight_entry
from tfbackend.graph.query import SHAPE_ONLY, name_of
from tfbackend.layerspecs import ROWWISE, QKVSpec
from tfbackend.source.edits import Edit
from tfbackend.source.effects import traced_call
from tfbackend.source.forward import SourceError


class PackedQKVFuser:
    name: ClassVar[str] = "packed_qkv"

    def match(self, site: Site) -> Match | Miss:
        if len(site.trace.attention) != 1:
            return Miss(self.name, site.qualname, "does not call the attention interface once", near=False)
        found = [linear_sources(site, a) for a in site.trace.attention[0].args[:3] if isinstance(a, fx.Node)]
        if any(len(f) != 1 for f in found) or len({f[0] for f in found}) != 1:
            return Miss(self.name, site.qualname, "q, k and v do not come from one linear", near=False)
        packed = str(found[0][0].target)
        if packed in site.taken or len(site.trace.calls(packed)) != 1:
            return Miss(self.name, site.qualname, f"{packed} is called more than once", site.place())
        if problem := self._layout_problem(site, found[0][0]):
            return Miss(self.name, site.qualname, problem, site.place())
        edits: tuple[Edit, ...] | str = ()
        out = consumer(site, site.trace.attention[0])
        if site.serving.tp_size > 1 and not out:
            return Miss(self.name, site.qualname, "no one linear takes the output of all heads", site.place())
        if site.serving.tp_size > 1:
            heads = [a for a in site.trace.attention[0].args[:3] if isinstance(a, fx.Node)]
            for problem in filter(None, (across_heads(site, found[0][0], end) for end in heads)):
                return Miss(self.name, site.qualname, problem, site.place())
            call = _traced_call(site, packed)
            edits = call if isinstance(call, str) else self._edits(site, call)
        if isinstance(edits, str):
            return Miss(self.name, site.qualname, edits, site.place())
        return Match({"packed": packed, "out": out}, edits, frozenset({packed}))

    def _sizes(self, site: Site) -> tuple[int, int, int]:
        call = site.observation.attention[site.qualname][0]
        q, k, v = call.query, call.key, call.value
        return q[1] * q[3], k[1] * k[3], v[1] * v[3]

    def _layout_problem(self, site: Site, node: fx.Node) -> str:
        rows = _row_numbers(site.trace.graph, node)
        sizes = self._sizes(site)
        width = linear(site, str(node.target)).out_features
        if sum(sizes) != width:
            return f"{node.target} has {width} rows, q, k and v take {sum(sizes)}"
        start = 0
        for role, size, argument in zip("qkv", sizes, site.trace.attention[0].args, strict=False):
            assert isinstance(argument, fx.Node)
            if not _passes_through_block(argument, node, rows, start, size):
                return f"{role} is not one block of rows of {node.target}, in order of heads"
            start += size
        return ""

    def _edits(self, site: Site, call: Call) -> tuple[Edit, ...] | str:
        source, sizes = site.source, self._sizes(site)
        assert not isinstance(source, str)
        rows, elsewhere = _row_numbers(site.trace.graph, call.node), _refusing_elsewhere(site, call, self.name)
        users = [*call.node.users]
        if len(users) == 1 and name_of(users[0]) in ("split", "chunk", "tensor_split"):
            split = self._resplit(site, call, users[0], rows)
            return split if isinstance(split, str) else (split, *elsewhere)
        local, me = source.fresh(f"tfb_{call.child}"), source.me
        start, end = source.offsets(call.expression)
        made = f"({local} := {source.segment(call.expression)}.split({me}.{call.child}_sizes, dim=-1))"
        edits, bounds = [Edit(start, end, made, self.name)], (0, sizes[0], sizes[0] + sizes[1], sum(sizes))
        for user in call.node.users:
            part = next((i for i in range(3) if _is_block(rows.get(user), bounds[i], bounds[i + 1])), None)
            try:
                expression = source.expression(user.meta.get("span"))
            except SourceError as error:
                return str(error)
            if part is None or not isinstance(expression, ast.Subscript):
                return f"{call.child} is not taken apart by three slices"
            edits.append(Edit(*source.offsets(expression), f"{local}[{part}]", self.name))
        return (*edits, *elsewhere)

    def _resplit(self, site: Site, call: Call, node: fx.Node, rows: dict[fx.Node, torch.Tensor]) -> Edit | str:
        """`x.split(size, dim=2)` -> `x.split(self.qkv_sizes, dim=-1)`, where it gives query, key and value."""
        source, sizes = site.source, self._sizes(site)
        assert not isinstance(source, str)
        try:
            expression = source.expression(node.meta.get("span"))
        except SourceError as error:
            return str(error)
        if not isinstance(expression, ast.Call) or not _receives(expression, node):
            return f"{call.child} is not taken apart by a method"
        assert isinstance(expression.func, ast.Attribute)
        bounds = (0, sizes[0], sizes[0] + sizes[1], sum(sizes))
        picked = {int(str(user.args[1])): rows.get(user) for user in node.users}
        if len(node.meta["val"]) != 3:
            return f"{call.child} is not taken apart into three"
        if not all(_is_block(part, bounds[i], bounds[i + 1]) for i, part in picked.items()):
            return f"{call.child} is not taken apart into query, key and value"
        cut = source.offsets(expression.func.value)[1], source.offsets(expression)[1]
        return Edit(*cut, f".split({source.me}.{call.child}_sizes, dim=-1)", self.name)

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        call, packed = site.observation.attention[site.qualname][0], match.roles["packed"]
        module = linear(site, packed)
        spec = QKVSpec(module.in_features, call.query[3], call.value[3], call.query[1], call.key[1], module.bias)
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=f"{packed}: {spec}",
            children=((packed, spec),),
            removes=(packed,),
            attributes=((f"{packed}_sizes", spec.sizes),),
            edits=match.edits,
            weights=(weight_entry(site, packed, packed),),
            styles=((match.roles["out"], ROWWISE),) if match.roles["out"] else (),
            claims=match.claims,
            captured=(("packed", packed),),
        )


def _traced_call(site: Site, packed: str) -> Call | str:
    if isinstance(site.source, str):
        return site.source
    found = traced_call(site.trace, site.source, packed)
    return found if isinstance(found, str) else Call(packed, *found)


def _refusing_elsewhere(site: Site, call: Call, by: str) -> tuple[Edit, ...]:
    """Uses of the linear in branches that the engine does not take: they count the heads of all ranks, so should one
    be taken after all it must end in an error."""
    source = site.source
    assert not isinstance(source, str)
    others = [use for use in source.self_uses(call.child) if use is not call.expression.func]
    return tuple(Edit(*source.offsets(use), f"{source.me}.not_traced_{call.child}", by) for use in others)


def _receives(expression: ast.Call, node: fx.Node) -> bool:
    """Whether a call is the method of a tensor, and not a function `torch.split(x, ...)`."""
    if not isinstance(expression.func, ast.Attribute) or expression.func.attr != name_of(node):
        return False
    return not (isinstance(expression.func.value, ast.Name) and expression.func.value.id == "torch")


def _row_numbers(graph: fx.Graph, start: fx.Node) -> dict[fx.Node, torch.Tensor]:
    """Row numbers of the linear `start` sent through every operation after it that only moves elements."""
    width, shape = start.meta["val"].shape[-1], start.meta["val"].shape
    env: dict[fx.Node, object] = {start: torch.arange(width).expand(shape)}
    for node in graph.nodes:
        if node.op != "call_function" or name_of(node) not in SHAPE_ONLY or node in env:
            continue
        if not any(i in env for i in node.all_input_nodes) or not all(i in env for i in node.all_input_nodes):
            continue
        args, kwargs = tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, (node.args, node.kwargs))
        env[node] = node.target(*args, **kwargs)
    return {node: value for node, value in env.items() if isinstance(value, torch.Tensor)}


def _passes_through_block(
    end: fx.Node, packed: fx.Node, rows: dict[fx.Node, torch.Tensor], start: int, size: int
) -> bool:
    """Whether all that flows from the packed linear into `end` flows through one node that is exactly the block."""
    wanted, tokens = torch.arange(start, start + size), end.meta["val"].shape[2]
    gates = {n for n, value in rows.items() if n is not packed and torch.equal(_first_token(value, tokens), wanted)}
    todo, seen = [end], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node is packed:
            return False
        if node not in gates and node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return bool(gates)


def _first_token(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Row numbers at token 0 in the order (head, element), from [1, heads, tokens, dim] or a layout before it."""
    if rows.dim() == 4 and rows.shape[2] == tokens:
        return rows[0, :, 0].flatten()
    return rows[0, 0].flatten() if rows.dim() >= 3 and rows.shape[1] == tokens else rows.new_empty(0)


def _is_block(rows: torch.Tensor | None, start: int, end: int) -> bool:
    if rows is None or rows.dim() != 3 or rows.shape[-1] != end - start:
        return False
    return torch.equal(rows[0, 0], torch.arange(start, end))
