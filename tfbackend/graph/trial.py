"""Modules on the CPU with random weights and inputs, of the shapes that a meta run saw: what is tried out runs here."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from tfbackend.graph.constants import real_value
from tfbackend.graph.interface import has_experts_interface
from tfbackend.graph.observe import Observation

WIDE = 1 << 20
"""Linears with more weights than this are stood in for by low-rank ones."""
RANK = 8
EXPERT_WIDTH = 32
"""What wide experts are cut down to between their two products."""


def copied(values: Any) -> Any:
    """The values with each tensor cloned: a forward may write into what it is given."""
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, values)


def in_float64(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor; complex ones as two, in a last axis of their own."""
    return (torch.view_as_real(x) if x.is_complex() else x).double()


def apart(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference relative to the largest value wanted; infinite where shapes differ, NaN where there are
    NaNs."""
    if wanted.shape != got.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    a, b = in_float64(wanted), in_float64(got)
    return (a - b).abs().max().item() / (a.abs().max().item() or 1.0)


@contextmanager
def plain_float32() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


class _LowRank(nn.Linear):
    """A linear of the true shape whose weight is the product of two narrow matrices, formed only where it is read."""

    def __init__(self, like: nn.Linear, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.narrow = nn.Parameter(torch.randn(RANK, like.in_features, generator=generator) * like.in_features**-0.5)
        self.wide = nn.Parameter(torch.randn(like.out_features, RANK, generator=generator))
        bias = torch.randn(like.out_features, generator=generator) if like.bias is not None else None
        self.bias = nn.Parameter(bias) if bias is not None else None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.wide @ self.narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.narrow), self.wide, self.bias)


def saved_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """(owner, name, buffer) of the floating-point buffers that a checkpoint has."""
    for child in module.modules():
        for name, buffer in list(child._buffers.items()):
            saved = name not in child._non_persistent_buffers_set
            if buffer is not None and saved and buffer.is_floating_point():
                yield child, name, buffer


def materialise(module: nn.Module, generator: torch.Generator, *, buffers: bool = True) -> nn.Module:
    """A copy of a meta module on the CPU in float32 with random parameters, wide linears stood in for, and with random
    saved buffers if `buffers`."""
    twin = copy.deepcopy(module).float()
    for child in twin.modules():
        if has_experts_interface(child):
            _narrow_experts(child)
        for name, linear in child.named_children():
            if type(linear) is nn.Linear and linear.in_features * linear.out_features > WIDE:
                setattr(child, name, _LowRank(linear, generator))
    for child in twin.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None and parameter.is_meta:
                child._parameters[name] = nn.Parameter(_random_weight(child, parameter, generator), requires_grad=False)
    for owner, name, buffer in saved_buffers(twin) if buffers else ():
        # A checkpoint may fill it with anything, whatever it was initialised to.
        owner._buffers[name] = torch.rand(buffer.shape, generator=generator) + 0.5
    return twin.eval()


def _narrow_experts(module: Any) -> None:
    """Cut wide experts down between their two products, where each element has only its neighbour to do with.

    Two projections of thousands of elements, hundreds of times, would cost gigabytes and prove no more.
    """
    stacked = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
    if sum(parameter.numel() for parameter in stacked.values()) <= WIDE:
        return
    for name, parameter in stacked.items():
        shape = list(parameter.shape)
        into = name.startswith(("gate_up", "up"))
        if name.endswith("_bias") and not into:
            continue
        axis = 1 if into != module.is_transposed or name.endswith("_bias") else 2
        shape[axis] = min(shape[axis], (2 if into and module.has_gate else 1) * EXPERT_WIDTH)
        module._parameters[name] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def _random_weight(owner: nn.Module, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if isinstance(owner, nn.Embedding) or like.numel() > 1 << 24:
        # Overlapping rows of one vector: any row differs from any other, in the memory of two rows.
        width = like.shape[-1]
        rows = like.numel() // width
        base = torch.randn(rows + width, generator=generator)
        return base.as_strided((rows, width), (1, 1)).view(like.shape)
    spread = like.shape[-1] ** -0.5 if like.dim() > 1 else 1.0
    return torch.randn(like.shape, generator=generator) * spread


def random_inputs(
    call: Any,
    module: nn.Module,
    generator: torch.Generator,
    size: float = 1.0,
    observation: Observation | None = None,
    *,
    masked: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call on meta, (args, kwargs), with random numbers in them; masks are None, or if `masked` hide
    nothing."""
    filled: dict[int, Any] = {}

    def fill(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in filled:  # one tensor given twice stays one
            filled[id(x)] = draw(x)
        return filled[id(x)]

    def draw(x: torch.Tensor) -> torch.Tensor | None:
        if x.dtype == torch.bool:
            return torch.ones(x.shape, dtype=torch.bool) if masked else None
        if x.dtype.is_complex:
            real = real_value(observation, x) if observation is not None else None
            return torch.randn(x.shape, generator=generator, dtype=x.dtype) if real is None else real
        if not x.dtype.is_floating_point:
            top = module.num_embeddings if isinstance(module, nn.Embedding) else getattr(module, "num_experts", 7)
            return torch.randint(0, top, x.shape, generator=generator)
        real = real_value(observation, x) if observation is not None else None
        return torch.randn(x.shape, generator=generator) * size if real is None else real

    args, kwargs = tree_map(fill, call)
    return tuple(args), dict(kwargs)
