"""Routed experts in place of a module that goes through them in a loop of its own, or runs all on every token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tfbackend.layers.context import BuildContext
from tfbackend.layers.experts import experts
from tfbackend.loopedspec import DenseExpertsSpec, ExpertsPart, LoopedExpertsSpec


class _OwnExperts(nn.Module):
    """Experts whose parameters come as some Transformers class has them."""

    def __init__(self, spec: LoopedExpertsSpec | DenseExpertsSpec, prefix: str, context: BuildContext) -> None:
        super().__init__()
        self.routed = experts(spec.experts, f"{prefix}.routed", context)
        runner: Any = self.routed.runner
        for target in {part.target for part in spec.parts}:
            parts = {part.shard: part for part in spec.parts if part.target == target}
            parameter = runner.routed_experts.get_parameter(target)
            whole = getattr(parameter, "weight_loader", _copy)
            parameter.weight_loader = partial(_load, parts, spec.experts.num_experts, whole, {})
            parameter.shards = tuple(sorted(parts)) if len(parts) > 1 else ()


class LoopedExperts(_OwnExperts):
    """Called as the module was that it replaces; see LoopedExpertsSpec."""

    def __init__(self, spec: LoopedExpertsSpec, prefix: str, context: BuildContext) -> None:
        super().__init__(spec, prefix, context)
        self.spec = spec

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., hidden], ids and weights [tokens, top_k] -> [..., hidden]."""
        return self.spec.compute(self.routed, args, kwargs)


class DenseExperts(_OwnExperts):
    """See DenseExpertsSpec."""

    def __init__(self, spec: DenseExpertsSpec, prefix: str, context: BuildContext) -> None:
        super().__init__(spec, prefix, context)
        self.spec = spec

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] and [tokens, experts] -> [tokens, hidden]."""
        return self.spec.compute(self.routed, x, weights)


def _load(
    parts: dict[int | None, ExpertsPart],
    experts: int,
    whole: Callable[[nn.Parameter, torch.Tensor], None],
    waiting: dict[int | None, torch.Tensor],
    parameter: nn.Parameter,
    tensor: torch.Tensor,
    shard: int | None = None,
) -> None:
    """Bring a tensor into the served order, and hand all of a parameter on once it is there."""
    waiting[shard] = parts[shard].as_served(tensor, experts)
    if len(waiting) == len(parts):
        tensors = [waiting.pop(key) for key in sorted(parts, key=lambda key: key or 0)]
        whole(parameter, tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1))


def _copy(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)
