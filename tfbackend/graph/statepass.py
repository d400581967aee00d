"""A run of the whole model on meta tensors as if it were to go on from there: what it keeps outside the usual cache.

A model that is asked to keep state, and is given nothing to keep it in, makes what it needs: a list of tensors, an
object of a class of its own, attributes of its modules. What each module is then called with is written down before it
runs, with what the tensors were filled with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tfbackend.graph.interface import (
    RUN_ERRORS,
    answering,
    as_it_was,
    buffers_on_meta,
    call_on_meta,
    calls_made_by,
    unattended,
)
from tfbackend.graph.masks import masks_that_answer
from tfbackend.graph.observe import TOKENS, call_keywords
from tfbackend.statespec import Path, StateSpec

REQUESTS = 3
"""Requests of the run. No state is of this size by chance in its first axis."""
_DEPTH = 4


@dataclass(frozen=True)
class KeepingCall:
    """A call of a module.

    Attributes:
        arguments: by name, as they were before the module ran.
        attributes: likewise the tensors among the plain attributes of the module and of those inside it.
        fills: id of a tensor -> what all of it was filled with.
    """

    arguments: Mapping[str, Any]
    attributes: Mapping[Path, torch.Tensor]
    fills: Mapping[int, float]


@dataclass
class Keeping:
    """What such a run saw.

    Attributes:
        calls: path of a module -> its first call.
        attributes: paths of modules -> names of plain attributes that tensors were put into.
        layers: path of a module -> how many there are in the list of layers that it is in.
        specs: what was found by looking into a call, by path.
    """

    calls: dict[str, KeepingCall] = field(default_factory=dict)
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    specs: dict[str, list[StateSpec]] = field(default_factory=dict)


def keep(base: nn.Module) -> Keeping:
    """Run the base model over meta tokens of several requests and let it keep what it needs to go on."""
    keywords = call_keywords(base, torch.arange(TOKENS, device="meta").expand(REQUESTS, TOKENS))
    seen = Keeping()
    if "use_cache" not in keywords:
        return seen
    ids = torch.zeros((REQUESTS, TOKENS), dtype=torch.long, device="meta")
    before = _tensors_of_modules(base)
    with (
        torch.no_grad(),
        buffers_on_meta(base),
        as_it_was(base),
        masks_that_answer(),
        answering(unattended),
        _Fills() as fills,
        _calls_into(seen, base, fills.known),
    ):
        try:
            base(**keywords | {"input_ids": ids, "use_cache": True})
        except RUN_ERRORS:
            return Keeping()
        for path, names in _tensors_of_modules(base).items():
            if new := tuple(name for name in names if name not in before.get(path, ())):
                seen.attributes[path] = new
    seen.layers = _layer_counts(base)
    return seen


def tensors_in(thing: Any, depth: int = _DEPTH) -> dict[Path, torch.Tensor]:
    """The tensors of a structure of lists, tuples, dicts and objects, by the way to them."""
    if isinstance(thing, torch.Tensor):
        return {(): thing}
    if depth < 0:
        return {}
    found = {}
    for step, inner in _inside(thing):
        for path, tensor in tensors_in(inner, depth - 1).items():
            found[(step, *path)] = tensor
    return found


def _inside(thing: Any) -> list[tuple[Any, Any]]:
    if isinstance(thing, (list, tuple)):
        return [*enumerate(thing)]
    if isinstance(thing, dict):
        return [*thing.items()]
    return [*vars(thing).items()] if is_object(thing) else []


def is_object(thing: Any) -> bool:
    """Whether a value is an object of a class of the model's own, in which something can be kept."""
    plain = isinstance(thing, (nn.Module, torch.Tensor, type)) or callable(thing) or not hasattr(thing, "__dict__")
    return not plain and not hasattr(thing, "to_dict")


def attributes_in(module: nn.Module) -> dict[Path, torch.Tensor]:
    """The tensors among the plain attributes of a module and of those inside it."""
    return {
        (*(path.split(".") if path else ()), name): getattr(module.get_submodule(path), name)
        for path, names in _tensors_of_modules(module).items()
        for name in names
    }


def _tensors_of_modules(base: nn.Module) -> dict[str, tuple[str, ...]]:
    found = {}
    for path, module in base.named_modules():
        if names := tuple(name for name, value in vars(module).items() if isinstance(value, torch.Tensor)):
            found[path] = names
    return found


def _layer_counts(base: nn.Module) -> dict[str, int]:
    counts = dict[str, int]()
    for path, stack in base.named_modules():
        if isinstance(stack, nn.ModuleList):
            counts |= {f"{path}.{name}": len(stack) for name, _ in stack.named_modules() if name}
    return counts


def _calls_into(seen: Keeping, base: nn.Module, fills: Mapping[int, float]) -> AbstractContextManager[None]:
    paths = {id(module): path for path, module in base.named_modules()}

    def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is not None and path not in seen.calls and (given := _bound(module, args, kwargs)) is not None:
            attributes = attributes_in(module)
            tensors = [*tensors_in(given).values(), *attributes.values()]
            known = {id(x): fills[id(x)] for x in tensors if id(x) in fills}
            seen.calls[path] = KeepingCall(copied_structure(given), attributes, known)
        return call_on_meta(original, module, args, kwargs)

    return calls_made_by(call)


def copied_structure(thing: Any) -> Any:
    """A copy of a structure with the same tensors in it."""
    return copy.deepcopy(thing, {id(x): x for x in tensors_in(thing, 2 * _DEPTH).values()})


def _bound(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any] | None:
    signature = inspect.signature(inspect.unwrap(type(module).forward))
    try:
        bound = signature.bind(module, *args, **kwargs).arguments
    except TypeError:
        return None
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {n: v for n, v in list(bound.items())[1:] if signature.parameters[n].kind not in open_ended}


_FILLED = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
_ARITHMETIC = frozenset(
    f"{place}{name}{end}"
    for name in ("add", "sub", "mul", "div", "neg", "truediv")
    for place, end in (("", ""), ("", "_"), ("__", "__"), ("__i", "__"))
)


class _Fills(TorchFunctionMode):
    """Knows of each tensor that was filled with one number what that is."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, float] = {}
        self._alive: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        value = _FILLED.get(name)
        if name in ("full", "full_like", "new_full"):
            number = kwargs.get("fill_value", args[1] if len(args) > 1 else None)
            value = float(number) if isinstance(number, (int, float)) else None
        elif name in _ARITHMETIC:
            value = self._computed(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.known.pop(id(result), None)
            if value is not None:
                self.known[id(result)] = value
                self._alive.append(result)
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> float | None:
        given = [self.known.get(id(x)) if isinstance(x, torch.Tensor) else x for x in args]
        numbers = [float(x) for x in given if isinstance(x, (int, float))]
        if kwargs or len(numbers) != len(given):
            return None
        with torch.device("cpu"):
            return float(func(*map(torch.tensor, numbers)))
