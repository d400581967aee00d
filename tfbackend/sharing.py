"""Whether the layers of a plan divide over the tensor-parallel ranks; vLLM's layers only assert that they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tfbackend.errors import UnsupportedModelError
from tfbackend.expertspec import ExpertsSpec
from tfbackend.fusers.base import Rewrite
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
)
from tfbackend.loopedspec import DenseExpertsSpec, LoopedExpertsSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.moespec import MoESpec


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
