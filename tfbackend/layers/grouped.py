"""A stack of linears, each for a group of consecutive rows, whole on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.layers.context import BuildContext


class GroupedLinear(nn.Module):
    """[rows, in_features] and the number of rows of each group [groups] -> [rows, out_features]."""

    def __init__(self, spec: GroupedLinearSpec, context: BuildContext) -> None:
        super().__init__()
        self.transposed = spec.transposed
        data = torch.empty(spec.shape, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(data, requires_grad=False)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """The rows of each group times its matrix; groups follow one another."""
        output: torch.Tensor = grouped_linear(x, self.weight, sizes, self.transposed)
        return output


@torch.library.custom_op("tfbackend::grouped_linear", mutates_args=())
def grouped_linear(x: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor, transposed: bool) -> torch.Tensor:
    """See GroupedLinear. On devices where reading the sizes would wait, nothing is read."""
    if x.device.type == "cpu":
        matrices = weight.transpose(1, 2) if transposed else weight
        groups = zip(torch.split(x, sizes.tolist()), matrices, strict=True)
        return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])
    return _by_mask(x, weight, sizes.cumsum(0), transposed)


def _by_mask(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Every matrix is multiplied with every row, and of each row the product with its own kept."""
    numbers = torch.arange(x.shape[0], device=x.device)
    group = torch.bucketize(numbers, ends, right=True)[:, None]
    total = x.new_zeros(x.shape[0], weight.shape[2] if transposed else weight.shape[1])
    for number, matrix in enumerate(weight):
        total = torch.where(group == number, F.linear(x, matrix.T if transposed else matrix), total)
    return total


@grouped_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2] if transposed else weight.shape[1])
