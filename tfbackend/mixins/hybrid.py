"""Models whose layers keep state between calls, beside attention or in place of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from tfbackend.errors import UnsupportedModelError
from tfbackend.mixins.base import Base


class StateMixin(Base):
    """What vLLM asks of a model with state, told from the layers that it built."""

    @classmethod
    def get_mamba_specs_from_config(cls, vllm_config: VllmConfig) -> tuple[MambaSpec, ...]:
        """One for every kind of layer; one of no size where the model turned out to have none."""
        return tuple(dict.fromkeys(map(_spec_of, _layers(vllm_config)))) or (_spec((), ()),)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """That of the layer with the most; it is known once layers are built."""
        return _largest(vllm_config).shapes  # type: ignore[no-any-return]

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return _largest(vllm_config).dtypes  # type: ignore[no-any-return]

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """A row of bytes is copied as a whole."""
        return _COPIED[MambaAttentionBackendEnum.CUSTOM]

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: Collection[Any]) -> dict[Any, tuple[Any, ...]]:
        return {kind: _COPIED[kind] for kind in mamba_types}


_CONV_AND_RECURRENT = (get_conv_copy_spec, get_temporal_copy_spec)
_COPIED: dict[Any, tuple[Any, ...]] = {
    MambaAttentionBackendEnum.CUSTOM: (get_temporal_copy_spec,),
    MambaAttentionBackendEnum.MAMBA1: _CONV_AND_RECURRENT,
    MambaAttentionBackendEnum.MAMBA2: _CONV_AND_RECURRENT,
    MambaAttentionBackendEnum.GDN_ATTN: _CONV_AND_RECURRENT,
    MambaAttentionBackendEnum.SHORT_CONV: (get_conv_copy_spec,),
}
"""How vLLM copies each state of a layer, by the kind of the layer."""


class HybridMixin(StateMixin):
    """State in some layers, keys and values in some."""


class AttentionFreeMixin(StateMixin):
    """State alone: vLLM keeps no keys and values for such a class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for path, _ in self.plan.attention:
            raise UnsupportedModelError(
                "The model has attention, and its config says that it keeps no keys and values.",
                where=path,
                found=f"only state in Transformers' cache for {type(self.config).__name__}",
            )


def _layers(vllm_config: VllmConfig) -> Iterator[MambaBase]:
    built = vllm_config.compilation_config.static_forward_context.values()
    return (layer for layer in built if isinstance(layer, MambaBase))


def _largest(vllm_config: VllmConfig) -> MambaSpec:
    return max(map(_spec_of, _layers(vllm_config)), key=lambda spec: spec.page_size_bytes, default=_spec((), ()))


def _spec_of(layer: MambaBase) -> MambaSpec:
    return _spec(tuple(layer.get_state_shape()), tuple(layer.get_state_dtype()))


def _spec(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> MambaSpec:
    return MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1)
