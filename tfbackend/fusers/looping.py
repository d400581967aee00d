"""What a module does with tokens and the experts of each, found by running it on numbers beside every reading of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import torch
from torch import nn

from tfbackend.activations import ACTIVATIONS
from tfbackend.expertspec import ExpertsSpec
from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.routed import RoutedCall
from tfbackend.graph.trial import apart
from tfbackend.loopedspec import ExpertsPart, LoopedExpertsSpec

_SMALL = 1 << 22
"""Modules of up to so many weights are run as they are."""
_NARROW = 16
"""Widths of larger ones are divided by what leaves at least this much of each."""
_TOLERANCE = 1e-5
_MOST_IDENTITIES = 4096


def read_experts(module: nn.Module, call: RoutedCall) -> LoopedExpertsSpec | str:
    """The spec of what `module`, on meta, computes when it is called like this; a text, why it has none."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    if next(module.buffers(), None) is not None or any(len(shape) not in (2, 3) for shape in shapes.values()):
        return f"its state {', '.join(shapes)} is not the matrices of its experts alone"
    problem = "its parameters are not the matrices of gated experts"
    for layout in _layouts(module, shapes, call.hidden.shape[-1]):
        twin = _Twin.of(module, layout, call)
        if isinstance(twin, str):
            problem = twin
            continue
        found = twin.read()
        if not isinstance(found, str):
            return found
        problem = found
    return problem


@dataclass(frozen=True)
class _Layout:
    """A reading of the shapes: how many experts there are, and how wide between their two products."""

    experts: int
    hidden: int
    inner: int
    stacked: dict[str, tuple[int, int]]

    def readings(self) -> Iterator[tuple[bool, tuple[ExpertsPart, ...]]]:
        """(gated, parts) of every way to give the parameters their roles."""
        roles: Sequence[tuple[bool, tuple[tuple[str, int | None, int], ...]]]
        first, second = ("w13_weight", self.inner), ("w2_weight", self.inner)
        if len(self.stacked) == 3:
            roles = [(True, ((first[0], 0, self.inner), (first[0], 1, self.inner), (second[0], None, self.inner)))]
        else:
            roles = [
                (True, ((first[0], None, 2 * self.inner), (second[0], None, self.inner))),
                (False, ((first[0], None, self.inner), (second[0], None, self.inner))),
            ]
        for (gated, wanted), names in product(roles, permutations(self.stacked)):
            ways = [self._ways(name, *role) for name, role in zip(names, wanted, strict=True)]
            yield from ((gated, parts) for parts in product(*ways))

    def _ways(self, name: str, target: str, shard: int | None, width: int) -> list[ExpertsPart]:
        served = (width, self.hidden) if target == "w13_weight" else (self.hidden, width)
        shape = self.stacked[name]
        return [
            ExpertsPart(name, target, shard, turned)
            for turned in (False, True)
            if shape[:: -1 if turned else 1] == served
        ]


