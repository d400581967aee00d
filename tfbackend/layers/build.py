"""The table of builders: what is made of each LayerSpec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, EncoderOnlyAttention
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from tfbackend.deltaspec import DeltaSpec
from tfbackend.expertspec import ExpertsSpec
from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.layers.attention import BiasedAttention, GatheredHeads, PaddedAttention, gathered
from tfbackend.layers.context import BuildContext
from tfbackend.layers.distances import DistanceBiasedAttention
from tfbackend.layers.embedding import ScaledVocabParallelEmbedding
from tfbackend.layers.experts import experts
from tfbackend.layers.grouped import GroupedLinear
from tfbackend.layers.looped import DenseExperts, LoopedExperts
from tfbackend.layers.mla import latent_attention
from tfbackend.layers.moe import KernelMoE
from tfbackend.layers.native import DeltaLayer, ShortConvLayer, SSDLayer
from tfbackend.layers.norm import RMSNorm, ZeroCentredLayerNorm, ZeroCentredRMSNorm
from tfbackend.layers.rotary import Rotary
from tfbackend.layers.sinks import own_sinks
from tfbackend.layers.state import StateLayer
from tfbackend.layerspecs import (
    COLWISE,
    COLWISE_GATHER,
    REPLICATED,
    ROWWISE,
    ROWWISE_PARTIAL,
    ROWWISE_SPLIT,
    ActMulSpec,
    AttentionSpec,
    EmbeddingSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    NormSpec,
    QKVSpec,
    RotarySpec,
)
from tfbackend.loopedspec import DenseExpertsSpec, LoopedExpertsSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.moespec import MoESpec
from tfbackend.shortconvspec import ShortConvSpec
from tfbackend.ssdspec import SSDSpec
from tfbackend.standinspec import AllKeysSpec, IdleSpec
from tfbackend.statespec import StateSpec


def build_layer(spec: LayerSpec, prefix: str, context: BuildContext, site: nn.Module) -> nn.Module:
    """The live layer for `spec` at `prefix`, the path that vLLM's quantization and caches know it by.

    `site` is the module it is for: attention puts the sinks that it will read there, and a state layer runs it.
    """
    builder = _BUILDERS[type(spec)]
    made: nn.Module = builder(spec, prefix, context, site)
    return made


def _linear(spec: LinearSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    cls, extra = _LINEAR_CLASSES[spec.style]
    made: nn.Module = cls(
        spec.in_features, spec.out_features, bias=spec.bias, **extra, **_linear_keywords(prefix, context)
    )
    return made


_LINEAR_CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    COLWISE: (ColumnParallelLinear, {}),
    COLWISE_GATHER: (ColumnParallelLinear, {"gather_output": True}),
    ROWWISE: (RowParallelLinear, {}),
    ROWWISE_SPLIT: (RowParallelLinear, {"input_is_parallel": False}),
    ROWWISE_PARTIAL: (RowParallelLinear, {"reduce_results": False}),
    REPLICATED: (ReplicatedLinear, {}),
}


def _linear_keywords(prefix: str, context: BuildContext) -> dict[str, Any]:
    return {
        "params_dtype": context.dtype,
        "quant_config": context.quant_config,
        "prefix": prefix,
        "return_bias": False,
    }


def _merged(spec: MergedLinearSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    assert spec.style == COLWISE, spec
    keywords = _linear_keywords(prefix, context)
    made: nn.Module = MergedColumnParallelLinear(spec.in_features, [*spec.out_features], bias=spec.bias, **keywords)
    return made


def _qkv(spec: QKVSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    made: nn.Module = QKVParallelLinear(
        spec.in_features,
        spec.head_dim,
        spec.num_heads,
        spec.num_kv_heads,
        bias=spec.bias,
        v_head_size=spec.v_head_dim,
        **_linear_keywords(prefix, context),
    )
    return made


def _norm(spec: NormSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    made: nn.Module
    if spec.kind == "layer":
        cls = ZeroCentredLayerNorm if spec.weight == "zero_centred" else LayerNorm
        made = cls(spec.size, spec.eps, spec.weight != "none", spec.bias, dtype=context.dtype)
        if spec.bias and spec.weight == "none":  # the class ties the two together
            made.bias = nn.Parameter(torch.zeros(spec.size, dtype=context.dtype), requires_grad=False)
        return made
    assert not spec.bias, spec
    if spec.weight == "zero_centred":
        made = ZeroCentredRMSNorm(spec.size, spec.eps)
    else:
        made = RMSNorm(spec.size, spec.eps, has_weight=spec.weight != "none", dtype=context.dtype)
    return made


def _act_mul(spec: ActMulSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    made: nn.Module = _ACT_MULS[spec.activation]()
    return made


_ACT_MULS: dict[str, Callable[[], Any]] = {
    "silu": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu_tanh": lambda: GeluAndMul(approximate="tanh"),
}


def _rotary(spec: RotarySpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    return Rotary(spec, context.rotary_tables)


def _embedding(spec: EmbeddingSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    keywords = {"params_dtype": context.dtype, "quant_config": context.quant_config, "prefix": prefix}
    made: nn.Module
    if spec.scale == 1.0:
        made = VocabParallelEmbedding(spec.num_embeddings, spec.dim, **keywords)
    else:
        made = ScaledVocabParallelEmbedding(spec.num_embeddings, spec.dim, **keywords)
        made.scale = spec.scale
    return made


def _attention(spec: AttentionSpec, prefix: str, context: BuildContext, site: nn.Module) -> nn.Module:
    extra: dict[str, Any] = {}
    if spec.sinks is not None:
        extra["sinks"] = own_sinks(site, spec.sinks, context)
    if spec.alibi_slopes is not None:
        extra["alibi_slopes"] = own_slopes(spec.alibi_slopes, context.tp_size)
    if spec.chunk is not None:
        return _chunked(spec, prefix, context, extra)
    cls = _attention_class(spec)
    made: nn.Module = (gathered(cls) if spec.gathered else cls)(
        spec.num_heads // context.tp_size,
        spec.cached_dim,
        spec.scale,
        num_kv_heads=max(1, spec.num_kv_heads // context.tp_size),
        cache_config=context.cache_config,
        quant_config=context.quant_config,
        logits_soft_cap=spec.soft_cap,
        per_layer_sliding_window=spec.window,
        prefix=prefix,
        **extra,
    )
    if isinstance(made, PaddedAttention):
        made.fit(spec.head_dim, spec.v_head_dim)
    if isinstance(made, BiasedAttention):
        made.weigh(spec.scale)
    return _shared(made, spec, context)


def _attention_class(spec: AttentionSpec) -> Any:
    if spec.distance_bias is not None:
        assert not (spec.both or spec.key_bias or spec.alibi_slopes or spec.gathered), spec
        return DistanceBiasedAttention
    cls = BiasedAttention if spec.key_bias else PaddedAttention if spec.v_head_dim != spec.head_dim else Attention
    if spec.both:
        assert cls is Attention, spec
        cls = EncoderOnlyAttention
    return cls


def _shared(made: nn.Module, spec: AttentionSpec, context: BuildContext) -> nn.Module:
    if isinstance(made, GatheredHeads):
        made.share(spec.num_heads, spec.num_kv_heads, context.tp_size)
    return made


def _as_reference(spec: AllKeysSpec | IdleSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    return spec.reference()


def _chunked(spec: AttentionSpec, prefix: str, context: BuildContext, extra: dict[str, Any]) -> nn.Module:
    assert spec.chunk is not None and spec.window is None and spec.soft_cap is None and "sinks" not in extra, spec
    made: nn.Module = (gathered(ChunkedLocalAttention) if spec.gathered else ChunkedLocalAttention)(
        spec.num_heads // context.tp_size,
        spec.cached_dim,
        spec.scale,
        spec.chunk,
        num_kv_heads=max(1, spec.num_kv_heads // context.tp_size),
        cache_config=context.cache_config,
        quant_config=context.quant_config,
        prefix=prefix,
        **extra,
    )
    return _shared(made, spec, context)


def _grouped(spec: GroupedLinearSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
    return GroupedLinear(spec, context)


def _state(spec: StateSpec, prefix: str, context: BuildContext, site: nn.Module) -> nn.Module:
    return StateLayer(spec, prefix, site)


def own_slopes(slopes: tuple[float, ...], tp_size: int) -> list[float]:
    """The ALiBi slopes of this rank's heads."""
    heads = len(slopes) // tp_size
    first = get_tensor_model_parallel_rank() * heads if tp_size > 1 else 0
    return [*slopes[first : first + heads]]


