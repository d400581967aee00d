"""State that a mixer keeps outside Transformers' cache: where it is, and a call of the mixer with states of our choice.

A mixer may take its state as an argument, a list of tensors or an object of a class of its own, and write into it or
return it anew; or it may keep it in attributes. It is run on meta as a model that keeps state runs it: the tensors that
are new afterwards, or were written into, and have a row for each request, are its state.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tfbackend.graph.interface import RUN_ERRORS, answering, as_it_was, buffers_on_meta, unattended
from tfbackend.graph.observe import TOKENS, Observation
from tfbackend.graph.query import is_within
from tfbackend.graph.statepass import (
    REQUESTS,
    Keeping,
    KeepingCall,
    attributes_in,
    copied_structure,
    is_object,
    tensors_in,
)
from tfbackend.statespec import KEPT, Holder, Path, Slot, State, StateSpec, filled


def find_held(module: nn.Module, path: str, observation: Observation) -> list[StateSpec]:
    """How the module at `path` may keep state, the likeliest first; none where it keeps none, or what is inside it
    does."""
    keeping = observation.keeping
    if keeping is None or path not in keeping.calls or any(is_within(p, path) for p in observation.attention):
        return []
    found = _specs(module, path, observation, keeping)
    inside = [f"{path}.{name}" for name, _ in module.named_modules() if name]
    nested = (_specs(module.get_submodule(p.removeprefix(f"{path}.")), p, observation, keeping) for p in inside)
    if found and found[0].holder is not None and found[0].holder.argument and any(nested):
        return []
    return found


def held_sites(base: nn.Module, observation: Observation) -> tuple[str, ...]:
    """Paths of the modules that may keep state outside Transformers' cache."""
    named = base.named_modules() if observation.keeping is not None else ()
    return tuple(path for path, module in named if path and find_held(module, path, observation))


def _specs(module: nn.Module, path: str, observation: Observation, keeping: Keeping) -> list[StateSpec]:
    if path not in keeping.specs:
        keeping.specs[path] = [*_look(module, path, observation, keeping)]
    return keeping.specs[path]


def _look(module: nn.Module, path: str, observation: Observation, keeping: Keeping) -> Iterator[StateSpec]:
    call = keeping.calls.get(path)
    calls = observation.calls.get(path, [])
    hidden = [name for name, x in call.arguments.items() if _is_tokens(x)] if call else []
    if call is None or len(hidden) != 1 or len(calls) != 1:
        return
    for argument in (*_holders(call), *([""] if path in keeping.attributes else [])):
        for spec in _probe(module, call, hidden[0], argument, keeping.layers.get(path, 0)):
            if _nothing_else_read(spec, observation, path):
                yield spec


