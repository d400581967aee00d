"""Transformers' cache protocol for state: which models ask for it, and one call of a mixer with states of our choice.

Transformers gives each layer of a model a cache by what its config says of the layer; one that keeps state gets a
`LinearAttentionLayer`. A mixer reads and writes the tensors of that layer, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.stateheld import advance_held
from tfbackend.statespec import CONV, StateSpec

HYBRID, ATTENTION_FREE = "Hybrid", "AttentionFree"
MOST_STATES = 8
"""States of one kind that a mixer may number."""


def kept_by(config: PretrainedConfig) -> str:
    """What Transformers keeps for a model of this config: HYBRID (state, and keys and values), ATTENTION_FREE (state
    alone), or "" for keys and values alone. Where its cache has no state the class of the model may say that it has."""
    try:
        layers = DynamicCache(config=config).layers
    except RUN_ERRORS:
        return ""
    stateful = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if not stateful:
        return _kept_otherwise(config)
    alone = len(stateful) == len(layers) and not any(hasattr(layer, "update") for layer in stateful)
    return ATTENTION_FREE if alone else HYBRID


def _kept_otherwise(config: PretrainedConfig) -> str:
    """As `kept_by`, by what Transformers says of the class where it keeps the state of a model in no cache of its own:
    that it has any, and whether there is a choice how it attends."""
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not getattr(cls, "_is_stateful", False):
        return ""
    attends = cls._supports_sdpa or cls._supports_flash_attn or cls._supports_attention_backend
    return HYBRID if attends else ATTENTION_FREE


class _Everywhere(list[Any]):
    """One cache layer, whatever its number: a mixer's own number says nothing here."""

    def __init__(self, layer: LinearAttentionLayer) -> None:
        super().__init__([layer])

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


def cache_of(layer: LinearAttentionLayer) -> Cache:
    """A cache that is this layer for every mixer."""
    return Cache(layers=_Everywhere(layer))


def advance(
    forward: Callable[..., Any],
    mixer: nn.Module,
    spec: StateSpec,
    hidden: torch.Tensor,
    states: Sequence[torch.Tensor],
    positions: torch.Tensor | None = None,
    *,
    fresh: bool,
) -> tuple[Any, list[torch.Tensor]]:
    """Run a mixer over the next tokens of some requests.

    Args:
        forward: the forward of its class.
        hidden: [requests, tokens, width].
        states: one tensor [requests, ...] for each of the spec's states, which may be written into.
        positions: [requests, tokens], where the spec asks for them.
        fresh: whether these are the first tokens of all the requests; the states are then as `beginning` makes them.

    Returns:
        (what the mixer returned, the states after these tokens).
    """
    if spec.holder is not None:
        return advance_held(forward, mixer, spec, hidden, states, positions, fresh=fresh)
    layer = LinearAttentionLayer(number_of_states=MOST_STATES)
    layer.dtype, layer.device = hidden.dtype, hidden.device
    for state, tensor in zip(spec.states, states, strict=True):
        if state.kind == CONV:
            layer.conv_states[state.number] = tensor
            layer.conv_kernel_size[state.number] = tensor.shape[-1]
            layer.is_conv_states_initialized[state.number] = True
        else:
            layer.recurrent_states[state.number] = tensor
            layer.is_recurrent_states_initialized[state.number] = True
    layer.has_previous_state = dict.fromkeys(range(MOST_STATES), not fresh)
    arguments: dict[str, Any] = dict.fromkeys(spec.absent) | {spec.hidden: hidden, spec.cache: cache_of(layer)}
    output = forward(mixer, **arguments)
    kept = (layer.conv_states if s.kind == CONV else layer.recurrent_states for s in spec.states)
    return output, [tensors[state.number] for tensors, state in zip(kept, spec.states, strict=True)]


def beginning(spec: StateSpec, requests: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """The states of requests that have no tokens yet."""
    return [torch.full((requests, *s.shape), s.initial, dtype=s.dtype, device=device) for s in spec.states]


def run_alone(
    forward: Callable[..., Any],
    mixer: nn.Module,
    spec: StateSpec,
    hidden: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> Any:
    """What a mixer returns for whole requests [requests, tokens, width], of which nothing is kept."""
    if spec.holder is not None:
        states = beginning(spec, len(hidden), hidden.device)
        return advance_held(forward, mixer, spec, hidden, states, positions, fresh=True)[0]
    arguments: dict[str, Any] = dict.fromkeys((*spec.absent, spec.cache)) | {spec.hidden: hidden}
    return forward(mixer, **arguments)


def tensors_of(output: Any, spec: StateSpec) -> list[torch.Tensor]:
    """The tensors that a mixer returned, in the order of the spec's outputs."""
    leaves = output if spec.tupled else (output,)
    return [x for x, shape in zip(leaves, spec.outputs, strict=True) if shape is not None]
