"""Routed experts: vLLM's runner where it has a kernel, plain torch where it has none. The router is the model's own.

vLLM's runner is made for router logits. Here it is given what the router decided, ids beside weights in one float32
tensor [tokens, 2 * top_k], and a routing function that takes them apart again: nothing is kept between calls, so the
layer traces, compiles and runs in a graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from tfbackend.expertspec import ExpertsSpec
from tfbackend.layers.context import BuildContext


def experts(spec: ExpertsSpec, prefix: str, context: BuildContext) -> nn.Module:
    """[tokens, hidden], ids and weights [tokens, top_k] -> [tokens, hidden]."""
    made: nn.Module = KernelExperts(spec, prefix, context) if spec.kernel else PlainExperts(spec, context)
    return made


class KernelExperts(nn.Module):
    """vLLM's experts, sharded over tensor-parallel or expert-parallel ranks as the engine says."""

    def __init__(self, spec: ExpertsSpec, prefix: str, context: BuildContext) -> None:
        super().__init__()
        self.runner = runner(spec, prefix, context, renormalize=False, custom_routing_function=unpack_routing)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `experts`."""
        if x.device.type == "cpu":
            weights, ids = on_this_rank(self.runner, weights, ids)
        output: torch.Tensor = self.runner(x, torch.cat((weights.float(), ids.float()), dim=-1))
        return output


def on_this_rank(runner: MoERunner, weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids [tokens, top_k] of all experts -> with ids among those of this rank, others weighing nothing.

    vLLM's CPU kernel takes the ids of all experts for places among those of its rank, and reads past them.
    """
    if (local := runner.expert_map) is None:
        return weights, ids
    ids = local.to(ids.device)[ids.long()]
    return weights * (ids >= 0), ids.clamp(min=0)


def runner(spec: ExpertsSpec, prefix: str, context: BuildContext, **routing: Any) -> MoERunner:
    """vLLM's runner of these experts, whose parameters load what the checkpoint has. `routing` is for its router."""
    made = FusedMoEFactory(
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        params_dtype=context.dtype,
        quant_config=context.quant_config,
        activation=spec.activation,
        has_bias=spec.bias,
        enable_eplb=context.eplb,
        num_redundant_experts=context.redundant_experts,
        prefix=f"{prefix}.runner",
        **routing,
    )
    routed: Any = made.routed_experts
    for name in LOADED:
        if (parameter := routed._parameters.get(name)) is not None:
            parameter.weight_loader = partial(_load, spec, routed, name)
    return made


LOADED = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")


def unpack_routing(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids [tokens, topk] of what `KernelExperts` packed. Expert numbers are exact in float32."""
    return gating_output[:, :topk].contiguous(), gating_output[:, topk : 2 * topk].to(torch.int32)


def _load(spec: ExpertsSpec, routed: RoutedExperts, name: str, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Copy this rank's part of the tensor of all experts."""
    config: Any = routed.moe_config
    tp_size, tp_rank = config.moe_parallel_config.tp_size, config.tp_rank
    into, bias = name.startswith("w13"), name.endswith("bias")
    if spec.transposed and not bias:
        tensor = tensor.transpose(1, 2)
    width = spec.intermediate // tp_size
    # As load balancing numbers them at first: one of each, then the copies in turn.
    for physical in range(config.num_experts):
        local = routed._map_global_expert_id_to_local_expert_id(physical)
        if local == -1:
            continue
        live, whole = parameter.data[local], tensor[physical % spec.num_experts]
        if not into:
            part = whole if bias else whole[:, tp_rank * width : (tp_rank + 1) * width]
            # A bias of the second product is added once, whatever the number of ranks.
            _copy(live, part if not bias or tp_rank == 0 else torch.zeros_like(part))
        elif spec.activation == "swigluoai":
            _copy(live, _alternating(spec, whole)[2 * tp_rank * width : 2 * (tp_rank + 1) * width])
        else:
            gate, up = (half[tp_rank * width : (tp_rank + 1) * width] for half in _halves(spec, whole))
            middle = live.shape[0] // 2
            _copy(live[:middle], gate)
            _copy(live[middle:], up)


def _halves(spec: ExpertsSpec, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.interleaved:
        return rows[0::2], rows[1::2]
    gate, up = rows.chunk(2)
    return gate, up


def _alternating(spec: ExpertsSpec, rows: torch.Tensor) -> torch.Tensor:
    """Rows as vLLM's kernel of this activation wants them: gate0, up0, gate1, up1 ..."""
    return rows if spec.interleaved else torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def _copy(live: torch.Tensor, part: torch.Tensor) -> None:
    """Copy into the corner of a live tensor that may be padded."""
    live[tuple(slice(size) for size in part.shape)].copy_(part)


class PlainExperts(nn.Module):
    """Whole experts on every rank, in torch. Parameters are as the checkpoint has them."""

    def __init__(self, spec: ExpertsSpec, context: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        self.runner = nn.Module()
        self.runner.routed_experts = nn.Module()
        for name, shape in spec.shapes.items():
            data = torch.empty(shape, dtype=context.dtype, device=context.device)
            self.runner.routed_experts.register_parameter(name, nn.Parameter(data, requires_grad=False))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `experts`."""
        own: Any = self.runner.routed_experts
        spec = self.spec
        tensors = [own.w13_weight, own.w2_weight, *((own.w13_bias, own.w2_bias) if spec.bias else (None, None))]
        numbers = [spec.alpha, spec.limit]
        switches = [spec.gated, spec.transposed, spec.interleaved]
        output: torch.Tensor = plain_experts(x, ids, weights, *tensors, spec.activation, *numbers, *switches)
        return output


@torch.library.custom_op("tfbackend::plain_experts", mutates_args=())
def plain_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    into: torch.Tensor,
    out: torch.Tensor,
    into_bias: torch.Tensor | None,
    out_bias: torch.Tensor | None,
    activation: str,
    alpha: float | None,
    limit: float | None,
    gated: bool,
    transposed: bool,
    interleaved: bool,
) -> torch.Tensor:
    """Sum over each token's experts; [tokens, hidden] -> [tokens, hidden].

    Every expert looks at every token on devices where asking which are its own would wait for the device.
    """
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(into.shape[0]):
        share = (weights * (ids == expert)).sum(-1, keepdim=True)
        rows = share[:, 0].nonzero()[:, 0] if x.device.type == "cpu" else None
        if rows is not None and not len(rows):
            continue
        given, share = (x, share) if rows is None else (x[rows], share[rows])
        first, second = (into[expert].T, out[expert].T) if transposed else (into[expert], out[expert])
        inner = F.linear(given, first, None if into_bias is None else into_bias[expert])
        inner = ExpertsSpec.act(activation, interleaved, alpha, limit, inner, gated=gated)
        result = F.linear(inner, second, None if out_bias is None else out_bias[expert]).float() * share
        if rows is None:
            total += result
        else:
            total.index_add_(0, rows, result)
    return total.to(x.dtype)


@plain_experts.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)