def _without_site(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The builder of layers that look at no site."""

    def build(spec: LayerSpec, prefix: str, context: BuildContext, _: nn.Module) -> nn.Module:
        return make(spec, prefix, context)

    return build


_BUILDERS: dict[type[Any], Callable[..., nn.Module]] = {
    LinearSpec: _linear,
    MergedLinearSpec: _merged,
    QKVSpec: _qkv,
    RotarySpec: _rotary,
    NormSpec: _norm,
    ActMulSpec: _act_mul,
    EmbeddingSpec: _embedding,
    AttentionSpec: _attention,
    MLASpec: _without_site(latent_attention),
    AllKeysSpec: _as_reference,
    IdleSpec: _as_reference,
    ExpertsSpec: _without_site(experts),
    LoopedExpertsSpec: _without_site(LoopedExperts),
    DenseExpertsSpec: _without_site(DenseExperts),
    GroupedLinearSpec: _grouped,
    MoESpec: KernelMoE,
    StateSpec: _state,
    SSDSpec: _without_site(SSDLayer),
    ShortConvSpec: _without_site(ShortConvLayer),
    DeltaSpec: _without_site(DeltaLayer),
}


def local_sizes(spec: LayerSpec, tp_size: int) -> tuple[int, ...]:
    """Output widths of a merged layer's parts on one rank."""
    if isinstance(spec, QKVSpec):
        kv_heads = max(1, spec.num_kv_heads // tp_size)
        return spec.num_heads // tp_size * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.v_head_dim
    assert isinstance(spec, MergedLinearSpec)
    return tuple(width // tp_size for width in spec.out_features)
