"""Whether a model has types of tokens, such as of the two texts of a pair, and takes none to mean type 0."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tfbackend.graph.interface import RUN_ERRORS, answering, buffers_on_meta, passing_experts, unattended
from tfbackend.graph.masks import masks_that_answer
from tfbackend.graph.numbering import looked_up
from tfbackend.graph.observe import TOKENS, Observation, model_inputs
from tfbackend.graph.rehearsal import Rehearsal

TYPES = "token_type_ids"


def takes_types(base: nn.Module) -> bool:
    """Whether the forward of the model names types of tokens."""
    return TYPES in inspect.signature(inspect.unwrap(type(base).forward)).parameters


def count_types(base: nn.Module, seen: Observation) -> int:
    """How many types of tokens the model can be told, up to 2.

    Where it looks up the same rows of the same tables, in the same order, without types and with types of zero, it may
    always be given types; else there are 0. A model that takes none has all tokens of one type.
    """
    if not takes_types(base):
        return 1
    zeros = torch.zeros((1, TOKENS), dtype=torch.long)
    tables = [n for n, m in base.named_modules() if isinstance(m, nn.Embedding) and n in seen.calls]
    if not tables or _tables(base, {}) != _tables(base, {TYPES: zeros.to("meta")}):
        return 0
    ids = torch.arange(TOKENS)[None]
    plain: dict[str, Any] = model_inputs(base, torch.device("cpu")) | {"input_ids": ids}
    rehearsal = Rehearsal(base, seen)
    try:
        one, two, three = (
            looked_up(rehearsal, tables, plain | given) for given in ({}, {TYPES: zeros}, {TYPES: zeros + 1})
        )
    except RUN_ERRORS:
        return 0
    if not all(bool((one[name] == two[name]).all()) for name in tables):
        return 0
    sizes = {name: table.num_embeddings for name, table in base.named_modules() if isinstance(table, nn.Embedding)}
    return 2 if all(int(three[name].max()) < sizes[name] for name in tables) else 1


def _tables(base: nn.Module, given: dict[str, Any]) -> list[str]:
    """Paths of the tables that a run on meta looks into, in order."""
    names, order = {id(m): name for name, m in base.named_modules() if isinstance(m, nn.Embedding)}, list[str]()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: order.append(names[id(module)]))
        for module in base.modules()
        if id(module) in names
    ]
    try:
        # Where it ends early it does so after its tables, or without them.
        early, meta = suppress(*RUN_ERRORS), buffers_on_meta(base)
        with early, torch.no_grad(), meta, masks_that_answer(), answering(unattended), passing_experts():
            base(**(model_inputs(base, torch.device("meta")) | given))
    finally:
        for hook in hooks:
            hook.remove()
    return order
