"""A gated linear unit -> one merged projection and one activation-and-multiply.

    self.act_fn(self.gate_proj(x)) * self.up_proj(x)        ->    self.act_and_mul((tfb_gate_up :=
    self.gate_up_proj(x)))

Packed gates (`gate, up = self.gate_up_proj(x).chunk(2, dim=-1)`) keep their linear. The activation is known by the
values it gives, see `activations.activation_name`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import ClassVar

import torch
from torch import fx

from tfbackend.activations import activation_name
from tfbackend.fusers.base import Match, Miss, Rewrite, Site, WeightEntry
from tfbackend.fusers.linears import (
    Call,
    consumer,
    find_calls,
    is_linear,
    linear,
    merged_name,
    same_bias,
    weight_entry,
)
from tfbackend.graph.query import name_of
from tfbackend.layerspecs import ROWWISE, ActMulSpec, MergedLinearSpec
from tfbackend.source.edits import Edit
from tfbackend.source.forward import SourceError

FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Activations for which vLLM has an activation-and-multiply kernel."""


class GLUFuser:
    name: ClassVar[str] = "glu"

    def match(self, site: Site) -> Match | Miss:
        reasons = []
        for node in site.trace.graph.nodes:
            if name_of(node) not in ("mul", "__mul__", "multiply") or len(node.all_input_nodes) != 2:
                continue
            for gated, plain in (node.args, tuple(reversed(node.args))):
                answer = self._gated(site, node, gated, plain)
                if isinstance(answer, Match):
                    out = consumer(site, node)
                    if out or site.serving.tp_size == 1:
                        return replace(answer, roles={**answer.roles, "out": out})
                    answer = "no one linear takes the product"
                reasons += [answer] if answer else []
        if reasons:
            return Miss(self.name, site.qualname, reasons[0], site.place())
        return Miss(self.name, site.qualname, "multiplies no activated linear with another", near=False)

    def _gated(self, site: Site, product: fx.Node, gated: object, plain: object) -> Match | str:
        if not isinstance(gated, fx.Node) or not isinstance(plain, fx.Node):
            return ""
        activation = _activation(site, gated)
        if activation is None:
            return ""
        name, before = activation
        if is_linear(site, before) and is_linear(site, plain) and before is not plain:
            return self._pair(site, product, name, before, plain)
        if _is_half(before, 0) and _is_half(plain, 1) and before.args[0] is plain.args[0]:
            return self._packed(site, product, name, before)
        if _is_half(before, 1) and _is_half(plain, 0) and before.args[0] is plain.args[0]:
            return "the second half of the packed linear is activated, vLLM's kernels activate the first"
        return ""

    def _pair(self, site: Site, product: fx.Node, activation: str, gate: fx.Node, up: fx.Node) -> Match | str:
        names = [str(gate.target), str(up.target)]
        calls = find_calls(site, names)
        bias = same_bias(site, names)
        if isinstance(calls, str) or isinstance(bias, str):
            return calls if isinstance(calls, str) else str(bias)
        if activation not in FUSED_ACTIVATIONS:
            return f"vLLM has no {activation}-and-multiply"
        if len(gate.users) != 1 or len(up.users) != 1:
            return f"{names[0]} or {names[1]} is used for more than the product"
        merged = merged_name(site, "gate_up_proj")
        edits = self._pair_edits(site, product, calls, merged, names)
        if isinstance(edits, str):
            return edits
        roles = {"gate": names[0], "up": names[1], "merged": merged, "activation": activation, "bias": bias}
        return Match(roles, edits, frozenset(names))

    def _pair_edits(
        self, site: Site, product: fx.Node, calls: list[Call], merged: str, names: list[str]
    ) -> tuple[Edit, ...] | str:
        source = site.source
        assert not isinstance(source, str)
        whole = _product_span(site, product)
        if isinstance(whole, str):
            return whole
        me, argument = source.me, source.segment(calls[0].expression.args[0])
        inside = [start <= source.offsets(c.expression)[0] < end for c in calls for start, end in [whole]]
        if all(inside):
            return (Edit(*whole, f"{me}.act_and_mul({me}.{merged}({argument}))", self.name),)
        if any(inside):
            return "one of the two linears is called inside the product and one before it"
        local = source.fresh(f"tfb_{merged}")
        edits = []
        for call in calls:
            first = call is calls[0]
            half = f"({local} := {me}.{merged}({argument}))" if first else local
            text = f"{half}.chunk(2, dim=-1)[{names.index(call.child)}]"
            edits.append(Edit(*source.offsets(call.expression), text, self.name))
        return (*edits, Edit(*whole, f"{me}.act_and_mul({local})", self.name))

    def _packed(self, site: Site, product: fx.Node, activation: str, half: fx.Node) -> Match | str:
        chunk = half.args[0]
        assert isinstance(chunk, fx.Node)
        packed = chunk.args[0]
        if not isinstance(packed, fx.Node) or not is_linear(site, packed) or len(packed.users) != 1:
            return ""
        if activation not in FUSED_ACTIVATIONS:
            return f"vLLM has no {activation}-and-multiply"
        name, calls, whole = str(packed.target), find_calls(site, [str(packed.target)]), _product_span(site, product)
        if isinstance(calls, str) or isinstance(whole, str):
            return calls if isinstance(calls, str) else str(whole)
        source = site.source
        assert not isinstance(source, str)
        start, end = source.offsets(calls[0].expression)
        local, me = source.fresh(f"tfb_{name}"), source.me
        if whole[0] <= start < whole[1]:
            return f"{name} is called inside the product"
        edits = (
            Edit(start, end, f"({local} := {source.segment(calls[0].expression)})", self.name),
            Edit(*whole, f"{me}.act_and_mul({local})", self.name),
        )
        bias = linear(site, name).bias
        return Match({"packed": name, "activation": activation, "bias": bias}, edits, frozenset({name}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        roles, act = match.roles, ActMulSpec(match.roles["activation"])
        if "packed" in roles:
            name = roles["packed"]
            module = linear(site, name)
            half = module.out_features // 2
            spec = MergedLinearSpec(module.in_features, (half, half), roles["bias"])
            removed: tuple[str, ...] = (name,)
            merged = name
            weights: tuple[WeightEntry, ...] = (weight_entry(site, name, name),)
        else:
            gate, up, merged = linear(site, roles["gate"]), linear(site, roles["up"]), roles["merged"]
            spec = MergedLinearSpec(gate.in_features, (gate.out_features, up.out_features), roles["bias"])
            removed = (roles["gate"], roles["up"])
            weights = (weight_entry(site, roles["gate"], merged, 0), weight_entry(site, roles["up"], merged, 1))
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=f"{', '.join(removed)} -> {merged}: {spec}, {act}",
            children=((merged, spec), ("act_and_mul", act)),
            removes=removed,
            edits=match.edits,
            weights=weights,
            styles=((roles["out"], ROWWISE),) if roles["out"] else (),
            claims=match.claims,
            captured=tuple((k, str(v)) for k, v in roles.items()),
        )


def _activation(site: Site, node: fx.Node) -> tuple[str, fx.Node] | None:
    """(name, input) where `node` is an activation of one input without parameters."""
    if len(node.all_input_nodes) != 1 or not isinstance(node.args[0] if node.args else None, fx.Node):
        return None
    before = node.args[0]
    assert isinstance(before, fx.Node)
    if node.op == "call_module":
        child = site.child(str(node.target))
        if [*child.named_parameters(), *child.named_buffers()] or len(node.args) != 1:
            return None
        name = activation_name(child)
    elif node.op == "call_function" and callable(node.target):
        target, rest, kwargs = node.target, node.args[1:], node.kwargs

        def run(x: torch.Tensor) -> torch.Tensor:
            return target(x, *rest, **kwargs)  # type: ignore[no-any-return]

        name = activation_name(run) if name_of(node) in ("silu", "gelu", "relu", "sigmoid") else None
    else:
        name = None
    return (name, before) if name else None


def _is_half(node: object, index: int) -> bool:
    if not isinstance(node, fx.Node) or name_of(node) != "_getitem" or node.args[1] != index:
        return False
    chunk = node.args[0]
    if not isinstance(chunk, fx.Node) or name_of(chunk) != "chunk":
        return False
    dim = chunk.kwargs.get("dim", chunk.args[2] if len(chunk.args) > 2 else 0)
    parts = chunk.kwargs.get("chunks", chunk.args[1] if len(chunk.args) > 1 else None)
    rank = len(chunk.meta["val"][0].shape)
    return bool(parts == 2 and dim in (-1, rank - 1))


def _product_span(site: Site, product: fx.Node) -> tuple[int, int] | str:
    source = site.source
    if isinstance(source, str):
        return source
    try:
        expression = source.expression(product.meta.get("span"))
    except SourceError as error:
        return str(error)
    if not isinstance(expression, ast.BinOp) or not isinstance(expression.op, ast.Mult):
        return "the product is not written as a * b"
    return source.offsets(expression)
