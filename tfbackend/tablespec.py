"""Tables and frequencies that a model would make anew as contexts grow, made once, as frozen data; see layerspecs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class FixedRopeSpec:
    """A rotary embedding that rescales with the length of each call, fixed at what it is for `max_len` tokens.

    `exact` is False where contexts within `max_len` exist for which the original would have rescaled otherwise.
    """

    max_len: int
    exact: bool

    def __str__(self) -> str:
        note = "" if self.exact else "; Transformers rescales with each request's length, results differ from it"
        return f"rotary frequencies fixed for {self.max_len} tokens{note}"


@dataclass(frozen=True)
class GrownTableSpec:
    """A module that makes its table anew for calls of more tokens than it has rows, called with `tokens` beforehand.

    `args` are the arguments of that call, a shape for each tensor of positions.
    """

    tokens: int
    args: tuple[object, ...]

    def grow(self, module: nn.Module) -> torch.Tensor:
        """Make the call, on the CPU, at the first positions."""
        with torch.no_grad(), torch.device("cpu"):
            given = [torch.arange(math.prod(x)).view(x) % 7 if isinstance(x, tuple) else x for x in self.args]
            made: torch.Tensor = module(*given)
            return made

    def __str__(self) -> str:
        return f"table made for {self.tokens} tokens at once"
