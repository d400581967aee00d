"""Sites that are the same but for their numbers: traced and matched once, rewritten each."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx, nn

from tfbackend.graph.observe import Observation
from tfbackend.graph.tracing import Trace, trace
from tfbackend.source.forward import ForwardSource, SourceError, forward_source

KindKey = tuple[Any, ...]

_LAYER_NUMBER = "layer_idx"


class Kind:
    """One kind of site. Its trace is made when first asked for, from the call that its first site was seen to get.

    Attributes:
        first: path of that site.
        module: its module.
    """

    def __init__(self, first: str, module: nn.Module, observation: Observation) -> None:
        self.first, self.module, self._observation = first, module, observation

    @cached_property
    def trace(self) -> Trace:
        calls = self._observation.calls.get(self.first)
        if not calls:
            return Trace(fx.Graph(), False, "the model did not call it in the observed run")
        args, kwargs = calls[0]
        return trace(self.module, args, kwargs)

    @cached_property
    def source(self) -> ForwardSource | str:
        try:
            return forward_source(type(self.module))
        except SourceError as error:
            return str(error)


def kind_key(module: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> KindKey:
    """Equal for two modules whose forwards do the same but for the values of parameters."""
    inside = tuple(
        (name, type(child), tuple((k, tuple(p.shape)) for k, p in child._parameters.items() if p is not None))
        for name, child in module.named_modules()
    )
    numbers_matter = _branches_on_layer_number(type(module))
    plain = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str, type(None))) and (numbers_matter or name != _LAYER_NUMBER)
    )
    call = tuple(_shape_of_call(*c) for c in calls[:1])
    return type(module), inside, plain, call, len(calls)


def _shape_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(_outline(a) for a in args), tuple((k, _outline(v)) for k, v in sorted(kwargs.items()))


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(_outline(v) for v in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)


@lru_cache(maxsize=1024)
def _branches_on_layer_number(cls: type[nn.Module]) -> bool:
    """Whether a forward does more with its layer number than to hand it to the cache."""
    try:
        source = forward_source(cls)
    except SourceError:
        return True
    handed = {
        id(argument)
        for call in ast.walk(source.tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update"
        for argument in call.args
    }
    return any(id(use) not in handed for use in source.self_uses(_LAYER_NUMBER))
