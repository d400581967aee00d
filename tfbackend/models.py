"""The classes that vLLM's registry names: one line each, mixins first and vLLM's Protocols last.

The names are vLLM's own, which `ModelConfig.using_transformers_backend()` compares. Capability flags are read from
these classes in a subprocess and cached by the content of this file alone, so they belong here.
"""

from __future__ import annotations

from vllm.model_executor.models.interfaces import MixtureOfExperts, SupportsLoRA, SupportsQuant

from tfbackend.mixins.causal import CausalMixin
from tfbackend.mixins.moe import MoEMixin


class TransformersForCausalLM(CausalMixin, SupportsLoRA, SupportsQuant):
    """Decoder-only text models."""


class TransformersMoEForCausalLM(MoEMixin, CausalMixin, SupportsLoRA, SupportsQuant, MixtureOfExperts):
    """Decoder-only text models with experts."""
