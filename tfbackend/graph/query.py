"""Questions about a traced graph, where a value comes from and what lies between, and about paths of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

SHAPE_ONLY = frozenset(
    "view reshape transpose permute split chunk unbind squeeze unsqueeze contiguous flatten narrow select swapaxes "
    "movedim split_with_sizes tensor_split getitem _getitem __getitem__ unflatten".split()
)
"""Names of operations that move elements and change none."""

SOFTMAX, SDPA = frozenset({"softmax", "_softmax", "special_softmax"}), "scaled_dot_product_attention"
PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "baddbmm_", "einsum"})
"""Names of operations that multiply two stacks of matrices, their last two tensor arguments."""

CASTS = frozenset("to float type_as type half bfloat16 double contiguous".split())


def name_of(node: fx.Node) -> str:
    """The bare name of what a call_function node calls, "" for other nodes."""
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def is_in_place(name: str) -> bool:
    """Whether an operation of this name writes into its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def value_of(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def through_casts(node: fx.Node) -> fx.Node:
    """The node before any chain of casts that ends in `node`."""
    while name_of(node) in CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def widened(arguments: Any) -> Any:
    """Arguments of an operation with float32 for every float that it casts to: what is compared is run in float32."""
    return map_aggregate(
        arguments, lambda a: torch.float32 if isinstance(a, torch.dtype) and a.is_floating_point else a
    )


def sources(node: fx.Node, stop: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Walking backward from `node`, the first nodes for which `stop` holds, in graph order."""
    seen: set[fx.Node] = set()
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if stop(current):
            found.add(current)
        else:
            todo += current.all_input_nodes
    return [n for n in node.graph.nodes if n in found]


def between(start: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    """Nodes on any path from `start` to `end`, both left out, in graph order."""
    reach_end: set[fx.Node] = set()
    todo = [end]
    while todo:
        current = todo.pop()
        if current in reach_end or current is start:
            continue
        reach_end.add(current)
        todo += current.all_input_nodes
    from_start: set[fx.Node] = {start}
    for node in start.graph.nodes:
        if any(i in from_start for i in node.all_input_nodes):
            from_start.add(node)
    for node in start.graph.nodes:
        if node in reach_end and node in from_start and node is not start and node is not end:
            yield node


def leads_to(node: fx.Node, end: fx.Node) -> bool:
    """Whether `end` is computed from `node`."""
    todo, seen = [end], set[fx.Node]()
    while todo:
        current = todo.pop()
        if current is node:
            return True
        if current not in seen:
            seen.add(current)
            todo += current.all_input_nodes
    return False


def is_within(path: str, above: str) -> bool:
    """Whether the module at `path` is the one at `above` or inside it."""
    return path == above or path.startswith(f"{above}.")
