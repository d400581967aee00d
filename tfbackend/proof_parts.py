"""Linears on the rewritten side of a proof, by what their weight entries mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tfbackend.layerspecs import MergedLinearSpec, QKVSpec


def place_of(shard: str | int | None) -> int:
    """Where the layers of vLLM put a shard."""
    return "qkv".index(shard) if isinstance(shard, str) else shard or 0


def part_of(source: nn.Module, transposed: bool) -> nn.Module:
    return Turned(source) if transposed else source


class Turned(nn.Module):
    """A linear whose module keeps its weight [in, out], as its weight entry has it loaded: [out, in]."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, getattr(source, "bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.t(), self.bias)  # type: ignore[operator]


class SideBySide(nn.Module):
    """Merged linears by what they mean: the parts' outputs, one after the other."""

    def __init__(self, parts: Sequence[nn.Module], spec: QKVSpec | MergedLinearSpec) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.width = sum(spec.sizes if isinstance(spec, QKVSpec) else spec.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.cat([part(x) for part in self.parts], dim=-1)
        if out.shape[-1] != self.width:
            raise ValueError(f"the parts are {out.shape[-1]} wide together, the merged layer {self.width}")
        return out
