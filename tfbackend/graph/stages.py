"""Where a stack of decoder layers can be cut into pipeline stages: what goes from one layer to the next.

A stage has some layers; the others are stand-ins that hand on what they are given. That is right where nothing goes
between layers but the hidden states, and where what else they take is made of token ids and positions, which every
stage has. The model is run once over meta tensors, and every tensor is followed to the layer that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tfbackend.graph.interface import RUN_ERRORS, answering, buffers_on_meta, calls_made_by, passing_experts, unattended
from tfbackend.graph.observe import TOKENS, model_inputs
from tfbackend.graph.query import is_in_place

_IDS = -1
"""Stands for the token ids where a layer's number does for what the layer made."""


@dataclass(frozen=True)
class Stages:
    """What a stage needs to know of the layers that it has not.

    Attributes:
        layers: path of the list of layers, relative to the base model.
        count: how many there are.
        width: of the hidden states [1, tokens, width] that go from one to the next.
        returned: elements of the tuple that each layer returns, the hidden states first; 0 for the bare tensor.
        embeds: whether later layers take more from the token ids than came through the first layer.
        problem: why the layers cannot be shared out; "" where they can.
    """

    layers: str
    count: int = 0
    width: int = 0
    returned: tuple[int, ...] = ()
    embeds: bool = False
    problem: str = ""


def find_stages(base: nn.Module, layers: str) -> Stages:
    """Follow what goes from layer to layer of the list at `layers`, "" where the model has none."""
    if not layers:
        return Stages(layers, problem="it has no list of layers")
    stack = base.get_submodule(layers)
    trail = _Trail([f"{layers}.{name}" for name, _ in stack.named_children()])
    with torch.no_grad(), ExitStack() as around:
        for context in (buffers_on_meta(base), answering(unattended), passing_experts(), _followed(base, trail)):
            around.enter_context(context)
        inputs = model_inputs(base, torch.device("meta"))
        trail.note([inputs["input_ids"]], _IDS)
        try:
            with _Operations(trail):
                output = base(**inputs)
            trail.end(output)
        except RUN_ERRORS as error:
            return Stages(layers, problem=f"{type(error).__name__}: {error}")
    if not trail.problem and len(trail.returned) < len(trail.paths):
        trail.problem = f"{trail.paths[len(trail.returned)]} was not called"
    return Stages(layers, len(trail.paths), trail.width, tuple(trail.returned), trail.embeds, trail.problem)


@dataclass
class _Trail:
    """What was made by which layer.

    Attributes:
        paths: of the layers, in order.
        running: number of the layer that runs, None between them.
        carried: the hidden states that it was given.
        latest: those that the last one returned.
    """

    paths: list[str]
    origins: dict[int, tuple[torch.Tensor, frozenset[int]]] = field(default_factory=dict)
    running: int | None = None
    carried: torch.Tensor | None = None
    latest: torch.Tensor | None = None
    width: int = 0
    returned: list[int] = field(default_factory=list)
    embeds: bool = False
    problem: str = ""

    def note(self, tensors: list[torch.Tensor], origin: int) -> None:
        self.origins |= {id(x): (x, frozenset({origin})) for x in tensors}

    def enter(self, number: int, given: list[torch.Tensor]) -> None:
        """A layer is called."""
        if number != len(self.returned):
            self.complain(f"{self.paths[number]} is called when {len(self.returned)} layers have run")
        elif not given or (number and given[0] is not self.latest):
            self.complain(f"{self.paths[number]} is given something else than what the layer before it returned")
        self.running, self.carried = number, given[0] if given else None

    def leave(self, output: Any) -> None:
        """A layer has returned: all that it made is its own."""
        assert self.running is not None
        hidden = output[0] if isinstance(output, tuple) and output else output
        path = self.paths[self.running]
        if not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != (1, TOKENS) or hidden.dim() != 3:
            self.complain(f"{path} returns no hidden states [1, tokens, width]")
        elif self.width not in (0, hidden.shape[2]):
            self.complain(f"{path} returns hidden states of another width than those before it")
        else:
            self.width, self.latest = hidden.shape[2], hidden
            self.note([x for x in tree_leaves(output) if isinstance(x, torch.Tensor)], self.running)
        self.returned.append(len(output) if isinstance(output, tuple) else 0)
        self.running = None

    def follow(self, taken: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """An operation took and made tensors."""
        origins = frozenset[int]()
        for x in taken:
            known = self.origins.get(id(x))
            if known is not None and x is not self.carried:
                origins |= known[1]
        here = f"in {self.paths[self.running]}" if self.running is not None else "outside of the layers"
        own = self.running if self.running is not None else len(self.paths) - 1
        for origin in origins - {own, _IDS}:
            self.complain(f"what {self.paths[origin]} made is used {here}")
        if _IDS in origins and self.returned:
            self.embeds = True
        if self.running is not None:
            self.note(made, self.running)
        elif origins:
            self.origins |= {id(x): (x, origins) for x in made}

    def end(self, output: Any) -> None:
        """The base model has returned."""
        first = next((x for x in tree_leaves(output) if isinstance(x, torch.Tensor)), None)
        known = self.origins.get(id(first)) if first is not None else None
        if known is None or len(self.paths) - 1 not in known[1]:
            self.complain("what the model returns does not come from the last layer")

    def complain(self, problem: str) -> None:
        self.problem = self.problem or problem


class _Operations(TorchFunctionMode):
    def __init__(self, trail: _Trail) -> None:
        super().__init__()
        self.trail = trail

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and follow what it makes."""
        result = func(*args, **(kwargs or {}))
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        name = getattr(func, "__name__", "")
        if made:
            self.trail.follow(taken, made + (taken[:1] if is_in_place(name) else []))
        return result


def _followed(base: nn.Module, trail: _Trail) -> AbstractContextManager[None]:
    """Tell the trail when layers are called and return."""
    numbers = {id(base.get_submodule(path)): number for number, path in enumerate(trail.paths)}

    def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        number = numbers.get(id(module))
        if number is None or trail.running is not None:
            return original(module, *args, **kwargs)
        trail.enter(number, [x for x in tree_leaves((args[:1], kwargs)) if isinstance(x, torch.Tensor)])
        output = original(module, *args, **kwargs)
        trail.leave(output)
        return output

    return calls_made_by(call)