def _layouts(module: nn.Module, shapes: dict[str, torch.Size], hidden: int) -> Iterator[_Layout]:
    """Layouts in which every parameter is one matrix an expert, [hidden, something] either way."""
    if len(shapes) not in (2, 3):
        return
    firsts = {shape[0] for shape in shapes.values() if len(shape) == 3}
    flat = [shape for shape in shapes.values() if len(shape) == 2]
    counts = {min(firsts)} if firsts else {n for n in _numbers(module) if all(s[0] % n == 0 for s in flat)}
    for experts in sorted(counts - {1}):
        stacked = {
            name: (shape[1], shape[2]) if len(shape) == 3 else (shape[0] // experts, shape[1])
            for name, shape in shapes.items()
        }
        if not all(hidden in shape for shape in stacked.values()):
            continue
        widths = {shape[1] if shape[0] == hidden else shape[0] for shape in stacked.values()}
        yield _Layout(experts, hidden, min(widths), stacked)


def _numbers(module: nn.Module) -> set[int]:
    """Whole numbers that the module or one inside it keeps."""
    values = (value for inner in module.modules() for value in vars(inner).values())
    return {value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0}


@dataclass(frozen=True)
class _Twin:
    """The module on the CPU with random weights, narrow where it is large, and all readings of it."""

    module: nn.Module
    layout: _Layout
    true: _Layout
    call: RoutedCall

    @staticmethod
    def of(module: nn.Module, layout: _Layout, call: RoutedCall) -> _Twin | str:
        """A twin, or why none can be made."""
        size = sum(parameter.numel() for parameter in module.parameters())
        by = 1 if size <= _SMALL else _divisor(layout)
        wide = {layout.hidden, layout.inner, 2 * layout.inner}
        if by > 1 and wide & {layout.experts, call.top_k}:
            return f"its {layout.experts} experts cannot be told from its width in a narrow copy of it"
        if size // by**2 > _SMALL * 16:
            return f"its experts of {layout.hidden} and {layout.inner} elements have no narrow copy to try"
        flat = {layout.experts * layout.inner, layout.experts * layout.hidden, 2 * layout.experts * layout.inner}
        narrow = {number: number // by for number in (wide | flat if by > 1 else ())}
        twin, generator = copy.deepcopy(module).double(), torch.Generator().manual_seed(8)
        for inner in twin.modules():
            for name, parameter in inner._parameters.items():
                if parameter is None:
                    continue
                shape = [
                    narrow.get(n, n) if axis or parameter.dim() == 2 else n for axis, n in enumerate(parameter.shape)
                ]
                data = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
                inner._parameters[name] = nn.Parameter(data, requires_grad=False)
            for name, value in list(vars(inner).items()):
                if type(value) is int and value in narrow:
                    setattr(inner, name, narrow[value])
        stacked = {name: (rows // by, columns // by) for name, (rows, columns) in layout.stacked.items()}
        small = _Layout(layout.experts, layout.hidden // by, layout.inner // by, stacked)
        return _Twin(twin.eval(), small, layout, call)

    def read(self) -> LoopedExpertsSpec | str:
        """The first reading that gives what the module gives, in true sizes."""
        args, kwargs = self._arguments(0)
        try:
            wanted = self._run(args, kwargs)
        except RUN_ERRORS as error:
            return f"it does not run on numbers: {type(error).__name__}: {error}"
        for spec in self._specs():
            if _agree(wanted, self._answer(spec, args, kwargs)):
                spec = replace(spec, identity=self._identities(spec))
                if problem := self._check(spec):
                    return problem
                return self._widened(spec)
        return "what it computes is none of the ways known here of routing tokens through gated experts"

    def _specs(self) -> Iterator[LoopedExpertsSpec]:
        sizes = ExpertsSpec(self.layout.experts, self.call.top_k, self.layout.hidden, self.layout.inner)
        for gated, parts in self.layout.readings():
            mixed = (False, True) if gated and len(parts) == 2 else (False,)
            for activation, interleaved in product(ACTIVATIONS, mixed):
                experts = replace(sizes, activation=activation, gated=gated, interleaved=interleaved)
                yield LoopedExpertsSpec(experts, self.call.places, parts)

    def _check(self, spec: LoopedExpertsSpec) -> str:
        """Whether the reading holds for every expert, and not only those that the first numbers went to."""
        total = spec.experts.num_experts + spec.identity
        for seed in range(1, 2 + math.ceil(total / self.call.ids.numel())):
            args, kwargs = self._arguments(seed, total)
            if not _agree(self._run(args, kwargs), self._answer(spec, args, kwargs)):
                return "it treats some of its experts differently from the others"
        return ""

    def _identities(self, spec: LoopedExpertsSpec) -> int:
        """How many ids that follow the experts' give a token back as it is."""
        for count in range(_MOST_IDENTITIES):
            args, kwargs = self._arguments(0, only=spec.experts.num_experts + count)
            hidden, _, weights = spec.given(args, kwargs)
            try:
                given = self._run(args, kwargs)
            except RUN_ERRORS:
                return count
            if not _agree(given, hidden * weights.sum(-1).view(*hidden.shape[:-1], 1)):
                return count
        return _MOST_IDENTITIES

    def _arguments(
        self, seed: int, total: int | None = None, only: int | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random tokens and weights. Ids of successive seeds go round all experts, or are one alone."""
        generator = torch.Generator().manual_seed(9 + seed)
        call, total = self.call, self.layout.experts if total is None else total
        shape = (*call.hidden.shape[:-1], self.layout.hidden)
        ids = (torch.arange(call.ids.numel()) + seed * call.ids.numel()) % total
        ids = ids[torch.randperm(len(ids), generator=generator)].view(call.ids.shape)
        given = {
            call.places[0]: torch.randn(shape, generator=generator, dtype=torch.float64),
            call.places[1]: ids if only is None else torch.full_like(ids, only),
            call.places[2]: torch.randn(ids.shape, generator=generator, dtype=torch.float64),
        }
        places = sorted(place for place in given if isinstance(place, int))
        return tuple(given[at] for at in places), {at: x for at, x in given.items() if isinstance(at, str)}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            return self.module(*(x.clone() for x in args), **{name: x.clone() for name, x in kwargs.items()})

    def _answer(self, spec: LoopedExpertsSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        made: Any = spec.reference()
        made.load(dict(self.module.named_parameters()))
        with torch.no_grad():
            output: torch.Tensor = made(*args, **kwargs)
        return output

    def _widened(self, spec: LoopedExpertsSpec) -> LoopedExpertsSpec:
        return replace(spec, experts=replace(spec.experts, hidden=self.true.hidden, intermediate=self.true.inner))


def _divisor(layout: _Layout) -> int:
    """The largest number that divides both widths and leaves enough of them; what is equal stays equal."""
    common = math.gcd(layout.hidden, layout.inner)
    least = min(layout.hidden, layout.inner) // _NARROW
    return max((n for n in range(1, least + 1) if common % n == 0), default=1)


def _agree(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and apart(b, a) <= _TOLERANCE
