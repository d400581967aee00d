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
    SupportsLoRA,
    SupportsMambaPrefixCaching,
    SupportsQuant,
)

from tfbackend.mixins.causal import CausalMixin
from tfbackend.mixins.hybrid import AttentionFreeMixin, HybridMixin
from tfbackend.mixins.moe import MoEMixin


class TransformersForCausalLM(CausalMixin, SupportsLoRA, SupportsQuant):
    """Decoder-only text models."""


class TransformersMoEForCausalLM(MoEMixin, CausalMixin, SupportsLoRA, SupportsQuant, MixtureOfExperts):
    """Decoder-only text models with experts."""


class TransformersHybridForCausalLM(
    HybridMixin, CausalMixin, SupportsLoRA, SupportsQuant, HasInnerState, IsHybrid, SupportsMambaPrefixCaching
):
    """Text models with state beside attention."""


class TransformersMoEHybridForCausalLM(
    MoEMixin,
    HybridMixin,
    CausalMixin,
    SupportsLoRA,
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
    SupportsQuant,
    MixtureOfExperts,
    HasInnerState,
    IsAttentionFree,
    SupportsMambaPrefixCaching,
):
    """Text models with experts, and state in place of attention."""
