"""vLLM's own layers for mixers that keep state, called as the mixers are: [1, tokens, width] in and out."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

from tfbackend.deltaspec import INTERLEAVED, PACKED, DeltaSpec
from tfbackend.layers.context import BuildContext
from tfbackend.serving import NATIVES
from tfbackend.shortconvspec import ShortConvSpec
from tfbackend.ssdspec import NO_LIMIT, SSDSpec


def native_kinds(config: VllmConfig) -> frozenset[str] | str:
    """Kinds of mixers with state that vLLM has layers for here, or why it has none."""
    if config.lora_config is not None:
        return "an adapter names the linears of the mixer"
    if config.cache_config.use_replayssm:
        return "--use-replayssm has not been tried with them"
    return (
        NATIVES
        if config.device_config.device_type in ("cpu", "cuda")
        else f"not tried on {current_platform.device_name}"
    )


def site_of(prefix: str) -> str:
    """The mixer that a layer at `prefix` is in: linears are known to quantization by the names in the checkpoint."""
    return prefix.rpartition(".")[0]


def loaded_whole(*modules: nn.Module) -> None:
    """Tell loading that the shards of these merged linears are one tensor in the checkpoint."""
    for module in modules:
        for parameter in module.parameters():
            parameter.shards = ()  # type: ignore[attr-defined]


class _Stateful(MambaBase):
    """What the layers here share."""

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """[pages, ...] of each state."""
        pages: tuple[torch.Tensor, ...] = self.kv_cache
        return pages

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """On a CPU vLLM's scan of a prompt gives the last state alone, none from the middle to be cached."""
        if current_platform.is_cpu():
            return MambaBase.get_kv_cache_spec(self, vllm_config)
        return super().get_kv_cache_spec(vllm_config)


class ShortConvLayer(_Stateful, ShortConv):
    """A gated short convolution."""

    def __init__(self, spec: ShortConvSpec, prefix: str, context: BuildContext) -> None:
        config = get_current_vllm_config()
        super().__init__(
            config=SimpleNamespace(conv_L_cache=spec.kernel, conv_bias=spec.bias),
            dim=spec.dim,
            layer_idx=extract_layer_index(prefix),
            model_config=config.model_config,
            cache_config=config.cache_config,
            quant_config=context.quant_config,
            prefix=site_of(prefix),
        )
        self.spec = spec
        loaded_whole(self.in_proj)

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """[1, tokens, dim] -> the same."""
        flat = hidden_states.squeeze(0)
        output = torch.empty_like(flat)
        super().forward(flat, output)
        return output.unsqueeze(0)


class SSDLayer(_Stateful, MambaMixer2):
    """Mamba-2, and what mixers of Transformers do beside: factors, a norm over other parts, a limited time step."""

    def __init__(self, spec: SSDSpec, prefix: str, context: BuildContext) -> None:
        config = get_current_vllm_config()
        super().__init__(
            hidden_size=spec.hidden_size,
            ssm_state_size=spec.state_size,
            conv_kernel_size=spec.kernel,
            intermediate_size=spec.inner,
            use_conv_bias=spec.conv_bias,
            use_bias=spec.in_bias,
            n_groups=spec.groups,
            num_heads=spec.heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.eps,
            use_rms_norm=spec.norm_groups > 0,
            model_config=config.model_config,
            cache_config=config.cache_config,
            quant_config=context.quant_config,
            prefix=site_of(prefix),
        )
        self.spec = spec
        loaded_whole(self.in_proj, self.conv1d)
        if spec.in_bias and spec.groups % self.tp_size:
            # vLLM shares out one group's weight as its heads need it, and forgets the bias.
            self.in_proj.bias.weight_loader = self.in_proj.weight.weight_loader
        if spec.norm_groups not in (0, spec.groups):
            self.norm = Mixer2RMSNormGated(spec.inner, spec.norm_groups, eps=spec.eps)
        if spec.out_bias != spec.in_bias:
            self.out_proj = RowParallelLinear(
                spec.inner,
                spec.hidden_size,
                bias=spec.out_bias,
                quant_config=context.quant_config,
                prefix=f"{site_of(prefix)}.out_proj",
            )
        self.register_buffer("scales", self._scales(context), persistent=False)

    def _scales(self, context: BuildContext) -> torch.Tensor | None:
        """The factor of each channel of the first projection on this rank, None for none."""
        spec = self.spec
        if set(spec.scales) == {1.0}:
            return None
        shared = self.groups_ssm_state_size // self.tp_size
        own = (self.tped_intermediate_size, self.tped_intermediate_size, shared, shared, self.tped_dt_size)
        parts = [torch.full((width,), scale) for width, scale in zip(own, spec.scales, strict=True)]
        return torch.cat(parts).to(context.device, context.dtype)

    def forward(self, hidden_states: torch.Tensor, mup_vector: torch.Tensor | None = None) -> torch.Tensor:
        """[1, tokens, hidden_size] -> the same."""
        flat = hidden_states.squeeze(0)
        flat = flat if self.spec.in_scale == 1.0 else flat * self.spec.in_scale
        output: torch.Tensor = super().forward(flat, self.scales)
        return output.unsqueeze(0)

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> Any:
        if self.spec.dt_limit != NO_LIMIT:
            projected_states = self._limited(projected_states)
        return super().conv_ssm_forward(projected_states, output)

    def _limited(self, projected: torch.Tensor) -> torch.Tensor:
        """With time steps that are within their limits once the kernels have added the bias and taken the softplus."""
        begin = 0 if self.spec.limited_steps else _decoded_tokens(self.prefix)
        if begin == len(projected):
            return projected
        projected = projected.clone()
        steps = projected[begin:, -self.tped_dt_size :]
        steps.copy_(limited(steps.float(), self.dt_bias.float(), self.spec.dt_limit))
        return projected

    def _warmup_ssd_kernels(self, projected_states: torch.Tensor) -> None:
        if not current_platform.is_cpu():  # kernels that are compiled where they first run
            super()._warmup_ssd_kernels(projected_states)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """What the recurrence carries is kept as Transformers keeps it, unless the user says otherwise."""
        conv, *others = super().get_state_dtype()
        assert self.cache_config is not None
        if self.cache_config.mamba_ssm_cache_dtype == "auto":
            others[0] = self.spec.recurrent
        return (conv, *others)


