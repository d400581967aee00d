"""Whether a model, left to itself, numbers its tokens by looking at which tokens they are.

Some leave out padding: their first position is not 0, and a padding token in the middle of a prompt shifts those after
it. An engine knows positions, and not which of the tokens before were padding.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tfbackend.graph.interface import RUN_ERRORS, answering, buffers_on_meta, passing_experts, unattended
from tfbackend.graph.masks import masks_that_answer
from tfbackend.graph.observe import model_inputs

_LOOK_UPS = frozenset({"embedding", "index_select"})
_COUNTS = frozenset({"cumsum", "cumulative_sum"})


def numbers_by_tokens(base: nn.Module, vocabulary: str) -> str:
    """Paths of the tables in which the model looks up a count of token ids that it made itself.

    The base model runs on meta once more, without positions; "" where it has no such table, or does not run so.
    """
    tables = {id(m.weight): name for name, m in base.named_modules() if isinstance(m, nn.Embedding)}
    tables = {key: name for key, name in tables.items() if name != vocabulary}
    if not tables:
        return ""
    inputs = model_inputs(base, torch.device("meta"))
    if inputs.pop("position_ids", None) is None:
        return ""
    derived = _Derived(inputs["input_ids"], tables)
    # Where it ends early it wants positions, or has shown its tables by then.
    early = suppress(*RUN_ERRORS)
    meta = buffers_on_meta(base)
    with early, torch.no_grad(), meta, masks_that_answer(), answering(unattended), passing_experts(), derived:
        base(**inputs)
    return ", ".join(dict.fromkeys(derived.found))


class _Derived(TorchFunctionMode):
    """Follows whole numbers made of the token ids, and of a count of them, until they are looked up in `tables`."""

    def __init__(self, ids: torch.Tensor, tables: dict[int, str]) -> None:
        super().__init__()
        self.tables, self.found = tables, list[str]()
        self._kept: dict[int, torch.Tensor] = {id(ids): ids}
        self._counts: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(id(x) in self._kept for x in given):
            return result
        name = getattr(func, "__name__", "")
        counted = name in _COUNTS or any(id(x) in self._counts for x in given)
        if name in _LOOK_UPS:
            self.found += [self.tables[id(x)] for x in given if counted and id(x) in self.tables]
            return result
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and not made.dtype.is_floating_point:
                self._kept[id(made)] = made
                self._counts |= {id(made)} if counted else set()
        return result
