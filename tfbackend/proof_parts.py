"""Layers of the rewritten side of a proof, by what their weight entries mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tfbackend.expertspec import ExpertsSpec
from tfbackend.fusers.base import WeightEntry
from tfbackend.layerspecs import AttentionSpec, MergedLinearSpec, QKVSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.moespec import MoESpec


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


def expanded(spec: MLASpec) -> AttentionSpec:
    """The attention over whole keys and values that latent attention equals."""
    sizes = spec.sizes
    return AttentionSpec(spec.num_heads, spec.num_heads, sizes.nope + sizes.rope, sizes.value, spec.scale)


def reference_experts(spec: ExpertsSpec, original: nn.Module) -> nn.Module:
    """The reference of `spec` on the weights of the experts that it replaces."""
    made: Any = spec.reference()
    first = "gate_up_proj" if spec.gated else "up_proj"
    made.into, made.out = original.get_parameter(first), original.get_parameter("down_proj")
    if spec.bias:
        made.into_bias = original.get_parameter(f"{first}_bias")
        made.out_bias = original.get_parameter("down_proj_bias")
    module: nn.Module = made
    return module


class ReferenceMoE(nn.Module):
    """A whole block by what its spec says, on the tensors that its weight entries name."""

    def __init__(self, spec: MoESpec, name: str, entries: Sequence[WeightEntry], original: nn.Module) -> None:
        super().__init__()
        self.spec, self.tensors = spec, dict[str, torch.Tensor]()
        everything = dict(original.named_parameters()) | dict(original.named_buffers())
        for entry in entries:
            if ".routed_experts." in entry.target:
                experts = entry.source.rpartition(".")[0]
            else:
                role = entry.target.removeprefix(f"{name}.").removeprefix("runner.gate.")
                self.tensors[role] = everything[entry.source].flatten(0, -2 if role == "weight" else -1)
        self.experts = reference_experts(spec.experts, original.get_submodule(experts))
        self.beside = [original.get_submodule(child) for child in (spec.shared, spec.shared_gate) if child]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits = F.linear(flat, self.tensors["weight"], self.tensors.get("bias"))
        weights, ids = self.spec.router.route(logits, self.spec.experts.top_k, self.tensors.get("correction"))
        total: torch.Tensor = self.experts(flat, ids, weights)
        if self.beside:
            shared, *gate = self.beside
            added = shared(flat)
            total = total + (gate[0](flat).sigmoid() * added if gate else added)
        return total.view(x.shape)
