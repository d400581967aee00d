"""Sites that are the same but for their numbers: traced and matched once, rewritten each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from tfbackend.graph.tracing import Trace, attention_call, trace
from tfbackend.source.forward import ForwardSource, SourceError, forward_source

if TYPE_CHECKING:
    from tfbackend.graph.observe import Observation

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
        if problem := tampered(self.module):
            return Trace(fx.Graph(), False, problem)
        if len({_manner(*call) for call in calls}) != 1:
            return Trace(fx.Graph(), False, "the model calls it in several ways, of which a trace shows one")
        args, kwargs = calls[0]
        return trace(self.module, args, kwargs, framed=frozenset({attention_call.__name__}))

    @cached_property
    def source(self) -> ForwardSource | str:
        if problem := tampered(self.module):
            return problem
        try:
            return forward_source(type(self.module))
        except SourceError as error:
            return str(error)


def kind_key(module: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> KindKey:
    """Equal for two modules whose forwards do the same but for the values of parameters.

    All that a forward can read of the modules inside counts: two layers may differ by the activation function that a
    child keeps as a plain attribute, or by a hook.
    """
    inside = []
    for name, child in module.named_modules():
        numbers_matter = child is module and branches_on(type(module))  # type: ignore[arg-type]
        inside.append((name, type(child), *own_state(child, without=() if numbers_matter else (_LAYER_NUMBER,))))
    return tuple(inside), tuple(sorted({_outline(call) for call in calls}, key=repr)), len(calls)


def layer_key(module: nn.Module) -> KindKey:
    """Equal for two layers that do the same, and whose insides do, but for the values of parameters."""
    inside = []
    for name, child in module.named_modules():
        cls: Any = type(child)
        without = () if branches_on(cls) else (_LAYER_NUMBER,)
        inside.append((name, type(child), *own_state(child, without=without)))
    return tuple(inside)


_TORCHS_OWN = frozenset(vars(nn.Module()))


def own_state(
    module: nn.Module,
    without: tuple[str, ...] = (),
    opaque: Callable[[Any], Any] = lambda value: (type(value), id(value)),
) -> tuple[Any, ...]:
    """Shapes of the module's own parameters and buffers, its attributes and what was hooked to it.

    `opaque` stands in for what is no plain value, functions included; left out, such objects are told apart by identity
    and the result is hashable.
    """
    tensors = tuple((k, tuple(t.shape)) for k, t in (module._parameters | module._buffers).items() if t is not None)
    plain = tuple(
        (name, _state(value, module, opaque))
        for name, value in sorted(vars(module).items())
        if name not in _TORCHS_OWN and name not in without
    )
    return tensors, plain, tampered(module)


def _state(value: Any, owner: nn.Module, opaque: Callable[[Any], Any]) -> Any:
    """What two attributes must share to be the same to a forward: the value where it is plain, else the object."""
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_state(item, owner, opaque) for item in value)
    if isinstance(value, dict):
        return tuple((repr(key), _state(item, owner, opaque)) for key, item in value.items())
    if isinstance(value, MethodType) and value.__self__ is owner:
        return opaque(value.__func__)
    return opaque(value)


def tampered(module: nn.Module) -> str:
    """Why the forward of the module's class is not all that a call of it runs; "" where it is."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks"
    return ""


def _manner(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """How a module is called, but for the sizes of what it gets."""
    return _outline((args, dict(kwargs)), lambda t: (t.dim(), t.shape[-1:], t.dtype))


def _outline(value: Any, tensor: Callable[[torch.Tensor], Any] = lambda t: (tuple(t.shape), t.dtype)) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, (tuple, list)):
        return tuple(_outline(v, tensor) for v in value)
    if isinstance(value, dict):
        return tuple((k, _outline(v, tensor)) for k, v in sorted(value.items()))
    return (type(value), value) if isinstance(value, (bool, int, float, str, type(None))) else type(value)


_HANDING_OVER = (
    *("update", "update_indexer", "update_conv_state", "update_recurrent_state", "has_previous_state"),
    *("get_mask_sizes", "get_query_offset", "get_seq_length"),
)
"""Methods of Transformers' caches that take the number of a layer to know it by."""


@lru_cache(maxsize=1024)
def branches_on(cls: type[nn.Module], attribute: str = _LAYER_NUMBER) -> bool:
    """Whether a forward does more with its layer number than to hand it to the cache, itself or through a method."""
    try:
        source = forward_source(cls)
    except SourceError:
        return True
    handed = {id(argument) for node in ast.walk(source.tree) for argument in _handed_to_cache(node)}
    if any(id(use) not in handed for use in source.self_uses(attribute)):
        return True
    methods = (m for base in cls.__mro__ if base.__module__ != nn.Module.__module__ for m in vars(base).values())
    helpers = (m for m in map(_function, methods) if m is not None and m.__name__ not in ("__init__", source.name))
    return any(attribute in m.__code__.co_names for m in helpers)


def _handed_to_cache(node: ast.AST) -> list[ast.expr]:
    """What a node hands to a method of Transformers' cache, or picks one of its layers by."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _HANDING_OVER:
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    picks = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "layers"
    return [node.slice] if picks and isinstance(node, ast.Subscript) else []


def _function(member: Any) -> FunctionType | None:
    """The function behind a method or a property."""
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return member if isinstance(member, FunctionType) else None
