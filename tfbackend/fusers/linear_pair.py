"""Two linears with nothing but element-wise work between them -> the first sharded by columns, the second by rows.

    self.c_proj(self.act(self.c_fc(x)))

Only on several ranks, and only where the model's own tensor-parallel plan says nothing of either. Each rank then keeps
its slice of the width between the two, so what lies between must give a slice of its result for a slice of its input:
it is run on whole vectors and on slices of them.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils._pytree import tree_map

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.fusers.linears import is_linear, linear
from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.query import between, value_of
from tfbackend.layerspecs import COLWISE, ROWWISE


class LinearPairFuser:
    name: ClassVar[str] = "linear_pair"

    def match(self, site: Site) -> Match | Miss:
        if site.serving.tp_size == 1:
            return Miss(self.name, site.qualname, "there is one rank", near=False)
        for node in site.trace.graph.nodes:
            if not is_linear(site, node) or (pair := self._pair(site, node)) is None:
                continue
            first, second = pair
            return Match({"first": first, "second": second})
        return Miss(self.name, site.qualname, "no linear feeds another through element-wise work", near=False)

    def _pair(self, site: Site, node: fx.Node) -> tuple[str, str] | None:
        first, second = str(node.target), _next(site, node)
        if not second or first == second or not site.trace.complete:
            return None
        for name in (first, second):
            planned = site.path(name) in site.tp_style
            if "." in name or name in site.taken or planned or len(site.trace.calls(name)) != 1:
                return None
        width = linear(site, first).out_features
        if linear(site, second).in_features != width or width % site.serving.tp_size:
            return None
        end = site.trace.calls(second)[0]
        return (first, second) if end.args and _sliceable(site, node, end, width) else None

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        first, second = match.roles["first"], match.roles["second"]
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=f"{first} by columns, {second} by rows",
            styles=((first, COLWISE), (second, ROWWISE)),
            captured=(("first", first), ("second", second)),
        )


def _next(site: Site, start: fx.Node) -> str:
    """The one linear that everything computed from `start` goes into next; "" if there is no such one."""
    todo, seen, found = [start], set[fx.Node](), set[str]()
    while todo:
        for user in todo.pop().users:
            if is_linear(site, user):
                found.add(str(user.target))
            elif user.op == "output":
                return ""
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return found.pop() if len(found) == 1 else ""


def _sliceable(site: Site, start: fx.Node, end: fx.Node, width: int) -> bool:
    """Whether the work between two linears gives, for each rank's slice of its input, that slice of its result."""
    path = [*between(start, end)]
    inside = {start, *path}
    if any(user is not end and user not in inside for node in inside for user in node.users):
        return False
    if any(read not in inside for node in path for read in node.all_input_nodes) or len(end.args) != 1:
        return False
    generator = torch.Generator().manual_seed(5)
    for spread in (1.0, 30.0):
        x = torch.randn(value_of(start).shape, generator=generator) * spread
        try:
            whole = _run(site, path, start, end, x)
            parts = [_run(site, path, start, end, part) for part in x.chunk(site.serving.tp_size, dim=-1)]
        except RUN_ERRORS:
            return False
        if not isinstance(whole, torch.Tensor) or whole.shape[-1] != width:
            return False
        if not torch.allclose(torch.cat(parts, dim=-1), whole, rtol=1e-5, atol=1e-6):
            return False
    return True


def _run(site: Site, path: list[fx.Node], start: fx.Node, end: fx.Node, x: torch.Tensor) -> Any:
    """The input of `end` where `start` gives x. Modules with parameters or buffers have no values to be run with."""
    env: dict[fx.Node, Any] = {start: x.clone()}
    for node in path:
        args, kwargs = tree_map(lambda a: env[a] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
        target: Any = node.target
        if node.op == "call_module":
            child = site.child(str(node.target))
            if [*child.parameters(), *child.buffers()]:
                raise ValueError(f"{node.target} has parameters")
            target = copy.deepcopy(child).eval()
        env[node] = target(*args, **kwargs)
    return env[end.args[0]]  # type: ignore[index]
