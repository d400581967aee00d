"""Rows of the vocabulary table that Transformers sets to zero after it has loaded them.

Its models keep from initialising what was loaded by a flag on each parameter, which a slice of a parameter has not. A
class whose `_init_weights` zeroes the row of the padding token through a slice does so to a loaded table as well, and
what such a model computes for that token is computed from zeros.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions


def cleared_rows(model: nn.Module, path: str) -> tuple[int, ...]:
    """Rows of the embedding at `path` that loading leaves at zero, found by initialising one that counts as loaded."""
    table, owner = model.get_submodule(path), _owner(model, path)
    if not isinstance(table, nn.Embedding) or table.padding_idx is None or owner is None:
        return ()
    twin: nn.Module = copy.copy(table)
    weight = nn.Parameter(torch.ones(table.num_embeddings, 1, device="cpu"), requires_grad=False)
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    twin.__dict__ = {**vars(table), "_parameters": {"weight": weight}, "embedding_dim": 1, "_is_hf_initialized": False}
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        owner._initialize_weights(twin, is_custom_code=owner.is_custom_code())
        while path:  # a module may initialise the table in it
            path, _, name = path.rpartition(".")
            twin = _with_child(model.get_submodule(path), name, twin)
            owner._initialize_weights(twin, is_custom_code=owner.is_custom_code())
            if isinstance(twin, PreTrainedModel):
                break
    rows = (weight[:, 0] != 1).nonzero().flatten().tolist()
    return tuple(rows) if not weight[rows].any() else ()


def _with_child(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """A copy of the module that has another child of that name; what else it has is on meta, or counts as loaded."""
    twin = copy.copy(module)
    own = {key: None if x is None or not x.is_meta else x for key, x in module._parameters.items()}
    children = {key: other for key, other in module._modules.items() if other is not None and _is_on_meta(other)}
    twin.__dict__ = {
        **vars(module),
        "_parameters": own,
        "_modules": children | {name: child},
        "_is_hf_initialized": False,
    }
    return twin


def _is_on_meta(module: nn.Module) -> bool:
    return all(parameter.is_meta for parameter in module.parameters())


def _owner(model: nn.Module, path: str) -> PreTrainedModel | None:
    """The innermost Transformers model around `path`, whose rules of initialisation hold there."""
    found = None
    for end in range(path.count(".") + 1):
        around = model.get_submodule(".".join(path.split(".")[:end]))
        found = around if isinstance(around, PreTrainedModel) else found
    return found
