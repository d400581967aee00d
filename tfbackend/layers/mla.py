"""vLLM's attention over a cache of latents, called as any other attention layer is."""

from __future__ import annotations

import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend
from vllm.v1.attention.selector import get_attn_backend

from tfbackend.layers.context import BuildContext
from tfbackend.mlaspec import MLASpec, sizes_named
from tfbackend.serving import MLASizes

HIDDEN_RANK = "tfb_kv_lora_rank"
"""Attribute of a config: its `kv_lora_rank`, where that was hidden from vLLM."""


class LatentAttention(MLAAttention):
    """Takes what is cached where other layers take keys and values. vLLM picks the kernel."""

    def forward(self, query: torch.Tensor, shared: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """[tokens, heads * (nope + rope)], [tokens, rope], [tokens, latent] -> [tokens, heads * value]."""
        tokens = query.shape[0]
        heads = query.view(tokens, self.num_heads, self.qk_head_dim)
        output: torch.Tensor = super().forward(
            heads, latents, shared.unsqueeze(1), output_shape=(tokens, self.num_heads * self.v_head_dim)
        )
        return output


def latent_attention(spec: MLASpec, prefix: str, context: BuildContext) -> LatentAttention:
    """The layer for `spec`. Its linear is known to quantization by the name that the checkpoint has for it."""
    sizes, site = spec.sizes, prefix.rpartition(".")[0]
    expand = ColumnParallelLinear(
        sizes.latent,
        spec.expanded_dim,
        bias=False,
        params_dtype=context.dtype,
        quant_config=context.quant_config,
        prefix=f"{site}.{spec.expand}",
    )
    return LatentAttention(
        num_heads=spec.num_heads // context.tp_size,
        scale=spec.scale,
        qk_nope_head_dim=sizes.nope,
        qk_rope_head_dim=sizes.rope,
        v_head_dim=sizes.value,
        q_lora_rank=None,
        kv_lora_rank=sizes.latent,
        kv_b_proj=expand,
        cache_config=context.cache_config,
        quant_config=context.quant_config,
        prefix=prefix,
    )


def mla_sizes(config: VllmConfig) -> MLASizes | str:
    """The widths for which vLLM has kernels over a cache of latents here, or why it has none.

    vLLM lays out its metadata by the widths that the config names: a model that turns out to have others is told so.
    """
    model, text = config.model_config, config.model_config.hf_text_config
    if not model.use_mla:
        if hasattr(text, HIDDEN_RANK):
            return "vLLM has no cache of latents beside state on a CPU"
        named = getattr(text, "kv_lora_rank", None) is not None
        return "VLLM_MLA_DISABLE is set" if named else "its config has no kv_lora_rank"
    if config.lora_config is not None:
        return "an adapter could not change the linear that becomes part of the attention layer"
    ranks, mode = config.parallel_config.tensor_parallel_size, config.compilation_config.mode
    if config.device_config.device_type == "cpu" and ranks > 1 and mode != CompilationMode.NONE:
        return "compiled on several ranks of a CPU, attention over latents was seen to give no numbers"
    sizes = sizes_named(text)
    return sizes if isinstance(sizes, str) else _kernel_problem(config, sizes) or sizes


def _kernel_problem(config: VllmConfig, sizes: MLASizes) -> str:
    dtype, cache = config.model_config.dtype, config.cache_config.cache_dtype
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    try:
        backend = get_attn_backend(sizes.cached, dtype, cache, use_mla=True, num_heads=heads)
        get_mla_prefill_backend(config)
    except (ValueError, NotImplementedError) as error:
        return f"vLLM has no kernel over latents for it: {' '.join(str(error).split())}"
    fits = MLACommonBackend.supports_head_size(sizes.cached) and backend.supports_head_size(sizes.cached)
    if not fits or not backend.supports_dtype(dtype):
        return f"{backend.get_name()} has no kernel over latents for {sizes} in {str(dtype).removeprefix('torch.')}"
    return ""
