"""Keys and values that one linear makes of a latent, found in the graph of an attention module.

    [k_1 | v_1 | k_2 | v_2 ...] = linear(latent)            key_h = [k_h | a part that all heads share]

How the code gets there, by views, concatenation or writing into an empty tensor, does not matter: its operations are
run on random numbers and must move those to exactly these places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.query import SHAPE_ONLY, is_in_place, name_of, value_of, widened
from tfbackend.graph.tracing import Trace
from tfbackend.serving import MLASizes

_VIEWS = SHAPE_ONLY | {"expand", "expand_as"}


@dataclass(frozen=True)
class Expansion:
    """What was found.

    Attributes:
        linear: the call of the linear.
        latents: its input [..., tokens, latent] and what that is a view of, with no more numbers.
        shared: likewise the part of the keys that all heads share, [..., tokens, rope].
        sizes: the widths.
    """

    linear: fx.Node
    latents: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]
    sizes: MLASizes


def find_expansion(trace: Trace, linear: fx.Node) -> Expansion | str:
    """Read the one attention call of a trace, whose values come from the call `linear`; or say what it does instead."""
    query, key, value = (value_of(n).shape for n in trace.attention[0].args[:3] if isinstance(n, fx.Node))
    heads, tokens, given = query[1], query[2], value_of(linear).shape[-1]
    if (key[1], value[1]) != (heads, heads) or given % heads:
        return f"{key[1]} KV heads of {heads} heads are made of {given} numbers"
    nope = given // heads - value[3]
    rope = key[3] - nope
    if nope <= 0 or rope <= 0:
        return f"of {given // heads} numbers a head takes a key of {key[3]} and a value of {value[3]}"
    taken = linear.args[0] if linear.args else None
    if not isinstance(taken, fx.Node):
        return f"{linear.target} is called in an unusual way"
    path = _Path(trace, linear)
    shared = _shared(path, tokens * rope, rope)
    if isinstance(shared, str):
        return shared
    sizes = MLASizes(value_of(taken).shape[-1], rope, nope, value[3])
    if problem := _moves(path, shared[-1], sizes, heads):
        return problem
    return Expansion(linear, tuple(_sized(taken, tokens * sizes.latent, sizes.latent)), shared, sizes)


class _Path:
    """What lies between the linear and the attention call, writes in place included.

    Attributes:
        nodes: in the order of the graph.
        entering: what they take beside the linear's output.
    """

    def __init__(self, trace: Trace, linear: fx.Node) -> None:
        self.trace, self.linear = trace, linear
        nodes = list(trace.graph.nodes)
        nodes = nodes[nodes.index(linear) + 1 : nodes.index(trace.attention[0])]
        derived = self._derived(nodes) & self._needed(nodes)
        self.nodes = [node for node in nodes if node in derived]
        entering = (i for node in self.nodes for i in node.all_input_nodes if i not in derived and i is not linear)
        self.entering = list(dict.fromkeys(entering))

    @property
    def key(self) -> fx.Node:
        node = self.trace.attention[0].args[1]
        assert isinstance(node, fx.Node)
        return node

    @property
    def value(self) -> fx.Node:
        node = self.trace.attention[0].args[2]
        assert isinstance(node, fx.Node)
        return node

    def _derived(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """What has something of the linear's output, or is written into with it."""
        derived = {self.linear}
        for node in nodes:
            if any(read in derived for read in node.all_input_nodes):
                derived |= {node, _root(node)} if node in self.trace.mutations else {node}
        return derived

    def _needed(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """What key and value are computed from, and what writes into that."""
        needed, roots = {self.key, self.value}, {_root(self.key), _root(self.value)}
        for node in reversed(nodes):
            if node in needed or (node in self.trace.mutations and _root(node) in roots):
                needed |= {node, *node.all_input_nodes}
                roots |= {_root(read) for read in node.all_input_nodes}
        return needed


def _root(node: fx.Node) -> fx.Node:
    """The tensor that a node is a view of; for a write in place, the one that is written into."""
    while (name_of(node) in _VIEWS or is_in_place(name_of(node))) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _upward(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    while name_of(node) in _VIEWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


def _sized(node: fx.Node, count: int, width: int) -> Iterator[fx.Node]:
    """The node and what it is a view of, those that have exactly so many numbers in rows of `width`."""
    for found in _upward(node):
        held = found.meta.get("val")
        if isinstance(held, torch.Tensor) and held.numel() == count and held.shape[-1] == width:
            yield found


def _shared(path: _Path, count: int, width: int) -> tuple[fx.Node, ...] | str:
    """The one tensor that enters beside the linear's output, as what it is a view of, nearest first."""
    found = {tuple(_sized(node, count, width))[-1:]: node for node in path.entering}
    for sized, node in found.items():
        if not sized:
            what = f"{node.target}" if node.op in ("get_attr", "call_module") else name_of(node) or node.op
            return f"its keys or values also take {what} of shape {tuple(value_of(node).shape)}"
    if len(found) != 1:
        return f"its keys take {len(found)} tensors beside what the heads are made of"
    chains = [tuple(_sized(node, count, width)) for node in path.entering]
    return max(chains, key=len)


def _moves(path: _Path, shared: fx.Node, sizes: MLASizes, heads: int) -> str:
    """Whether random numbers end up where they belong; "" if so."""
    generator = torch.Generator().manual_seed(5)
    given = torch.randn(value_of(path.linear).shape, generator=generator)
    part = torch.randn(value_of(shared).shape, generator=generator)
    env: dict[fx.Node, Any] = {path.linear: given.clone(), shared: part.clone()}
    between = {node for read in path.entering for node in _upward(read)}
    for node in path.trace.graph.nodes:
        if node in env or (node not in path.nodes and node not in between):
            continue
        if node.op != "call_function":
            if node in path.nodes:
                return f"{node.target} works on its keys or values"
            continue
        if all(read in env for read in node.all_input_nodes):
            try:
                args, kwargs = map_arg(widened((node.args, node.kwargs)), lambda n: env[n])
                env[node] = node.target(*args, **kwargs)
            except RUN_ERRORS as error:
                return f"{name_of(node)} does not run by itself: {type(error).__name__}: {error}"
        elif node in path.nodes:
            return f"{name_of(node)} takes what its keys and values are not made of"
    made = given.view(-1, heads, sizes.nope + sizes.value).transpose(0, 1)[None]
    keys, values = made[..., : sizes.nope], made[..., sizes.nope :]
    keys = torch.cat((keys, part.view(1, 1, -1, sizes.rope).expand(-1, heads, -1, -1)), dim=-1)
    if not torch.equal(env[path.key], keys):
        return "its keys are not what the linear gives each head, with the shared part behind"
    equal = torch.equal(env[path.value], values)
    return "" if equal else "its values are not the rest of what the linear gives each head"
