"""Modules of a base model that nothing follows from that is asked for, such as the pooler of one that embeds."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.graph.observe import Observation, model_inputs
from tfbackend.graph.query import is_within, leads_to
from tfbackend.graph.tracing import trace


def _of_its_own(x: Any) -> Any:
    return torch.empty_like(x) if isinstance(x, torch.Tensor) else x


def _needed(called: list[fx.Node], end: fx.Node) -> set[str]:
    """Paths of modules that `end` follows from. Where a call of a module is read all of them count as read: in a run
    over known outputs they give one and the same tensor."""
    needed, ends = set[str](), [end]
    while ends:
        found = {str(n.target) for n in called if any(leads_to(n, each) for each in ends)} - needed
        ends = [n for n in called if str(n.target) in found]
        needed |= found
    return needed


def unread_parts(base: nn.Module, observation: Observation, read: tuple[str, ...] = ()) -> frozenset[str]:
    """Paths of modules that the hidden states of a base model do not follow from: its pooler, where it has one.

    Args:
        read: paths of those that are of use all the same.
    """
    # Layers that were not run again gave what the first did, and dropout gives what it is given: each needs its own.
    known = {path: tree_map(_of_its_own, output) for path, output in observation.outputs.items() if path}
    traced = trace(base, (), model_inputs(base, torch.device("meta")), known=known)
    hidden = next((n for n in tree_leaves(traced.output) if isinstance(n, fx.Node)), None)
    if not traced.complete or hidden is None:
        return frozenset()
    called = [n for n in traced.graph.nodes if n.op == "call_module"]
    needed = _needed(called, hidden)
    idle = {str(n.target) for n in called} - needed
    return frozenset(path for path in idle if not any(is_within(used, path) for used in read))
