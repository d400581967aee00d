"""Whether a call may be taken out of a forward: nobody else uses the child, and nothing is written in between.

Everything here refuses when in doubt, with the reason as text; "" means that nothing speaks against it.
"""

from __future__ import annotations

import ast

from torch import fx

from tfbackend.graph.tracing import Trace
from tfbackend.source.forward import ForwardSource, SourceError

_OWN_SCOPE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.For, ast.While)


def only_call(trace: Trace, source: ForwardSource, child: str) -> tuple[fx.Node, ast.Call] | str:
    """The one call `self.<child>(x)` of the forward, as graph node and as expression; or why it is not to be had."""
    if len(uses := source.self_uses(child)) > 1 and len(trace.calls(child)) == 1:
        return f"{child} is used at {len(uses)} places of the source, one of them was traced"
    return traced_call(trace, source, child)


def traced_call(trace: Trace, source: ForwardSource, child: str) -> tuple[fx.Node, ast.Call] | str:
    """The one call `self.<child>(x)` that was traced; there may be uses in branches that were not."""
    nodes, uses = trace.calls(child), source.self_uses(child)
    if len(nodes) != 1:
        return f"{child} is called {len(nodes)} times"
    node = nodes[0]
    if len(node.args) != 1 or node.kwargs:
        return f"{child} is called with more than one argument"
    try:
        call = source.expression(node.meta["span"])
    except SourceError as error:
        return str(error)
    if not isinstance(call, ast.Call) or not any(call.func is use for use in uses):
        return f"{child} is not called as self.{child}(...)"
    for around in source.scope_of(call):
        if isinstance(around, _OWN_SCOPE):
            return f"{child} is called inside a {type(around).__name__}"
    return node, call


def written_between(trace: Trace, first: fx.Node, last: fx.Node) -> str:
    """Whether anything is written in place between two nodes of the graph."""
    order = {node: index for index, node in enumerate(trace.graph.nodes)}
    for node in trace.mutations:
        if order[first] <= order[node] <= order[last]:
            return f"{getattr(node.target, '__name__', node.target)} writes in place between the calls"
    return ""
