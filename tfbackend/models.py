"""The classes that vLLM's registry names: one line each, mixins first and vLLM's Protocols last.

The names are those that `ModelConfig.using_transformers_backend()` compares: vLLM's own, and those that plugin.py has
it choose for models with state. Capability flags are read from
these classes in a subprocess and cached by the content of this file alone, so they belong here.
"""

from __future__ import annotations

from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    IsHybrid,
    MixtureOfExperts,
    SupportsCrossEncoding,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
    SupportsPP,
    SupportsQuant,
)
from vllm.model_executor.models.interfaces_base import VllmModelForPooling, attn_type, default_pooling_type

from tfbackend.mixins.causal import CausalMixin
from tfbackend.mixins.hybrid import AttentionFreeMixin, HybridMixin
from tfbackend.mixins.moe import MoEMixin
from tfbackend.mixins.pooling import EmbeddingMixin, SequenceClassificationMixin

# To vLLM both mean that each call holds whole prompts. Which token counts is not for a class of many models to say.
_cls, _whole = default_pooling_type(seq_pooling_type="CLS"), attn_type("encoder_only")


class TransformersForCausalLM(CausalMixin, SupportsLoRA, SupportsPP, SupportsQuant):
    """Decoder-only text models."""


class TransformersMoEForCausalLM(MoEMixin, CausalMixin, SupportsLoRA, SupportsPP, SupportsQuant, MixtureOfExperts):
    """Decoder-only text models with experts."""


class TransformersHybridForCausalLM(
    HybridMixin,
    CausalMixin,
    SupportsLoRA,
    SupportsPP,
    SupportsQuant,
    HasInnerState,
    IsHybrid,
    SupportsMambaPrefixCaching,
):
    """Text models with state beside attention."""


class TransformersMoEHybridForCausalLM(
    MoEMixin,
    HybridMixin,
    CausalMixin,
    SupportsLoRA,
    SupportsPP,
    SupportsQuant,
    MixtureOfExperts,
    HasInnerState,
    IsHybrid,
    SupportsMambaPrefixCaching,
):
    """Text models with experts, and state beside attention."""


class TransformersAttentionFreeForCausalLM(
    AttentionFreeMixin,
    CausalMixin,
    SupportsLoRA,
    SupportsPP,
    SupportsQuant,
    HasInnerState,
    IsAttentionFree,
    SupportsMambaPrefixCaching,
):
    """Text models with state in place of attention."""


class TransformersMoEAttentionFreeForCausalLM(
    MoEMixin,
    AttentionFreeMixin,
    CausalMixin,
    SupportsLoRA,
    SupportsPP,
    SupportsQuant,
    MixtureOfExperts,
    HasInnerState,
    IsAttentionFree,
    SupportsMambaPrefixCaching,
):
    """Text models with experts, and state in place of attention."""


@_cls
@_whole
class TransformersEmbeddingModel(EmbeddingMixin, SupportsLoRA, SupportsQuant, VllmModelForPooling):
    """Text models that give a vector."""


@_cls
@_whole
class TransformersMoEEmbeddingModel(
    MoEMixin, EmbeddingMixin, SupportsLoRA, SupportsQuant, MixtureOfExperts, VllmModelForPooling
):
    """Text models with experts that give a vector."""


@_cls
@_whole
class TransformersForSequenceClassification(
    SequenceClassificationMixin, SupportsLoRA, SupportsQuant, SupportsCrossEncoding, VllmModelForPooling
):
    """Text models that label a text, or each of its tokens."""


@_cls
@_whole
class TransformersMoEForSequenceClassification(
    MoEMixin,
    SequenceClassificationMixin,
    SupportsLoRA,
    SupportsQuant,
    MixtureOfExperts,
    SupportsCrossEncoding,
    VllmModelForPooling,
):
    """Text models with experts that label a text, or each of its tokens."""
