"""The parts of a mixer that computes with a few linears, one depthwise convolution and vectors, told from shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from tfbackend.graph.interface import RUN_ERRORS, answering, unattended
from tfbackend.graph.statecache import advance, run_alone, tensors_of
from tfbackend.graph.statetrial import whole_numbers
from tfbackend.graph.trial import apart, materialise, plain_float32
from tfbackend.statespec import StateSpec


def linears_of(module: nn.Module, in_features: int | None, out_features: int | None) -> list[str]:
    """Children that are linears of these widths, None for any."""
    return [
        name
        for name, child in module.named_children()
        if type(child) is nn.Linear
        and in_features in (None, child.in_features)
        and out_features in (None, child.out_features)
    ]


def depthwise(module: nn.Module, channels: int, kernel: int) -> list[str]:
    """Children that are causal convolutions of each channel by itself."""
    return [
        name
        for name, child in module.named_children()
        if isinstance(child, nn.Conv1d) and tuple(child.weight.shape) == (channels, 1, kernel)
    ]


def vectors_of(module: nn.Module, size: int) -> list[str]:
    """Parameters of the module itself that are vectors of this size."""
    return [name for name, p in module._parameters.items() if p is not None and tuple(p.shape) == (size,)]


def small_numbers(module: nn.Module) -> list[float]:
    """What a module has for attributes that may be an eps."""
    values = inspect.getmembers(module, lambda value: isinstance(value, float))
    return [value for _, value in values if 0.0 <= value < 0.1]


def stray_weights(module: nn.Module, known: set[str]) -> list[str]:
    """Parameters and saved buffers of a module that are none of `known`, nor in a child that is."""
    names = [name for name, _ in module.named_parameters()] + [*module.state_dict()]
    return [name for name in dict.fromkeys(names) if name.split(".")[0] not in known]


Read = TypeVar("Read")


def read_by_numbers(
    module: nn.Module, seed: int, read: Callable[[nn.Module, torch.Generator], Read | str]
) -> Read | str:
    """What `read` finds of a mixer that has random weights, or why it found nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), plain_float32(), answering(unattended), whole_numbers():
        try:
            return read(materialise(module, generator), generator)
        except RUN_ERRORS as error:
            return f"it does not run on the CPU: {type(error).__name__}: {error}"


class Seen:
    """What the children of a mixer were given in one run, by name, and what the mixer gave."""

    output: torch.Tensor

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.keywords: dict[str, dict[str, Any]] = {}


@contextmanager
def watching(module: nn.Module, names: tuple[str, ...]) -> Iterator[Seen]:
    """While entered, note the inputs of the latest call of each child."""
    seen, handles = Seen(), []
    for name in names:

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            seen.inputs[name], seen.keywords[name] = args, kwargs

        handles.append(module.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def run_whole(mixer: nn.Module, spec: StateSpec, hidden: torch.Tensor) -> torch.Tensor:
    """What a mixer that returns one tensor makes of whole requests [requests, tokens, width]."""
    output = run_alone(type(mixer).forward, mixer, spec, hidden.clone())
    made = output[0] if spec.tupled else output
    assert isinstance(made, torch.Tensor)
    return made


def run_decoding(mixer: nn.Module, spec: StateSpec, hidden: torch.Tensor, prompt: int) -> torch.Tensor:
    """The same of one request whose tokens after the first `prompt` come one by one."""
    states = [torch.zeros((1, *state.shape)) for state in spec.states]
    given, at = list[torch.Tensor](), 0
    for size in (prompt, *[1] * (hidden.shape[1] - prompt)):
        part = hidden[:, at : at + size].clone()
        output, states = advance(type(mixer).forward, mixer, spec, part, states, fresh=at == 0)
        given += tensors_of(output, spec)
        at += size
    return torch.cat(given, dim=1)


def apart_from(
    reference: nn.Module, mixer: nn.Module, spec: StateSpec, width: int, generator: torch.Generator
) -> float:
    """By how much of the largest value a mixer differs from a reference, over whole requests of random tokens, quiet
    and loud."""
    hidden = torch.randn((1, 11, width), generator=generator)
    pairs = [(run_whole(mixer, spec, x), reference(x)) for x in (hidden, 4.0 * hidden)]
    found = [apart(theirs, mine) for theirs, mine in pairs]
    return next((value for value in found if value != value), max(found))
