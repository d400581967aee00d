"""Which module keeps state between calls: the one that asks a cache for it, in a run on meta tensors.

Every argument that the model left out is tried with a cache of Transformers' own. The module in whose code the cache
is asked to keep something is the mixer, whatever it is called, and the tensors that the cache then holds are its state.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from tfbackend.graph.interface import RUN_ERRORS, answering, buffers_on_meta, unattended
from tfbackend.graph.observe import TOKENS
from tfbackend.graph.statecache import MOST_STATES, cache_of
from tfbackend.graph.statepass import REQUESTS
from tfbackend.statespec import CONV, RECURRENT, State, StateSpec


class _Watched(LinearAttentionLayer):  # type: ignore[misc]
    """Notes which modules ask it to keep something."""

    def __init__(self) -> None:
        super().__init__(number_of_states=MOST_STATES)
        self.askers: dict[int, nn.Module] = {}

    def _note(self) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
            owner = next((frame.f_locals.get(name) for name in first), None)
            if isinstance(owner, nn.Module):
                self.askers[id(owner)] = owner
                return
            frame = frame.f_back  # type: ignore[assignment]

    def update_conv_state(self, *args: Any, **keywords: Any) -> Any:
        self._note()
        return super().update_conv_state(*args, **keywords)

    def update_recurrent_state(self, *args: Any, **keywords: Any) -> Any:
        self._note()
        return super().update_recurrent_state(*args, **keywords)


def find_state(module: nn.Module, calls: list[Any]) -> StateSpec | str:
    """The state that a module keeps, told from the calls that the model made of it; "" where it keeps none itself, and
    else why what it keeps cannot be kept for it."""
    forward = inspect.unwrap(type(module).forward)
    try:
        signature = inspect.signature(forward)
        bound = [signature.bind(module, *args, **kwargs).arguments for args, kwargs in calls]
    except TypeError:
        return ""
    if not bound:
        return ""
    given = dict(list(bound[0].items())[1:])
    hidden = next((name for name, value in given.items() if _is_tokens(value)), None)
    if hidden is None:
        return ""
    absent = tuple(name for name in _named(signature, required=True) if name != hidden and given.get(name) is None)
    for cache in (*absent, *_named(signature, required=False)):
        if given.get(cache) is None and cache != hidden:
            others = tuple(name for name in absent if name != cache)
            spec = _probe(module, forward, given[hidden], (hidden, cache, others))
            if spec != "":
                several = isinstance(spec, StateSpec) and len(calls) != 1
                return f"it is called {len(calls)} times in one forward of the model" if several else spec
    return ""


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dim() == 3
        and value.shape[:2] == (1, TOKENS)
    )


def _named(signature: inspect.Signature, *, required: bool) -> Iterator[str]:
    """Arguments by name but for the module's own, those without a default or those that are None by default."""
    for name, parameter in list(signature.parameters.items())[1:]:
        named = parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if named and parameter.default is (inspect.Parameter.empty if required else None):
            yield name


def _probe(module: nn.Module, forward: Any, like: torch.Tensor, names: tuple[str, str, tuple[str, ...]]) -> Any:
    hidden, cache, absent = names
    layer, tokens = _Watched(), torch.empty((REQUESTS, *like.shape[1:]), dtype=like.dtype, device="meta")
    arguments: dict[str, Any] = dict.fromkeys(absent) | {hidden: tokens, cache: cache_of(layer)}
    with torch.no_grad(), torch.device("meta"), buffers_on_meta(module), answering(unattended):
        try:
            output = forward(module, **arguments)
        except RUN_ERRORS:
            return ""
    if list(layer.askers) != [id(module)]:
        return ""
    states = _states(layer)
    if isinstance(states, str):
        return states
    outputs = _outputs(output, like.dtype)
    if isinstance(outputs, str):
        return outputs
    return StateSpec(hidden, cache, absent, states, outputs, isinstance(output, tuple))


def _states(layer: LinearAttentionLayer) -> tuple[State, ...] | str:
    found = []
    kinds: tuple[tuple[str, Mapping[int, Any]], ...] = (
        (CONV, layer.conv_states),
        (RECURRENT, layer.recurrent_states),
    )
    for kind, tensors in kinds:
        for number, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.dim() < 2 or tensor.shape[0] != REQUESTS:
                return f"its {kind} state of shape {tuple(tensor.shape)} has no row for each of {REQUESTS} requests"
            found.append(State(kind, number, tuple(tensor.shape[1:]), tensor.dtype))
    return tuple(found)


def _outputs(output: Any, dtype: torch.dtype) -> tuple[tuple[int, ...] | None, ...] | str:
    shapes: list[tuple[int, ...] | None] = []
    for x in output if isinstance(output, tuple) else (output,):
        if x is None:
            shapes.append(None)
        elif not isinstance(x, torch.Tensor) or x.shape[:2] != (REQUESTS, TOKENS):
            what = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            return f"it returns {what} beside what it makes of its tokens"
        elif x.dtype != dtype:
            return f"it makes {x.dtype} of {dtype}"
        else:
            shapes.append(tuple(x.shape[2:]))
    return tuple(shapes)
