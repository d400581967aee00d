"""Rotating query and key by cos and sin in plain torch -> one rotary layer.

    q, k = apply_rotary_pos_emb(q, k, cos, sin)        ->        q, k = self.rotary(q, k, cos, sin)

Which way the elements are paired is not read from the code: the operations of the call are run on random tensors, with
the cos and sin of the model's own rotary embedding, and compared with each way there is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import fx

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.graph.constants import real_value
from tfbackend.graph.query import SHAPE_ONLY, name_of, value_of, widened
from tfbackend.layerspecs import RotarySpec
from tfbackend.source.edits import Edit
from tfbackend.source.forward import SourceError


@dataclass(frozen=True)
class _Rotation:
    """The operations of one call in the graph: what goes in, what is done, what comes out."""

    call: ast.Call
    inside: tuple[fx.Node, ...]
    query: fx.Node
    key: fx.Node
    cos: fx.Node
    sin: fx.Node
    outputs: tuple[fx.Node, fx.Node]


class RopeFuser:
    name: ClassVar[str] = "rope"

    def match(self, site: Site) -> Match | Miss:
        if len(site.trace.attention) != 1 or isinstance(site.source, str):
            return Miss(self.name, site.qualname, "does not call the attention interface once", near=False)
        found = self._find(site)
        if isinstance(found, str):
            near = any(name_of(n) in ("cat", "stack") for n in site.trace.graph.nodes)
            return Miss(self.name, site.qualname, found, site.place(), near=near)
        spec = self._read(site, found)
        if not isinstance(spec, str) and spec.wide and site.serving.dtype != torch.float32:
            spec = "rotates in float32, the kernel in the model's dtype"
        if isinstance(spec, str):
            return Miss(self.name, site.qualname, spec, site.place())
        source = site.source
        start, end = source.offsets(found.call.func)
        me = source.me
        return Match({"spec": spec}, (Edit(start, end, f"{me}.rotary", self.name),), frozenset({"rotary"}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec = match.roles["spec"]
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            children=(("rotary", spec),),
            edits=match.edits,
            claims=match.claims,
        )

    def _find(self, site: Site) -> _Rotation | str:
        """The one call f(q, k, cos, sin) whose results are what attention is given as query and key."""
        source = site.source
        assert not isinstance(source, str)
        if "rotary" in {*dict(site.module.named_children()), *vars(site.module)}:
            return "already has an attribute called rotary"
        query_out, key_out = site.trace.attention[0].args[:2]
        assert isinstance(query_out, fx.Node)
        assert isinstance(key_out, fx.Node)
        span = query_out.meta.get("span")
        inside = tuple(n for n in site.trace.graph.nodes if n.meta.get("span") == span and n.op == "call_function")
        if span is None or key_out.meta.get("span") != span:
            return "query and key are not results of one call"
        try:
            call = source.expression(span)
        except SourceError as error:
            return str(error)
        plain = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if not plain or not isinstance(call, ast.Call) or len(call.args) != 4 or call.keywords:
            return "the rotation is not a call f(q, k, cos, sin)"
        return self._roles(call, inside, (query_out, key_out))

    def _roles(self, call: ast.Call, inside: tuple[fx.Node, ...], outputs: tuple[fx.Node, fx.Node]) -> _Rotation | str:
        entering = [i for n in inside for i in n.all_input_nodes if i not in inside]
        entering = list(dict.fromkeys(entering))
        heads = [n for n in entering if value_of(n).dim() == 4]
        angles = [n for n in entering if value_of(n).dim() == 3]
        if len(entering) != 4 or len(heads) != 2 or len(angles) != 2:
            return f"the rotation takes {len(heads)} tensors of heads and {len(angles)} of angles"
        query = [n for n in heads if _reaches(n, outputs[0], inside)]
        key = [n for n in heads if _reaches(n, outputs[1], inside)]
        if len(query) != 1 or len(key) != 1 or query == key:
            return "the rotation mixes query and key"
        return _Rotation(call, inside, query[0], key[0], angles[0], angles[1], outputs)

    def _read(self, site: Site, found: _Rotation) -> RotarySpec | str:
        cos, sin = (real_value(site.observation, value_of(n)) for n in (found.cos, found.sin))
        if cos is None or sin is None:
            return "its angles do not depend on positions alone"
        generator = torch.Generator().manual_seed(5)
        query, key = (torch.randn(value_of(n).shape, generator=generator) for n in (found.query, found.key))
        wanted = _run(found, query, key, cos, sin)
        wide = any(_is_wide(n) for n in found.inside)
        copy = any(_read_elsewhere(n, found.inside) for n in (found.query, found.key))
        for spec in _candidates(query.shape[-1], cos.shape[-1], wide, copy):
            for first, second in ((cos, sin), (sin, cos)):
                if _folds(first, spec) and _folds(second, spec) and _agree(spec, query, key, first, second, wanted):
                    return spec if first is cos else "takes sin before cos"
        return "pairs elements in a way of its own"


def _read_elsewhere(node: fx.Node, inside: tuple[fx.Node, ...]) -> bool:
    """Whether anything but the rotation may read the memory of `node`, so that it must not be written into."""
    if any(_is_tensor(user) and user not in inside for user in node.users):
        return True
    while name_of(node) in SHAPE_ONLY and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if sum(_is_tensor(user) for user in node.users) > 1:
            return True
    return node.op in ("placeholder", "get_attr")


def _is_tensor(node: fx.Node) -> bool:
    return node.op == "output" or isinstance(node.meta.get("val"), torch.Tensor)


def _is_wide(node: fx.Node) -> bool:
    """Whether the node makes float32 of a tensor, in a model that may be of another dtype."""
    return name_of(node) in ("float", "double") or (name_of(node) == "to" and torch.float32 in node.args)


def _reaches(start: fx.Node, end: fx.Node, inside: tuple[fx.Node, ...]) -> bool:
    todo = [end]
    while todo:
        node = todo.pop()
        if node is start:
            return True
        todo += [i for i in node.all_input_nodes if i in inside or i is start]
    return False


def _candidates(head_dim: int, angles: int, wide: bool, copy: bool) -> Iterator[RotarySpec]:
    if angles > head_dim or angles % 2:
        return
    for neox, half in product((True, False), ("first", "even")):
        yield RotarySpec(head_dim, angles, neox, wide, half, copy)


def _folds(angles: torch.Tensor, spec: RotarySpec) -> bool:
    """Whether the elements that the spec leaves out repeat those that it picks."""
    half = spec.rotary_dim // 2
    other = slice(half, 2 * half) if spec.half == "first" else slice(1, 2 * half, 2)
    return torch.equal(angles[..., spec.picked], angles[..., other])


def _run(found: _Rotation, *tensors: torch.Tensor) -> list[torch.Tensor]:
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (found.query, found.key, found.cos, found.sin):
        nodes[node] = graph.placeholder(node.name)
    for node in found.inside:
        nodes[node] = made = graph.node_copy(node, lambda n: nodes[n])
        made.args, made.kwargs = widened(made.args), widened(made.kwargs)
    graph.output(tuple(nodes[n] for n in found.outputs))
    return list(fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*tensors))


def _agree(
    spec: RotarySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    wanted: list[torch.Tensor],
) -> bool:
    got = spec.reference()(query, key, cos, sin)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))
