"""Whether the layers of a plan divide over the tensor-parallel ranks; vLLM's layers only assert that they do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from tfbackend.errors import UnsupportedModelError
from tfbackend.expertspec import ExpertsSpec
from tfbackend.fusers.base import Miss, Rewrite
from tfbackend.graph.query import is_within
from tfbackend.layerspecs import (
    COLWISE,
    COLWISE_GATHER,
    ROWWISE,
    ROWWISE_PARTIAL,
    ROWWISE_SPLIT,
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    QKVSpec,
)
from tfbackend.loopedspec import DenseExpertsSpec, LoopedExpertsSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.moespec import MoESpec


def gather_heads(rewrites: Iterable[Rewrite], written_out: Collection[str]) -> Iterator[Rewrite]:
    """The rewrites with each attention layer gathered whose heads do not come from projections that ranks share out.

    The code around it then sees the heads of all ranks, as it was written to; linears in it that are shared out put
    together what they give, and take what they need of what they are given.

    Args:
        written_out: paths of attention that the model wrote out, whose code counts the heads of all ranks.
    """
    rewrites = tuple(rewrites)
    whole = _with_whole_heads(rewrites, written_out)
    for rewrite in rewrites:
        inside = any(is_within(rewrite.qualname, path) for path in whole)
        yield _gathered(rewrite) if inside else rewrite


def merged_for_ranks(rewrites: Iterable[Rewrite], written_out: Collection[str]) -> list[Miss]:
    """Misses for projections that were merged where attention needs the heads of all ranks: a merged one gives each
    rank its part of each."""
    rewrites = tuple(rewrites)
    whole = _with_whole_heads(rewrites, written_out)
    merged = [r for r in rewrites if any(isinstance(spec, (QKVSpec, MergedLinearSpec)) for _, spec in r.children)]
    reason = "attention here needs the heads of all ranks"
    return [Miss(r.fuser, r.qualname, reason) for r in merged if r.qualname in whole]


def _with_whole_heads(rewrites: Iterable[Rewrite], written_out: Collection[str]) -> set[str]:
    """Paths of attention whose heads do not come from projections that ranks share out."""
    attention, sharded = set[str](), set[str]()
    for rewrite in rewrites:
        kinds = {type(spec) for _, spec in rewrite.children}
        attention |= {rewrite.qualname} if AttentionSpec in kinds else set()
        sharded |= {rewrite.qualname} if kinds & {QKVSpec, MLASpec} else set()
    return {path for path in attention if path in written_out or path not in sharded}


_GATHERED = {COLWISE: COLWISE_GATHER, ROWWISE: ROWWISE_SPLIT}


def _gathered(rewrite: Rewrite) -> Rewrite:
    def change(spec: Any) -> Any:
        if isinstance(spec, AttentionSpec):
            return replace(spec, gathered=True)
        if isinstance(spec, LinearSpec):
            return replace(spec, style=_GATHERED.get(spec.style, spec.style))
        return spec

    children = tuple((name, change(spec)) for name, spec in rewrite.children)
    return replace(rewrite, layer=change(rewrite.layer), children=children)


def uneven(rewrites: Iterable[Rewrite], tp_size: int, *, ep: bool = False) -> Iterator[UnsupportedModelError]:
    """What does not divide over the ranks, with the first place of each; with `ep` experts are shared out whole."""
    told = set[str]()
    for rewrite in rewrites:
        layers = [(rewrite.qualname, rewrite.layer)]
        layers += [(f"{rewrite.qualname}.{child}", spec) for child, spec in rewrite.children]
        for path, spec in layers:
            for what, count in _shared(spec):
                whole = ep and what == _EXPERT_WIDTH
                if not whole and not _divides(what, count, tp_size) and f"{count} {what}" not in told:
                    told.add(f"{count} {what}")
                    yield UnsupportedModelError(
                        f"The {what} do not divide over the tensor-parallel ranks.",
                        where=path,
                        found=f"{count} {what}, {tp_size} ranks",
                        remedy="Choose a --tensor-parallel-size that divides them",
                    )


def _shared(spec: LayerSpec | None) -> Iterator[tuple[str, int]]:
    """(what, how many) of everything that the ranks share out."""
    if isinstance(spec, (MoESpec, LoopedExpertsSpec, DenseExpertsSpec)):
        yield from _shared(spec.experts)
    elif isinstance(spec, AttentionSpec):
        yield from (("query heads", spec.num_heads), (_KV_HEADS, spec.num_kv_heads))
    elif isinstance(spec, MLASpec):
        yield "query heads", spec.num_heads
    elif isinstance(spec, ExpertsSpec) and spec.kernel:
        yield _EXPERT_WIDTH, spec.intermediate
    elif isinstance(spec, MergedLinearSpec) and spec.style == COLWISE:
        yield from (("output features", width) for width in spec.out_features)
    elif isinstance(spec, LinearSpec) and spec.style in (COLWISE, COLWISE_GATHER):
        yield "output features", spec.out_features
    elif isinstance(spec, LinearSpec) and spec.style in (ROWWISE, ROWWISE_PARTIAL, ROWWISE_SPLIT):
        yield "input features", spec.in_features


_KV_HEADS = "KV heads"
_EXPERT_WIDTH = "elements between an expert's two products"


def _divides(what: str, count: int, tp_size: int) -> bool:
    # KV heads are repeated where there are more ranks than heads.
    return count % tp_size == 0 or (what == _KV_HEADS and tp_size % count == 0)
