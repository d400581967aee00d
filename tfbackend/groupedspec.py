"""A stack of linears, each for a group of consecutive rows, as frozen data, with its reference; see layerspecs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class GroupedLinearSpec:
    """Rows [n, in_features] and how many of them each group has [groups] -> [n, out_features].

    Attributes:
        groups: matrices in the stack.
        transposed: each matrix is [in, out] and not [out, in].
    """

    groups: int
    in_features: int
    out_features: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the weight."""
        way = -1 if self.transposed else 1
        rows, columns = (self.out_features, self.in_features)[::way]
        return self.groups, rows, columns

    def reference(self) -> nn.Module:
        return _ReferenceGrouped(self)

    def __str__(self) -> str:
        return f"{self.groups} linears {self.in_features}->{self.out_features}, each for a group of rows"


class _ReferenceGrouped(nn.Module):
    """Row by row. `weight` is given by whoever asks for the reference."""

    weight: torch.Tensor

    def __init__(self, spec: GroupedLinearSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        groups = [group for group, size in enumerate(sizes.tolist()) for _ in range(size)]
        matrices = self.weight.transpose(1, 2) if self.spec.transposed else self.weight
        return torch.stack([matrices[group] @ row for row, group in zip(x, groups, strict=True)])
