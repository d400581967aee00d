"""What a child with experts and the forward around it compute where all experts run on every token; see
dense_experts.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.expertspec import ExpertsSpec
from tfbackend.fusers.base import Site
from tfbackend.fusers.looping import read_experts
from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.observe import TOKENS
from tfbackend.graph.query import name_of, value_of
from tfbackend.graph.routed import RoutedCall
from tfbackend.graph.tracing import Trace, trace
from tfbackend.graph.trial import copied, materialise, plain_float32, random_inputs
from tfbackend.loopedspec import DenseExpertsSpec, ExpertsPart, LoopedExpertsSpec
from tfbackend.source.cut import cut
from tfbackend.source.forward import ForwardSource, SourceError, keep_defaults

_SUMS = frozenset({"sum", "einsum"})
_SEEDS = (51, 52, 53)
_TOLERANCE = 2e-5


class DenseError(Exception):
    """A block does not run all experts on every token, or in a way that is not known here. The message says which."""


class _AsRouted(nn.Module):
    """A child that takes a block of rows for each expert, called as routed experts are: other rows are 0."""

    def __init__(self, inner: nn.Module, experts: int, dims: int) -> None:
        super().__init__()
        self.inner, self.blocks, self.dims = inner, experts, dims

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(len(hidden))
        rows = hidden.new_zeros(self.blocks, *hidden.shape)
        rows[ids[:, 0], tokens] = hidden
        given = self.inner(rows if self.dims == 3 else rows.flatten(0, 1))
        output: torch.Tensor = given.reshape(rows.shape).sum(0) * weights
        return output


def read_dense(child: nn.Module, rows: torch.Tensor) -> LoopedExpertsSpec:
    """What the child does with the block of rows of each expert.

    Raises:
        DenseError: nothing that is known here, or it makes something of rows of zeros.
    """
    count = min(parameter.shape[0] for parameter in child.parameters())
    hidden = rows.new_empty(TOKENS, rows.shape[-1])
    ids = torch.empty((TOKENS, 1), dtype=torch.long, device="meta")
    call = RoutedCall(hidden, ids, hidden.new_empty(TOKENS, 1), (0, 1, 2))
    found = read_experts(_AsRouted(child, count, rows.dim()), call)
    if isinstance(found, str):
        raise DenseError(found)
    parts = tuple(replace(part, source=part.source.removeprefix("inner.")) for part in found.parts)
    return replace(found, parts=parts)


class _StandIn(nn.Module):
    """Experts of a kind no model has, each another function of a row; 0 gives 0."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(50)
        self.first, self.second = torch.randn(2, experts, width, generator=generator).unbind(0)

    def one(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows * first) + rows.roll(1, -1) * second

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.reshape(len(self.first), -1, rows.shape[-1])
        return self.one(blocks, self.first[:, None], self.second[:, None]).view(rows.shape)


class _Routed(nn.Module):
    """The layer that a block is to have, over the stand-in."""

    def __init__(self, spec: DenseExpertsSpec, inner: _StandIn) -> None:
        super().__init__()
        self.spec, self.inner = spec, inner

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.spec.compute(self.experts, x, weights)  # type: ignore[arg-type]

    def experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        given = self.inner.one(x[:, None], self.inner.first[ids], self.inner.second[ids])
        return (given * weights[..., None]).sum(1)


@dataclass(frozen=True)
class _Found:
    """Where a run had the tokens and their weights, and where what the experts gave was added up."""

    start: fx.Node
    end: fx.Node
    x: str
    weights: str
    top_k: int
    before: bool


def read_block(site: Site, child: str, experts: int) -> tuple[str, int, bool]:
    """(forward with the layer in place of the child, experts a token, whether weights multiply what they are given).

    Raises:
        DenseError: the forward does something else with its tokens and experts.
    """
    source = site.source
    assert isinstance(source, ForwardSource)
    width = site.observation.calls[site.path(child)][0][0][0].shape[-1]
    runs = []
    with torch.no_grad(), plain_float32():
        for seed in _SEEDS:
            generator = torch.Generator().manual_seed(seed)
            twin = _twin(site, child, _StandIn(experts, width), generator)
            args, kwargs = random_inputs(site.observation.calls[site.kind.first][0], twin, generator)
            traced = trace(twin, *copied((args, kwargs)), real=True, framed=_SUMS)
            runs.append((twin, args, kwargs, _find(traced, twin, child, experts)))
        found = runs[0][3]
        if len({(run[3].x, run[3].weights, run[3].top_k, run[3].before) for run in runs}) != 1:
            raise DenseError("how many experts a token has changes from token to token")
        try:
            start, end = source.expression(found.start.meta["span"]), source.expression(found.end.meta["span"])
            text = cut(source, start, end, f"{source.me}.routed({found.x}, {found.weights})", "dense_experts")
        except SourceError as error:
            raise DenseError(str(error)) from error
        for twin, args, kwargs, _ in runs:
            _prove(source, text, twin, child, found, args, kwargs)
    return text, found.top_k, found.before


