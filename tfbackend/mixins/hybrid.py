"""Models whose layers keep state between calls, beside attention or in place of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.kv_cache_interface import MambaSpec

from tfbackend.errors import UnsupportedModelError
from tfbackend.layers.state import StateLayer
from tfbackend.mixins.base import Base


class StateMixin(Base):
    """What vLLM asks of a model with state, told from the layers that it built: each has a row of bytes a request."""

    @classmethod
    def get_mamba_specs_from_config(cls, vllm_config: VllmConfig) -> tuple[MambaSpec, ...]:
        """One for every layer; one of no size where the model turned out to have none."""
        specs = [_spec(layer.get_state_shape(), layer.get_state_dtype()) for layer in _layers(vllm_config)]
        return tuple(dict.fromkeys(specs)) or (_spec((), ()),)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """That of the layer with the most; it is known once layers are built."""
        return max((layer.get_state_shape() for layer in _layers(vllm_config)), default=())

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return next((layer.get_state_dtype() for layer in _layers(vllm_config)), ())

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """A row is copied as a whole."""
        return (get_temporal_copy_spec,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: Collection[Any]) -> dict[Any, tuple[Any, ...]]:
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())


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


def _layers(vllm_config: VllmConfig) -> Iterator[StateLayer]:
    built = vllm_config.compilation_config.static_forward_context.values()
    return (layer for layer in built if isinstance(layer, StateLayer))


def _spec(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> MambaSpec:
    return MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1)
