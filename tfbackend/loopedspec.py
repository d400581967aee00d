"""Experts that a model goes through by itself, as frozen data, with its reference; see layerspecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tfbackend.expertspec import ExpertsSpec


@dataclass(frozen=True)
class ExpertsPart:
    """A parameter of all experts.

    Attributes:
        source: its name in the module.
        target: "w13_weight" or "w2_weight".
        shard: 0 where it is the gate alone, 1 where it is what the gate multiplies, None for a whole.
        transposed: each expert's matrix is [in, out] and not [out, in].
    """

    source: str
    target: str
    shard: int | None
    transposed: bool = False

    def as_served(self, tensor: torch.Tensor, experts: int) -> torch.Tensor:
        """The tensor of a checkpoint, [experts, rows, columns] or [experts * rows, columns] -> [experts, out, in].

        Experts beyond `experts` are left out.
        """
        stacked = tensor if tensor.dim() == 3 else tensor.view(experts, -1, tensor.shape[-1])
        stacked = stacked[:experts]
        return stacked.transpose(1, 2) if self.transposed else stacked


@dataclass(frozen=True)
class LoopedExpertsSpec:
    """A module called with tokens [..., hidden] and the ids and weights [tokens, top_k] of their experts.

    Attributes:
        experts: what it computes; w13 has all gates before what they multiply.
        places: where the call has tokens, ids and weights: the number of an argument, or its keyword.
        parts: its parameters.
        identity: how many ids, those that follow the experts', stand for an expert that gives what it is given.
    """

    experts: ExpertsSpec
    places: tuple[int | str, int | str, int | str]
    parts: tuple[ExpertsPart, ...]
    identity: int = 0

    def given(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, ids and weights of a call."""
        hidden, ids, weights = (args[at] if isinstance(at, int) else kwargs[at] for at in self.places)
        return hidden, ids, weights

    def compute(self, routed: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The module's output where `routed` answers for the experts with weights."""
        hidden, ids, weights = self.given(args, kwargs)
        x, count = hidden.reshape(-1, hidden.shape[-1]), self.experts.num_experts
        if not self.identity:
            output: torch.Tensor = routed(x, ids, weights)
            return output.view(hidden.shape)
        own = ids < count
        handed_on = weights.masked_fill(own, 0).sum(-1, keepdim=True).to(x.dtype)
        output = routed(x, ids.masked_fill(~own, 0), weights.masked_fill(~own, 0))
        return (output + x * handed_on).view(hidden.shape)

    def without_kernel(self) -> LoopedExpertsSpec:
        return replace(self, experts=self.experts.without_kernel())

    def reference(self) -> nn.Module:
        return _ReferenceLooped(self)

    def __str__(self) -> str:
        beside = f", {self.identity} that give what they are given" if self.identity else ""
        return f"{self.experts}{beside}, instead of a loop over them"


@dataclass(frozen=True)
class DenseExpertsSpec:
    """Experts of which a model runs all on every token, what a router did not choose being weighed with 0.

    Called with tokens [tokens, hidden] and their weights [tokens, experts].

    Attributes:
        experts: what one token and one expert give; as many for a token as the layer under it is asked for.
        top_k: how many weights of a token are not 0.
        before: the weight multiplies what an expert is given, instead of what it gives.
        parts: the parameters.
    """

    experts: ExpertsSpec
    top_k: int
    before: bool
    parts: tuple[ExpertsPart, ...]

    def compute(self, routed: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden] where `routed` answers for the experts."""
        ids = weights.abs().topk(self.top_k, dim=-1).indices
        chosen = weights.gather(1, ids).to(x.dtype)
        output: torch.Tensor
        if not self.before:
            output = routed(x, ids, chosen)
            return output
        rows = (x[:, None] * chosen[..., None]).flatten(0, 1)
        output = routed(rows, ids.view(-1, 1), torch.ones_like(chosen).view(-1, 1))
        return output.view(-1, self.top_k, x.shape[-1]).sum(1)

    def without_kernel(self) -> DenseExpertsSpec:
        return replace(self, experts=self.experts.without_kernel())

    def __str__(self) -> str:
        where = "given" if self.before else "giving"
        chosen = replace(self.experts, top_k=self.top_k)
        return f"{chosen}, {where} what is weighed, instead of all on every token"


class _ReferenceLooped(nn.Module):
    """Called as the original is; `load` gives it the original's parameters."""

    def __init__(self, spec: LoopedExpertsSpec) -> None:
        super().__init__()
        self.spec, self.routed = spec, spec.experts.reference()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the parameters by their names in the module."""
        served: dict[str, list[torch.Tensor]] = {"w13_weight": [], "w2_weight": []}
        for part in sorted(self.spec.parts, key=lambda part: part.shard or 0):
            served[part.target].append(part.as_served(tensors[part.source], self.spec.experts.num_experts))
        routed: Any = self.routed
        routed.into, routed.out = (torch.cat(parts, dim=1) for parts in served.values())

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.spec.compute(self.routed, args, kwargs)
