"""Modules that number their tokens by themselves are given the positions instead.

    positions = torch.arange(x.shape[1], device=x.device) + seen
    query = query * scales(positions)           ->      positions = token_positions(self, torch.arange(...)) + seen

A model counts like this where its layers are not handed the positions. In one sequence without a cache both are the
same; in an engine's batch the count is wrong. The count is found in the dataflow of the attention call; that the module
does nothing with it but to take it for the positions of its tokens, one by one, is proven on numbers: tokens and
positions in another order give the same queries, keys and values in that order.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from tfbackend.graph.interface import ASKS_POSITIONS, POSITIONS, RUN_ERRORS, answering
from tfbackend.graph.kinds import kind_key, tampered
from tfbackend.graph.observe import TOKENS, Observation
from tfbackend.graph.query import name_of
from tfbackend.graph.tracing import trace
from tfbackend.graph.trial import copied, materialise, plain_float32, random_inputs
from tfbackend.source.edits import Edit, apply_edits
from tfbackend.source.forward import ForwardSource, SourceError, forward_source, generate_class

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Numbered:
    """What was done: module path -> text of the forward that asks for positions."""

    forwards: dict[str, str] = field(default_factory=dict)


@contextmanager
def positions_given(base: nn.Module, seen: Observation, directory: Path) -> Iterator[Numbered]:
    """While entered, modules of `base` that were seen counting tokens for their attention ask for positions.

    Those of which that cannot be proven stay as they are; a run will see them count.

    Args:
        seen: a run of `base` as it is.
        directory: where the edited classes are written.
    """
    done, classes, known = Numbered(), dict[str, type[nn.Module]](), dict[Any, str]()
    for path in dict.fromkeys(seen.counting):
        module = base.get_submodule(path)
        key = kind_key(module, seen.calls.get(path, []))
        if key not in known:
            known[key] = _edited(module, seen, path, directory)
        if known[key]:
            done.forwards[path], classes[path] = known[key], type(module)
    try:
        for path, text in done.forwards.items():
            base.get_submodule(path).__class__ = _asking(classes[path], text, directory)
        yield done
    finally:
        for path, cls in classes.items():
            base.get_submodule(path).__class__ = cls


def _asking(cls: type[nn.Module], text: str, directory: Path) -> type[nn.Module]:
    made = generate_class(cls, text, directory)
    setattr(made, ASKS_POSITIONS, True)
    return made


def _edited(module: nn.Module, seen: Observation, path: str, directory: Path) -> str:
    """The forward with its counts replaced, "" where that cannot be done or proven."""
    calls = seen.calls.get(path, [])
    if len(calls) != 1 or len(seen.attention[path]) != 1 or tampered(module) or hasattr(module, POSITIONS):
        return ""
    traced = trace(module, *calls[0])
    if not traced.complete:
        return ""
    counts = [node for node in _ancestors(traced.attention) if _counts(node)]
    try:
        source = forward_source(type(module))
        text = apply_edits(source.text, [_edit(source, node) for node in counts]) if counts else ""
    except SourceError:
        return ""
    return text if text and _proven(module, seen, path, _asking(type(module), text, directory)) else ""


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found, todo = set[fx.Node](), [*nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _counts(node: fx.Node) -> bool:
    """Whether this is 0, 1, 2 ... up to the number of tokens."""
    plain = node.args in ((TOKENS,), (0, TOKENS)) and set(node.kwargs) <= {"device", "dtype"}
    return name_of(node) == "arange" and plain


def _edit(source: ForwardSource, node: fx.Node) -> Edit:
    expression = source.expression(node.meta["span"])
    text = f"token_positions({source.me}, {source.segment(expression)})"
    return Edit(*source.offsets(expression), text, "positions")


def _proven(module: nn.Module, seen: Observation, path: str, cls: type[nn.Module]) -> bool:
    """Whether the module takes what it is given for the position of each token, and for nothing else."""
    generator = torch.Generator().manual_seed(31)
    order = torch.randperm(TOKENS, generator=generator)
    far = torch.randint(0, 1 << 20, (TOKENS,), generator=generator)
    with torch.no_grad(), plain_float32():
        try:
            twin = materialise(module, generator)
            inputs = random_inputs(seen.calls[path][0], twin, generator, observation=seen)
            original = _asked(twin, inputs)
            twin.__class__ = cls
            near = _asked(twin, inputs, torch.arange(TOKENS))
            straight = _asked(twin, inputs, far)
            shuffled = _asked(twin, tree_map(lambda x: _permuted(x, order), inputs), far[order])
        except RUN_ERRORS:
            return False
    return _alike(original, near) and _alike([x[:, :, order] for x in straight], shuffled)


def _asked(twin: nn.Module, inputs: Any, positions: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Query, key and value [1, heads, tokens, dim] of one run."""
    found: list[torch.Tensor] = []

    def attend(_: nn.Module, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> torch.Tensor:
        found.extend((q, k, v))
        return torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    if positions is not None:
        vars(twin)[POSITIONS] = positions
    args, kwargs = copied(inputs)
    with answering(attend):
        inspect.unwrap(type(twin).forward)(twin, *args, **kwargs)
    return found


def _permuted(x: Any, order: torch.Tensor) -> Any:
    axis = next((n for n, size in enumerate(x.shape) if size == TOKENS), None) if isinstance(x, torch.Tensor) else None
    return x if axis is None else x.index_select(axis, order)


def _alike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    if len(one) != 3 or [x.shape for x in one] != [x.shape for x in other]:
        return False
    return all((a - b).abs().max() <= _TOLERANCE * a.abs().max() for a, b in zip(one, other, strict=True))