def _is_tokens(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() == 3 and x.shape[:2] == (REQUESTS, TOKENS)


def _is_positions(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.dtype.is_floating_point and x.shape == (REQUESTS, TOKENS)


def _holders(call: KeepingCall) -> Iterator[str]:
    """Arguments that something may be kept in: structures of rows of requests, and objects that are not Transformers'
    caches of keys and values."""
    for name, value in call.arguments.items():
        if isinstance(value, (list, tuple)):
            leaves = tree_leaves(value)
            rows = all(isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[0] == REQUESTS for x in leaves)
            if leaves and rows and not any(TOKENS in x.shape[1:] for x in leaves):
                yield name
        elif is_object(value) and type(value).__module__ != "transformers.cache_utils":
            yield name


def _probe(module: nn.Module, call: KeepingCall, hidden: str, holder: str, layers: int) -> list[StateSpec]:
    """Run the module as it was run, and look for what changed in the holder."""
    signature = inspect.signature(inspect.unwrap(type(module).forward))
    given = {n: v for n, v in call.arguments.items() if n in (hidden, holder) or _is_plain(v)}
    positions = next((name for name, x in call.arguments.items() if _is_positions(x)), "")
    required = [p.name for p in list(signature.parameters.values())[1:] if _is_required(p)]
    absent = tuple(name for name in required if name not in given and name != positions)
    flags = tuple((n, v) for n, v in given.items() if n not in (hidden, holder))
    given |= {positions: call.arguments[positions]} if positions else {}
    thing = copied_structure(call.arguments[holder]) if holder else None
    arguments = given | dict.fromkeys(absent) | ({holder: thing} if holder else {})
    with torch.no_grad(), torch.device("meta"), buffers_on_meta(module), as_it_was(module), answering(unattended):
        for (*inside, name), tensor in call.attributes.items():
            setattr(module.get_submodule(".".join(inside)), name, tensor)
        known = tensors_in(thing) if holder else dict(call.attributes)
        versions = {path: tensor._version for path, tensor in known.items()}
        try:
            output = type(module).forward(module, **arguments)
        except RUN_ERRORS:
            return []
        now = tensors_in(thing) if holder else attributes_in(module)
    outputs = _outputs(output, call.arguments[hidden].dtype)
    if outputs is None:
        return []
    spec = StateSpec(
        *(hidden, holder, absent, (), outputs, isinstance(output, tuple)), positions=positions, flags=flags
    )
    written = {p: x for p, x in now.items() if x is not known.get(p) or x._version != versions[p]}
    returned = _returned(output, known) if holder and not written else {}
    change = _Change(call, holder, thing, known, written or {p: x for p, (_, x) in returned.items()})
    ways = [change.axes(layers), ()] if written and change.axes(layers) else [()]
    places = tuple(place for place, _ in returned.values()) if returned else tuple(written)
    return [found for axes in ways if (found := change.told(spec, places, axes, returned=bool(returned))) is not None]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return named and parameter.default is inspect.Parameter.empty


def _outputs(output: Any, dtype: torch.dtype) -> tuple[tuple[int, ...] | None, ...] | None:
    """Shapes behind [requests, tokens] of what is made of the tokens, None for what else is returned."""
    shapes: list[tuple[int, ...] | None] = []
    for x in output if isinstance(output, tuple) else (output,):
        made = isinstance(x, torch.Tensor) and x.shape[:2] == (REQUESTS, TOKENS) and x.dtype == dtype
        shapes.append(tuple(x.shape[2:]) if made else None)
    return tuple(shapes) if any(shape is not None for shape in shapes) else None


def _returned(output: Any, known: Mapping[Path, torch.Tensor]) -> dict[Path, tuple[Path, torch.Tensor]]:
    """For each tensor of the holder the one that is returned in its place, and where; {} where none is."""
    if not known or not isinstance(output, tuple):
        return {}
    for number, part in enumerate(output):
        found = tensors_in(part)
        if found.keys() == known.keys() and all(found[p].shape == x.shape for p, x in known.items()):
            return {p: ((number, *p), found[p]) for p in known}
    return {}


class _Change:
    """What a call changed: `changed` has the tensors afterwards by their places in the holder."""

    def __init__(
        self,
        call: KeepingCall,
        holder: str,
        after: Any,
        known: Mapping[Path, torch.Tensor],
        changed: Mapping[Path, torch.Tensor],
    ) -> None:
        self.call, self.holder, self.after, self.known, self.changed = call, holder, after, known, changed

    def axes(self, layers: int) -> tuple[tuple[int, int] | None, ...]:
        """The axis over the layers of each state that was written into; () where none has one."""
        found = []
        for x in self.changed.values():
            axis = next((a for a in range(x.dim() - 1, 0, -1) if layers > 1 and x.shape[a] == layers), None)
            found.append(None if axis is None else (axis, layers))
        return tuple(found) if any(found) else ()

    def told(
        self, spec: StateSpec, places: tuple[Path, ...], axes: tuple[tuple[int, int] | None, ...], *, returned: bool
    ) -> StateSpec | None:
        """`spec` with the states; None where something that changed is none, or begins with unknown numbers."""
        states, axes = list[State](), axes or (None,) * len(self.changed)
        for number, (path, x) in enumerate(self.changed.items()):
            before, shape = self.known.get(path), [*x.shape]
            initial = 0.0 if before is None else self.call.fills.get(id(before))
            if x.dim() < 2 or x.shape[0] != REQUESTS or TOKENS in x.shape or initial is None:
                return None
            if (axis := axes[number]) is not None:
                del shape[axis[0]]
            states.append(State(KEPT, number, tuple(shape[1:]), x.dtype, initial))
        if not states:
            return None
        slots = {path: Slot(number) for number, path in enumerate(self.changed)}
        if self.holder:
            before, after = (
                self.call.arguments[self.holder],
                self.call.arguments[self.holder] if returned else self.after,
            )
            fresh, begun = _template(before, slots), _template(after, slots)
        else:
            fresh, begun = {path: slot for path, slot in slots.items() if path in self.known}, slots
        return replace(spec, states=tuple(states), holder=Holder(self.holder, fresh, begun, places, returned, axes))


def _template(thing: Any, slots: Mapping[Path, Slot]) -> Any:
    """A copy of a structure with Slots at their places and no other tensor."""
    return copy.deepcopy(thing, {id(x): slots.get(path) for path, x in tensors_in(thing).items()})


def _nothing_else_read(spec: StateSpec, observation: Observation, path: str) -> bool:
    """Whether the model does nothing with what the module returns beside what it makes of its tokens."""
    output = observation.outputs.get(path)
    parts = output if isinstance(output, tuple) else (output,)
    if len(parts) != len(spec.outputs):
        return False
    others = [x for x, shape in zip(parts, spec.outputs, strict=True) if shape is None]
    leaves = [x for x in tree_leaves(others) if isinstance(x, torch.Tensor)]
    return not leaves or all(observation.read.get(id(x), 0) <= observation.returned.get(path, -1) for x in leaves)


def advance_held(
    forward: Callable[..., Any],
    mixer: nn.Module,
    spec: StateSpec,
    hidden: torch.Tensor,
    states: Sequence[torch.Tensor],
    positions: torch.Tensor | None,
    *,
    fresh: bool,
) -> tuple[Any, list[torch.Tensor]]:
    """As statecache.advance, for a mixer that has a Holder."""
    holder = spec.holder
    assert holder is not None
    arguments: dict[str, Any] = dict.fromkeys(spec.absent) | dict(spec.flags) | {spec.hidden: hidden}
    if spec.positions:
        arguments[spec.positions] = positions
    given = [_for_all_layers(x, axis) for x, axis in zip(states, holder.axes, strict=True)]
    thing: Any = filled(holder.fresh if fresh else holder.begun, given)
    if holder.argument:
        output = forward(mixer, **arguments, **{holder.argument: thing})
        root: Any = output if holder.returned else thing
        after = [_at(root, place) for place in holder.places]
    else:
        with as_it_was(mixer):
            for (*inside, name), tensor in thing.items():
                setattr(mixer.get_submodule(".".join(inside)), name, tensor)
            output = forward(mixer, **arguments)
            after = [getattr(mixer.get_submodule(".".join(inside)), name) for *inside, name in holder.places]
    return output, [x if axis is None else x.select(axis[0], 0) for x, axis in zip(after, holder.axes, strict=True)]


def _for_all_layers(state: torch.Tensor, axis: tuple[int, int] | None) -> torch.Tensor:
    """One layer's state as all layers' at once: whichever a mixer takes, and writes into, is this one."""
    if axis is None:
        return state
    wide = state.unsqueeze(axis[0])
    return wide.expand(*[axis[1] if number == axis[0] else -1 for number in range(wide.dim())])


def _at(thing: Any, path: Path) -> Any:
    for step in path:
        thing = thing[step] if isinstance(thing, (list, tuple, dict)) else getattr(thing, step)
    return thing
