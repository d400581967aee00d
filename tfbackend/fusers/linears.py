"""What the fusers that merge linears share: reading a linear, joining calls into one, and agreeing on a bias."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from tfbackend.fusers.base import Site, WeightEntry
from tfbackend.fusers.products import LinearShape, linear_shape
from tfbackend.graph.query import between, sources, value_of
from tfbackend.source.edits import Edit
from tfbackend.source.effects import only_call, written_between


def is_linear(site: Site, node: fx.Node) -> bool:
    """Whether a graph node is a call of a child that is a linear."""
    return node.op == "call_module" and linear_shape(site.child(str(node.target))) is not None


def linear(site: Site, name: str) -> LinearShape:
    shape = linear_shape(site.child(name))
    assert shape is not None, name
    return shape


def weight_entry(site: Site, source: str, target: str, shard: str | int | None = None) -> WeightEntry:
    """Where the tensors of the linear `source` go."""
    return WeightEntry(source, target, shard, linear(site, source).transposed)


def linear_sources(site: Site, node: fx.Node) -> list[fx.Node]:
    """The linears that `node` was last computed from."""
    return [n for n in sources(node, lambda n: is_linear(site, n)) if is_linear(site, n)]


@dataclass(frozen=True)
class Call:
    """One call `self.<child>(x)`: its node, its expression and that of x."""

    child: str
    node: fx.Node
    expression: ast.Call


def find_calls(site: Site, children: Sequence[str]) -> list[Call] | str:
    """The calls of several children of one input, in the order they run, safe to be made as one; or why not."""
    source, calls = site.source, []
    if isinstance(source, str):
        return source
    for child in children:
        if child in site.taken:
            return f"{child} belongs to another rewrite"
        found = only_call(site.trace, source, child)
        if isinstance(found, str):
            return found
        calls.append(Call(child, *found))
    order = {node: index for index, node in enumerate(site.trace.graph.nodes)}
    calls.sort(key=lambda call: order[call.node])
    if len({call.node.args[0] for call in calls}) != 1:
        return f"{', '.join(children)} do not share one input"
    return written_between(site.trace, calls[0].node, calls[-1].node) or calls


def same_bias(site: Site, children: Sequence[str]) -> bool | str:
    """Whether the children have a bias; a text where some have and some have not."""
    biases = {linear(site, child).bias for child in children}
    return biases.pop() if len(biases) == 1 else "some of the linears have a bias and some have none"


def join_calls(site: Site, calls: Sequence[Call], merged: str, order: Sequence[str], by: str) -> tuple[Edit, ...]:
    """Edits that make one call of `self.<merged>` where the first of `calls` stood and pick the parts from it.

    `order` lists the children as the merged layer lays them out. The first call becomes
    `(name := self.merged(x).split(self.merged_sizes, dim=-1))[i]`, the others `name[i]`.
    """
    source = site.source
    assert not isinstance(source, str)
    local = source.fresh(f"tfb_{merged}")
    argument = source.segment(calls[0].expression.args[0])
    me = source.me
    made = f"({local} := {me}.{merged}({argument}).split({me}.{merged}_sizes, dim=-1))"
    edits = []
    for call in calls:
        start, end = source.offsets(call.expression)
        head = made if call is calls[0] else local
        edits.append(Edit(start, end, f"{head}[{order.index(call.child)}]", by))
    return tuple(edits)


def merged_name(site: Site, wanted: str) -> str:
    """`wanted`, or a variation that the site does not have yet."""
    name, taken = wanted, {*dict(site.module.named_children()), *vars(site.module)}
    while name in taken:
        name += "_merged"
    return name


def consumer(site: Site, start: fx.Node) -> str:
    """The one linear that everything computed from `start` goes through first; "" if there is no such one.

    Nothing on the way may be a module of its own, since that could look across what ranks share out.
    """
    todo, seen, found = [start], set[fx.Node](), set[str]()
    while todo:
        for user in todo.pop().users:
            if is_linear(site, user):
                found.add(str(user.target))
            elif user.op in ("call_module", "output"):
                if user.op == "output" or not isinstance(site.child(str(user.target)), nn.Dropout):
                    return ""
                todo.append(user)
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return found.pop() if len(found) == 1 else ""


def across_heads(site: Site, start: fx.Node, end: fx.Node) -> str:
    """What between a projection and its heads, `end` [1, heads, tokens, dim], ranks could not do on their own heads.

    That is a module over all of them, or one that may hold something for each: it would use the first heads' for those
    of the second rank. A single head is never divided.
    """
    heads, dim, width = value_of(end).shape[1], value_of(end).shape[3], value_of(start).shape[-1]
    if heads == 1:
        return ""
    for node in (*between(start, end), end):
        for read in (n for n in node.all_input_nodes if n.op == "get_attr"):
            if value_of(read).numel() > dim:
                return f"{read.target} may hold something for each head, which ranks do not share"
        if node.op != "call_module" or is_linear(site, node):
            continue
        child = site.child(str(node.target))
        if value_of(node).shape[-1] == width:
            return f"{node.target} works across heads, which ranks do not share"
        if [*child.children()] or any(p.numel() > dim for p in child.parameters()):
            return f"{node.target} may hold something for each head, which ranks do not share"
    return ""
