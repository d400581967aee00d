"""Modules that ask how many rows each expert has, and those that use it, work on the counts as a tensor instead.

    sizes = one_hot.sum(0).tolist()        ->      sizes = one_hot.sum(0)
    for expert, rows in enumerate(x.split(sizes)): ...

The list is all that is read of the routing; sorting rows by experts and putting them back are plain operations, in
mixtures of MLPs and of attention heads alike. While planning, both kinds of module run on meta and on numbers, the
stacks of linears by a forward that takes tensors; they are proven to do as before, and a fuser puts a layer in their
place.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tfbackend.graph.interface import GROUPED, RUN_ERRORS
from tfbackend.graph.kinds import tampered
from tfbackend.graph.observe import Observation
from tfbackend.graph.trial import copied, materialise, plain_float32, random_inputs
from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.source.edits import Edit, apply_edits
from tfbackend.source.forward import SourceError, forward_source, generate_class

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Grouped:
    """What was done: module path -> text of the forward that keeps counts in a tensor."""

    forwards: dict[str, str] = field(default_factory=dict)


@contextmanager
def counts_kept(base: nn.Module, seen: Observation, directory: Path) -> Iterator[Grouped]:
    """While entered, modules of `base` keep in tensors what they counted, and stacks of linears take such counts.

    Args:
        seen: a run of `base` that ended where values were read.
        directory: where the edited classes are written.
    """
    done, classes = Grouped(), dict[str, type[nn.Module]]()
    texts = _edited_classes(base, seen, directory)
    for path, module in base.named_modules():
        cls = type(module)
        if cls in texts:
            done.forwards[path], classes[path] = texts[cls], cls
        elif texts and (spec := read_grouped(module)) is not None:
            classes[path] = cls
            module.__class__ = type(cls.__name__, (cls,), {"forward": _forward, "__module__": __name__, GROUPED: spec})
    try:
        for path, text in done.forwards.items():
            base.get_submodule(path).__class__ = generate_class(classes[path], text, directory)
        yield done
    finally:
        for path, cls in classes.items():
            base.get_submodule(path).__class__ = cls


def _forward(self: Any, x: torch.Tensor, sizes: Any) -> torch.Tensor:
    """Of a stack of linears, while planning: its own with a list where there are values, a shape where there are
    none."""
    spec: GroupedLinearSpec = getattr(type(self), GROUPED)
    if x.is_meta:
        return x.new_empty(x.shape[0], spec.out_features)
    own: Any = super(type(self), self)
    output: torch.Tensor = own.forward(x, sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes)
    return output


def _edited_classes(base: nn.Module, seen: Observation, directory: Path) -> dict[type[nn.Module], str]:
    """Class -> forward without its `.tolist()`, for those of the modules that ran for which that is proven."""
    texts: dict[type[nn.Module], str] = {}
    for path, calls in seen.calls.items():
        module = base.get_submodule(path)
        cls = type(module)
        if cls in texts or tampered(module) or not (text := _without_lists(cls)):
            continue
        if _same_but_for_lists(module, calls[0], generate_class(cls, text, directory)):
            texts[cls] = text
    return texts


def _without_lists(cls: type[nn.Module]) -> str:
    """The forward with each `x.tolist()` for `x`; "" where it has none, or no source."""
    try:
        source = forward_source(cls)
    except SourceError:
        return ""
    lists = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and not node.args]
    reads = [(node, node.func.value) for node in lists if isinstance(node.func, ast.Attribute) and _is_list(node.func)]
    edits = [Edit(*source.offsets(node), source.segment(value), "counts") for node, value in reads]
    return apply_edits(source.text, edits) if edits else ""


def _is_list(function: ast.Attribute) -> bool:
    return function.attr == "tolist"


def _same_but_for_lists(module: nn.Module, call: Any, cls: type[nn.Module]) -> bool:
    """Whether on numbers the edited module gives what the original gives, tensors of counts for lists."""
    generator = torch.Generator().manual_seed(41)
    with torch.no_grad(), plain_float32():
        try:
            twin = materialise(module, generator)
            args, kwargs = random_inputs(call, twin, generator)
            before = twin(*copied(args), **copied(kwargs))
            twin.__class__ = cls
            after = twin(*copied(args), **copied(kwargs))
        except RUN_ERRORS:
            return False
    return _same(before, after)


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return isinstance(after, torch.Tensor) and torch.equal(before, after)
    if isinstance(before, list) and isinstance(after, torch.Tensor):
        return bool(before == after.tolist())
    if isinstance(before, (tuple, list)) and type(before) is type(after) and len(before) == len(after):
        return all(_same(a, b) for a, b in zip(before, after, strict=True))
    return type(before) is type(after) and bool(before == after)


_GROUPS = ((2, 0, 3, 1), (0, 0, 0, 6), (1, 4, 0, 0), (6, 0, 0, 0), (0, 1, 2, 3))
"""Rows of successive groups of four, in turn, in the tries of a stack."""
_NARROW = (6, 5)


def read_grouped(module: nn.Module) -> GroupedLinearSpec | None:
    """What a module of one stack of matrices computes when called with rows and a list of counts; None if not that.

    It is tried on small matrices, which a module that only splits and multiplies does not tell from large ones.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if next(module.children(), None) is not None or len(tensors) != 1 or tensors[0].dim() != 3 or tampered(module):
        return None
    (name, parameter), generator = next(module.named_parameters()), torch.Generator().manual_seed(42)
    groups, rows, columns = parameter.shape
    for transposed in (False, True):
        width, out = (rows, columns) if transposed else (columns, rows)
        spec = GroupedLinearSpec(groups, width, out, transposed)
        if all(_multiplies(module, name, spec, seed, generator) for seed in range(len(_GROUPS))):
            return spec
    return None


def _multiplies(module: nn.Module, name: str, spec: GroupedLinearSpec, seed: int, generator: torch.Generator) -> bool:
    small = GroupedLinearSpec(spec.groups, _NARROW[0], _NARROW[1], spec.transposed)
    sizes = [_GROUPS[(seed + group // 4) % len(_GROUPS)][group % 4] for group in range(spec.groups)]
    twin, reference = copy.copy(module), small.reference()
    weight = torch.randn(small.shape, generator=generator, dtype=torch.float64)
    twin._parameters = {name: nn.Parameter(weight, requires_grad=False)}
    x = torch.randn(sum(sizes), small.in_features, generator=generator, dtype=torch.float64)
    if not sizes or not len(x):
        return True
    reference.weight = weight
    with torch.no_grad():
        try:
            given = twin(x, sizes)
        except RUN_ERRORS:
            return False
        wanted = reference(x, torch.tensor(sizes))
    return isinstance(given, torch.Tensor) and given.shape == wanted.shape and torch.allclose(given, wanted)