def _twin(site: Site, child: str, stand_in: _StandIn, generator: torch.Generator) -> nn.Module:
    bare = copy.copy(site.module)
    bare._modules = {**site.module._modules, child: nn.Identity()}
    twin = materialise(bare, generator)
    twin._modules[child] = stand_in
    return twin


def _find(traced: Trace, twin: nn.Module, child: str, experts: int) -> _Found:
    calls = traced.calls(child)
    if not traced.complete or len(calls) != 1 or not isinstance(calls[0].args[0], fx.Node):
        raise DenseError(traced.ended or "it calls its experts several times")
    given = value_of(calls[0].args[0])
    rows, results = (x.reshape(experts, TOKENS, -1) for x in (given, value_of(calls[0])))
    start = next(n for n in _in_order(calls[0], traced) if _numel(n) == given.numel())
    for end in traced.graph.nodes:
        if name_of(end) not in _SUMS or _numel(end) * experts != given.numel():
            continue
        tensors: dict[str, torch.Tensor] = next(
            (f.tensors for f in end.meta["frames"] if f.code.co_name == "forward"), {}
        )
        for x, weights, spelled in _pairs(tensors, value_of(end).shape, experts):
            before = bool(_close(rows, tensors[x][None] * weights[..., None]))
            gives = results.sum(0) if before else (results * weights[..., None]).sum(0)
            if (before or _close(rows, tensors[x][None].expand_as(rows))) and _close(value_of(end), gives):
                return _Found(start, end, x, spelled, _chosen(weights), before)
    raise DenseError("what it does with the tokens and what its experts give is not to weigh and add them up")


def _in_order(node: fx.Node, traced: Trace) -> Iterator[fx.Node]:
    """What leads to the node, in the order in which it ran."""
    wanted, todo = set[fx.Node](), [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in wanted]
        wanted.update(new)
        todo += new
    yield from (n for n in traced.graph.nodes if n in wanted and n.op == "call_function")


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _pairs(
    tensors: dict[str, torch.Tensor], shape: torch.Size, experts: int
) -> Iterator[tuple[str, torch.Tensor, str]]:
    """(name of the tokens, weights [experts, tokens], how to spell them [tokens, experts]) that may be."""
    for x, tensor in tensors.items():
        for name, weights in tensors.items():
            if tensor.shape != shape or tensor.dim() != 2 or not weights.is_floating_point():
                continue
            if weights.shape == (TOKENS, experts):
                yield x, weights.T, name
            if weights.shape == (experts, TOKENS):
                yield x, weights, f"{name}.transpose(0, 1)"


def _chosen(weights: torch.Tensor) -> int:
    counts = (weights != 0).sum(0)
    if counts.min() != counts.max():
        raise DenseError("how many experts a token has changes from token to token")
    return int(counts[0])


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5)


_NOTHING = ExpertsSpec(1, 1, 1, 1)
_NO_PARTS: tuple[ExpertsPart, ...] = ()


def _prove(source: ForwardSource, text: str, twin: Any, child: str, found: _Found, args: Any, kwargs: Any) -> None:
    """Run the edited forward beside the original's.

    Raises:
        DenseError: they differ.
    """
    scope: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + text, f"<{source.place()} with routed experts>", "exec")
    exec(code, {**source.function.__globals__}, scope)
    edited, spec = copy.copy(twin), DenseExpertsSpec(_NOTHING, found.top_k, found.before, _NO_PARTS)
    edited._modules = {**twin._modules, "routed": _Routed(spec, twin._modules[child])}
    del edited._modules[child]
    before = source.function(twin, *copied(args), **copied(kwargs))
    try:
        after = keep_defaults(scope[source.name], source.function)(edited, *copied(args), **copied(kwargs))
    except RUN_ERRORS as error:
        raise DenseError(f"the edited forward does not run: {type(error).__name__}: {error}") from error
    left, right = tree_leaves(before), tree_leaves(after)
    if len(left) != len(right) or not all(tree_leaves(tree_map(_equal, left, right))):
        raise DenseError("the edited forward gives something else")


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b)
    near = isinstance(b, torch.Tensor) and a.shape == b.shape
    return near and bool((a - b).abs().max() <= _TOLERANCE * a.abs().max())
