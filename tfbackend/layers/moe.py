"""A whole mixture-of-experts block in vLLM's runner: its gate, its router, its experts and a shared expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.models.utils import sequence_parallel_chunk

from tfbackend.layers.context import BuildContext
from tfbackend.layers.experts import on_this_rank, runner
from tfbackend.moespec import MoESpec, RouterSpec


class KernelMoE(nn.Module):
    """[..., hidden] -> [..., hidden]. On CPU, where vLLM's router knows few rules, the rule runs as its spec has it.

    Attributes:
        correction: float32 [experts], where the router has one.
        runner: vLLM's, which holds the gate and the experts of this rank.
    """

    def __init__(self, spec: MoESpec, prefix: str, context: BuildContext, site: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.correction: nn.Parameter | None = None
        if spec.router.correction:
            empty = torch.empty(spec.experts.num_experts, dtype=torch.float32, device=context.device)
            self.correction = nn.Parameter(empty, requires_grad=False)
            self.correction.weight_loader = _load_vector  # type: ignore[attr-defined]
        wide = {"router_logits_dtype": torch.float32} if spec.router.wide else {}
        routing = (
            {"custom_routing_function": self.route} if context.device.type == "cpu" else _rule(spec, self.correction)
        )
        gate = GateLinear(
            spec.experts.hidden,
            spec.experts.num_experts,
            bias=spec.router.bias,
            out_dtype=torch.float32 if spec.router.wide else None,
            prefix=f"{prefix}.runner.gate",
        )
        self.chunked = context.sequence_parallel_moe
        self.runner = runner(
            spec.experts,
            prefix,
            context,
            gate=gate,
            shared_experts=_Shared(spec, context.tp_size, site) if spec.shared else None,
            is_sequence_parallel=self.chunked,
            **routing,
            **wide,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        flat = x.reshape(-1, x.shape[-1])
        if self.chunked:
            flat = sequence_parallel_chunk(flat)
        # The second argument stands where the logits would be: the runner has the gate.
        output: torch.Tensor = self.runner(flat, flat)
        if self.chunked:
            output = tensor_model_parallel_all_gather(output, 0)[: x.shape[:-1].numel()]
        return output.view(x.shape)

    def route(
        self, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids [tokens, topk], ids among the experts of this rank."""
        return on_this_rank(self.runner, *self.spec.router.route(gating_output, topk, self.correction))


def _rule(spec: MoESpec, correction: torch.Tensor | None) -> dict[str, Any]:
    """The rule in the words of vLLM's routers. Grouped routing over one group is what scales weights without a
    correction."""
    router: RouterSpec = spec.router
    grouped = router.groups > 1 or (router.scale != 1.0 and correction is None)
    groups = {"num_expert_group": router.groups, "topk_group": router.groups_used} if grouped else {}
    return {
        "scoring_func": router.scoring,
        "renormalize": router.renormalize,
        "routed_scaling_factor": router.scale,
        "e_score_correction_bias": correction,
        "use_grouped_topk": grouped,
        **groups,
    }


def _load_vector(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor.flatten())


class _Shared(nn.Module):
    """The shared expert of a block, which stays a child of the block and is rewritten there.

    The runner adds up what the ranks give; an expert that has added up already gives each rank its part of the whole.
    """

    def __init__(self, spec: MoESpec, tp_size: int, site: nn.Module) -> None:
        super().__init__()
        self.spec, self.tp_size = spec, tp_size
        self.site = (site,)  # in a tuple, so that the parameters of the site are not found here again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        site, spec = self.site[0], self.spec
        output: torch.Tensor = getattr(site, spec.shared)(x)
        if spec.shared_gate:
            output = getattr(site, spec.shared_gate)(x).sigmoid() * output
        return output if self.tp_size == 1 or self._is_partial() else output / self.tp_size

    def _is_partial(self) -> bool:
        last = self.site[0].get_submodule(self.spec.shared_out) if self.spec.shared_out else None
        return getattr(last, "reduce_results", True) is False
