"""Real values of tensors that depend on nothing but the positions, such as the cos and sin of a rotary embedding.

A module without parameters whose inputs are positions, or tensors of which it reads the dtype only, gives the same
values in every run of these positions; it is run once more, on the CPU, where a proof or a fuser needs to see them.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.graph.interface import RUN_ERRORS, rescales
from tfbackend.graph.observe import Observation


def real_value(observation: Observation, tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a meta tensor of the observed run, float32 on the CPU; None where it depends on parameters or
    tokens.

    What a module makes of activations differs with them: it is run on two draws of them, and must not tell them apart.
    """
    made = observation.made.get(id(tensor))
    if made is None:
        return None
    module, (args, kwargs) = observation.modules[made.path], observation.calls[made.path][made.call]
    if next(module.parameters(), None) is not None:
        return None
    twin = copy.deepcopy(module).float()
    forward = inspect.unwrap(type(module).forward) if rescales(module) else type(module).forward
    values = []
    for seed in (1, 2):
        real_args, real_kwargs = tree_map(lambda x, seed=seed: _fill(x, seed), (args, kwargs))
        try:
            with torch.no_grad():
                values.append(tree_leaves(forward(twin, *real_args, **real_kwargs))[made.leaf])
        except RUN_ERRORS:
            return None
    same = isinstance(values[0], torch.Tensor) and torch.equal(values[0], values[1])
    return values[0] if same else None


def _fill(x: Any, seed: int) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if not x.dtype.is_floating_point:
        return torch.arange(x.numel()).view(x.shape)
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
