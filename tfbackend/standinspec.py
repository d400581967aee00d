"""What stands where a module need not run, as frozen data; see layerspecs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class AllKeysSpec:
    """Nothing, in place of a module that would pick all keys of every context there may be."""

    def reference(self) -> nn.Module:
        return AllKeys()

    def __str__(self) -> str:
        return "picks all keys, so nothing is picked"


@dataclass(frozen=True)
class IdleSpec:
    """Nothing, in place of a module from which nothing follows that is asked for."""

    def reference(self) -> nn.Module:
        return Idle()

    def __str__(self) -> str:
        return "not run, nothing follows from it"


class Idle(nn.Module):
    """Hands on the first thing that it is given."""

    def forward(self, *args: object, **keywords: object) -> object:
        """Anything -> its first argument."""
        return next(iter((*args, *keywords.values())), None)


class AllKeys(nn.Module):
    """Takes any tensors and gives an empty one."""

    def forward(self, *args: object, **keywords: object) -> torch.Tensor:
        """Anything -> [0] of int32."""
        first = next(x for x in (*args, *keywords.values()) if isinstance(x, torch.Tensor))
        return torch.empty(0, dtype=torch.int32, device=first.device)
