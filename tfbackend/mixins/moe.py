"""Experts spread over ranks, and moved between them while the engine runs."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from tfbackend.layers.experts import KernelExperts
from tfbackend.layers.moe import KernelMoE
from tfbackend.mixins.base import Base


class MoEMixin(Base):
    """What vLLM's MixtureOfExperts protocol asks of a model: its experts counted, and their layers in order.

    Attributes:
        moe_layers: vLLM's runners, first layer first; layers whose experts run in plain torch are not among them.
        expert_weights: for each of them the weights of this rank's experts, once load balancing has begun.
        num_moe_layers: how many there are.
        num_logical_experts, num_routed_experts: experts that a router chooses from.
        num_physical_experts, num_local_physical_experts: with redundant copies, over all ranks and on this one.
        num_redundant_experts: copies beyond the first.
        num_expert_groups, num_shared_experts: 1 and 0: no use is made of them where experts move.
    """

    expert_weights: MutableSequence[Sequence[torch.Tensor]]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.count_experts(self.model)

    def count_experts(self, model: nn.Module) -> None:
        """Find the runners of `model` and fill in the attributes."""
        self.expert_weights = []
        layers = (m for m in model.modules() if isinstance(m, (KernelExperts, KernelMoE)))
        self.moe_layers: list[Any] = [layer.runner for layer in layers]
        self.num_moe_layers = len(self.moe_layers)
        self.num_expert_groups, self.num_shared_experts = 1, 0
        config = self.moe_layers[0].moe_config if self.moe_layers else None
        self.num_logical_experts: int = config.num_logical_experts if config else 0
        self.num_routed_experts = self.num_logical_experts
        self.num_physical_experts: int = config.num_experts if config else 0
        self.num_local_physical_experts: int = config.num_local_experts if config else 0
        self.num_redundant_experts = self.num_physical_experts - self.num_logical_experts

    def set_eplb_state(
        self,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Hand each layer its place in the tables of load balancing, [layers, experts ...]."""
        self.expert_weights = [list(layer.get_expert_weights()) for layer in self.moe_layers]
        for number, layer in enumerate(self.moe_layers):
            layer.set_eplb_state(
                moe_layer_idx=number,
                expert_load_view=expert_load_view,
                logical_to_physical_map=logical_to_physical_map,
                logical_replica_count=logical_replica_count,
            )

    def update_physical_experts_metadata(self, num_physical_experts: int, num_local_physical_experts: int) -> None:
        """Follow a change of the number of copies over all ranks; the number on a rank does not change.

        Raises:
            ValueError: it would.
        """
        if num_local_physical_experts != self.num_local_physical_experts:
            raise ValueError(
                f"{num_local_physical_experts} experts a rank, and memory for {self.num_local_physical_experts}"
            )
        self.num_physical_experts = num_physical_experts
        self.num_redundant_experts = num_physical_experts - self.num_logical_experts
        for layer in self.moe_layers:
            layer.update_expert_map()
