"""Which tensors of a run depend on tokens that the model counted itself.

An engine's batch is a row of tokens of many requests, each at a position of its own that the engine knows. A model that
numbers its tokens 0, 1, 2 ... or adds up a mask, instead of using the positions it is given, numbers them wrongly
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_COUNTING = frozenset({"arange", "range", "linspace", "cumsum", "cumulative_sum", "cumcount"})


class CountedTokens(TorchFunctionMode):
    """Follows, while entered, everything computed from a count of `tokens` tokens.

    Counting as many things as there are tokens is taken for counting tokens; experts, chunks and elements of a head are
    counted too.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self._counted: dict[int, torch.Tensor] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and note its result where an input was noted or it counts."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if (name in _COUNTING and self.tokens in result.shape) or any(x in self for x in given):
            made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            made += given[:1] if name == "__setitem__" or name.endswith("_") else []
            self._counted |= {id(x): x for x in made}
        return result