class DeltaLayer(_Stateful, QwenGatedDeltaNetAttention):
    """A gated delta rule, with the projections that the checkpoint has."""

    def __init__(self, spec: DeltaSpec, prefix: str, context: BuildContext) -> None:
        self.spec = spec  # vLLM asks for the dtypes of the state while it builds the layer
        super().__init__(
            _config_of(spec),
            get_current_vllm_config(),
            prefix=site_of(prefix),
            gqa_interleaved_layout=spec.layout == INTERLEAVED,
        )
        if spec.layout == INTERLEAVED:
            loaded_whole(self.in_proj_qkvz, self.in_proj_ba)
        elif spec.layout == PACKED:
            weight: Any = self.in_proj_qkvz.weight
            weight.shards, weight.weight_loader = (0, 1), _Packed(spec, weight.weight_loader)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, tokens, hidden_size] -> the same."""
        output: torch.Tensor = super().forward(hidden_states.squeeze(0))
        return output.unsqueeze(0)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """What the recurrence carries is kept as Transformers keeps it, unless the user says otherwise."""
        conv, recurrent = super().get_state_dtype()
        return conv, self.spec.recurrent if self.cache_config.mamba_ssm_cache_dtype == "auto" else recurrent


def _config_of(spec: DeltaSpec) -> Any:
    """What vLLM's layer reads of a config."""
    return SimpleNamespace(
        hidden_size=spec.hidden_size,
        hidden_act="silu",
        rms_norm_eps=spec.eps,
        linear_num_key_heads=spec.key_heads,
        linear_num_value_heads=spec.heads,
        linear_key_head_dim=spec.key_dim,
        linear_value_head_dim=spec.value_dim,
        linear_conv_kernel_dim=spec.kernel,
        output_gate_type=spec.gate,
    )


class _Packed:
    """Loads q k v, the first shard, as the three that they are to vLLM, and z, the second, as its fourth."""

    def __init__(self, spec: DeltaSpec, load: Callable[..., None]) -> None:
        self.widths, self.load = [*spec.widths[:3]], load

    def __call__(self, parameter: torch.Tensor, loaded: torch.Tensor, shard: int) -> None:
        parts = [*torch.split(loaded, self.widths)] if shard == 0 else [loaded]
        for number, part in enumerate(parts, start=3 * shard):
            self.load(parameter, part, number)


def _decoded_tokens(prefix: str) -> int:
    """Tokens of this step that are decoded; they come first."""
    known = get_forward_context().attn_metadata
    metadata = known.get(prefix) if isinstance(known, dict) else None
    if metadata is None:
        return 0
    assert isinstance(metadata, Mamba2AttentionMetadata), type(metadata)
    return int(metadata.num_decode_tokens)


def limited(steps: torch.Tensor, bias: torch.Tensor, limit: tuple[float, float]) -> torch.Tensor:
    """[tokens, heads] -> the same, so that the softplus of its sum with the bias [heads] is within the limit."""
    low, high = map(_inverse_softplus, limit)
    return torch.clamp(steps, low - bias, high - bias)


def _inverse_softplus(x: float) -> float:
    if x <= 0.0:
        return -math.inf
    return x + math.log(-math.expm1(-x)) if x < math.inf else math.inf
