"""How each parameter is shared out to tensor-parallel ranks, read off the LayerSpecs that tfbackend.layers builds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tfbackend.expertspec import ExpertsSpec
from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.inspection.mixers import of_mixer
from tfbackend.inspection.served import ServedParameter as ServedParameter
from tfbackend.layerspecs import (
    COLWISE,
    COLWISE_GATHER,
    ROWWISE,
    ROWWISE_PARTIAL,
    ROWWISE_SPLIT,
    AttentionSpec,
    EmbeddingSpec,
    LinearSpec,
    MergedLinearSpec,
    NormSpec,
    QKVSpec,
)
from tfbackend.loopedspec import DenseExpertsSpec, LoopedExpertsSpec
from tfbackend.meta import MetaModel
from tfbackend.mlaspec import MLASpec
from tfbackend.moespec import MoESpec
from tfbackend.nativespec import NATIVE_SPECS
from tfbackend.plan import Plan
from tfbackend.weights.mapping import BASE, HEAD, REST
from tfbackend.weights.names import join

VOCABULARY_PADDING = 64
"""vLLM rounds a vocabulary up to a multiple of this before it shares it out."""

_EXCHANGES = {ROWWISE: "all-reduce", ROWWISE_SPLIT: "all-reduce", COLWISE_GATHER: "all-gather"}

CANDIDATES = (1, 2, 4, 8, 16, 3, 6, 5, 7, 12, 32)
"""Numbers of ranks that a remedy may propose."""


@dataclass(frozen=True)
class Collective:
    """One exchange between ranks in each forward. `layer` is None outside the decoder layers."""

    kind: str
    after: str
    layer: int | None


def parameters(meta: MetaModel, plan: Plan, tp: int, dtype: torch.dtype, *, ep: bool = False) -> list[ServedParameter]:
    """Every parameter that the plan leads to, in the order of the model, the head last.

    Args:
        tp: tensor-parallel ranks.
        dtype: dtype of weights.
        ep: whether the ranks share out experts and not their insides.
    """
    found = [p for path, spec in _specs(plan) for p in _of_spec(join(BASE, path), spec, tp, dtype, ep)]
    found += _kept(meta, plan, dtype)
    order = {name: index for index, (name, _) in enumerate(meta.base.named_modules())}
    found.sort(key=lambda p: order.get(_owner(p.name, order), len(order)))
    found = [replace(p, layer=_layer(p.name, plan.layers)) for p in found]
    return found + _head(meta, plan, tp, dtype, found)


def _specs(plan: Plan) -> Iterator[tuple[str, Any]]:
    """(path relative to the base model, spec) of every layer that is built."""
    for rewrite in plan.rewrites:
        layers: list[tuple[str, Any]] = [("", rewrite.layer)] if rewrite.layer is not None else []
        for child, spec in [*layers, *rewrite.children]:
            path = join(rewrite.qualname, child)
            if isinstance(spec, (LoopedExpertsSpec, DenseExpertsSpec)):
                yield join(path, "routed"), spec.experts
            else:
                yield path, spec


def _owner(name: str, order: dict[str, int]) -> str:
    path = name.removeprefix(f"{BASE}.").rpartition(".")[0]
    while path and path not in order:
        path = path.rpartition(".")[0]
    return path


def _of_spec(path: str, spec: Any, tp: int, dtype: torch.dtype, ep: bool = False) -> list[ServedParameter]:
    if isinstance(spec, ExpertsSpec):
        return list(_experts(path, spec, tp, dtype, ep))
    if isinstance(spec, GroupedLinearSpec):
        return [ServedParameter(f"{path}.weight", spec.shape, spec.shape, dtype)]
    if isinstance(spec, MoESpec):
        return [*_router(path, spec, dtype), *_experts(path, spec.experts, tp, dtype, ep)]
    if isinstance(spec, LinearSpec):
        return _linear(path, spec, tp, dtype)
    if isinstance(spec, MergedLinearSpec):
        return _columns(path, spec.in_features, spec.out_features, spec.bias, tp, dtype)
    if isinstance(spec, QKVSpec):
        return _qkv(path, spec, tp, dtype)
    if isinstance(spec, MLASpec):
        return _columns(f"{path}.kv_b_proj", spec.sizes.latent, (spec.expanded_dim,), False, tp, dtype)
    if isinstance(spec, NATIVE_SPECS):
        return of_mixer(path, spec, tp, dtype)
    if isinstance(spec, EmbeddingSpec):
        return [_vocabulary(f"{path}.weight", spec.num_embeddings, spec.dim, tp, dtype)]
    if isinstance(spec, NormSpec):
        names = (["weight"] if spec.weight != "none" else []) + (["bias"] if spec.bias else [])
        return [ServedParameter(f"{path}.{n}", (spec.size,), (spec.size,), dtype) for n in names]
    return []


def _linear(path: str, spec: LinearSpec, tp: int, dtype: torch.dtype) -> list[ServedParameter]:
    rows, columns = spec.in_features, spec.out_features
    if spec.style in (COLWISE, COLWISE_GATHER):
        return _columns(path, rows, (columns,), spec.bias, tp, dtype)
    weight = ServedParameter(f"{path}.weight", (columns, rows), (columns, rows), dtype, linear=True)
    if spec.style in (ROWWISE, ROWWISE_PARTIAL, ROWWISE_SPLIT):
        problem = _uneven("input features", rows, tp)
        weight = replace(weight, rank_shape=(columns, _share(rows, tp)), how="rows", dim=1, problem=problem)
    bias = [ServedParameter(f"{path}.bias", (columns,), (columns,), dtype)] if spec.bias else []
    return [weight, *bias]


def _columns(
    path: str, rows: int, columns: Sequence[int], bias: bool, tp: int, dtype: torch.dtype
) -> list[ServedParameter]:
    problem = next((text for width in columns if (text := _uneven("output features", width, tp))), "")
    whole, own = sum(columns), sum(_share(width, tp) for width in columns)
    weight = ServedParameter(
        f"{path}.weight", (whole, rows), (own, rows), dtype, "columns", 0, linear=True, problem=problem
    )
    return [weight, replace(weight, name=f"{path}.bias", shape=(whole,), rank_shape=(own,), linear=False)][: 1 + bias]


def _qkv(path: str, spec: QKVSpec, tp: int, dtype: torch.dtype) -> list[ServedParameter]:
    heads, kv = _share(spec.num_heads, tp), kv_heads_per_rank(spec.num_kv_heads, tp)
    whole, own = sum(spec.sizes), heads * spec.head_dim + kv * (spec.head_dim + spec.v_head_dim)
    problem = _uneven("query heads", spec.num_heads, tp)
    smaller, larger = sorted((spec.num_kv_heads, tp))
    if not problem and larger % smaller:
        problem = f"{spec.num_kv_heads} KV heads neither divide over {tp} ranks nor {tp} ranks over them"
    weight = ServedParameter(
        f"{path}.weight",
        (whole, spec.in_features),
        (own, spec.in_features),
        dtype,
        "heads",
        0,
        max(1, tp // spec.num_kv_heads),
        linear=True,
        problem=problem,
    )
    return [weight, replace(weight, name=f"{path}.bias", shape=(whole,), rank_shape=(own,), linear=False)][
        : 1 + spec.bias
    ]


def _router(path: str, spec: MoESpec, dtype: torch.dtype) -> Iterator[ServedParameter]:
    experts, hidden = spec.experts.num_experts, spec.experts.hidden
    yield ServedParameter(f"{path}.runner.gate.weight", (experts, hidden), (experts, hidden), dtype)
    if spec.router.bias:
        yield ServedParameter(f"{path}.runner.gate.bias", (experts,), (experts,), dtype)
    if spec.router.correction:
        yield ServedParameter(f"{path}.correction", (experts,), (experts,), torch.float32)


def _experts(path: str, spec: ExpertsSpec, tp: int, dtype: torch.dtype, ep: bool) -> Iterator[ServedParameter]:
    """Stacked [experts, out, in], or [experts, in, out] where the checkpoint has them so."""
    for name, shape in spec.shapes.items():
        into, bias = name.startswith("w13"), name.endswith("bias")
        dim = 0 if ep else 1 if bias or into != spec.transposed else 2
        shared = spec.kernel and (ep or into or not bias)
        part = tuple(_share(n, tp) if shared and axis == dim else n for axis, n in enumerate(shape))
        whole = ServedParameter(f"{path}.runner.routed_experts.{name}", shape, part, dtype, linear=not bias)
        if bias or not spec.kernel:
            yield whole
        else:
            problem = "" if ep else _uneven("elements between an expert's products", spec.intermediate, tp)
            yield replace(whole, how="experts" if ep else "columns" if into else "rows", dim=dim, problem=problem)


def _vocabulary(name: str, rows: int, width: int, tp: int, dtype: torch.dtype) -> ServedParameter:
    padded = math.ceil(rows / VOCABULARY_PADDING) * VOCABULARY_PADDING
    problem = f"a vocabulary of {padded:,} (padded) rows does not divide over {tp} ranks" if padded % tp else ""
    return ServedParameter(name, (rows, width), (_share(padded, tp), width), dtype, "vocabulary", 0, problem=problem)


def kv_heads_per_rank(heads: int, tp: int) -> int:
    """KV heads that each rank keeps: an equal share, or one where there are more ranks than heads."""
    return max(1, heads // tp)


def _share(size: int, tp: int) -> int:
    return math.ceil(size / tp)


def _uneven(what: str, size: int, tp: int) -> str:
    return f"{size:,} {what} do not divide over {tp} ranks" if size % tp else ""


def _kept(meta: MetaModel, plan: Plan, dtype: torch.dtype) -> list[ServedParameter]:
    """Parameters that no rewrite took: whole on every rank, as Transformers made them."""
    gone = tuple(f"{path}." for path in _replaced(plan))
    wide = tuple(getattr(meta.base, "_keep_in_fp32_modules_strict", None) or ())
    wide += tuple(getattr(meta.base, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else ()
    kept = []
    for name, parameter in meta.base.named_parameters():
        if not f"{name}.".startswith(gone):
            own = torch.float32 if any(part in name for part in wide) else parameter.dtype
            shape = tuple(parameter.shape)
            kept.append(ServedParameter(join(BASE, name), shape, shape, own))
    return kept


def _replaced(plan: Plan) -> Iterator[str]:
    built = {path for path, spec in _specs(plan) if _of_spec("", spec, 1, torch.float32)}
    yield from built
    for rewrite in plan.rewrites:
        yield from (join(rewrite.qualname, child) for child in rewrite.removes)


def _head(
    meta: MetaModel, plan: Plan, tp: int, dtype: torch.dtype, inside: Sequence[ServedParameter]
) -> list[ServedParameter]:
    """The linear that gives logits, and whatever else the full model has outside its base model."""
    made = []
    prefixes = tuple(f"{path}." for path in (meta.base_path, meta.head_path) if path)
    for name, parameter in meta.model.named_parameters(remove_duplicate=False):
        if meta.base_path and not name.startswith(prefixes):
            shape = tuple(parameter.shape)
            made.append(ServedParameter(join(REST, name), shape, shape, parameter.dtype))
    if meta.head_path is None:
        return made
    linear = meta.model.get_submodule(meta.head_path)
    assert isinstance(linear, nn.Linear)
    weight = _vocabulary(f"{HEAD}.weight", linear.out_features, linear.in_features, tp, dtype)
    table = next((p.name for p in inside if plan.tied and p.how == "vocabulary"), "")
    made.append(replace(weight, tied_to=table))
    if linear.bias is not None:
        bias = (linear.out_features,), (weight.rank_shape[0],)
        made.append(ServedParameter(f"{HEAD}.bias", *bias, dtype, "vocabulary", 0))
    return made


def _layer(name: str, layers: str) -> int | None:
    stem = f"{join(BASE, layers)}."
    if not layers or not name.startswith(stem):
        return None
    number = name.removeprefix(stem).partition(".")[0]
    return int(number) if number.isdigit() else None


def collectives(plan: Plan) -> list[Collective]:
    """The exchanges of one forward on more than one rank, in order of the plan."""
    found = []
    for path, spec in _specs(plan):
        kind = ""
        if isinstance(spec, LinearSpec):
            kind = _EXCHANGES.get(spec.style, "")
        elif isinstance(spec, AttentionSpec):
            kind = "all-gather" if spec.gathered else ""
        elif isinstance(spec, (EmbeddingSpec, MoESpec, *NATIVE_SPECS)) or (
            isinstance(spec, ExpertsSpec) and spec.kernel
        ):
            kind = "all-reduce"
        if kind:
            name = join(BASE, path)
            found.append(Collective(kind, name, _layer(f"{name}.", plan.layers)))
    if plan.head_path is not None:
        found.append(Collective("gather", HEAD, None))
    return found


def ranks_that_divide(meta: MetaModel, plan: Plan, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of ranks over which every parameter divides, of those that are usual."""
    specs = {repr(spec): spec for _, spec in _specs(plan)}.values()
    good = []
    for tp in CANDIDATES:
        shared = [p for spec in specs for p in _of_spec("", spec, tp, dtype)] + _head(meta, plan, tp, dtype, ())
        if not any(p.problem for p in shared):
            good.append(tp)
    return tuple(sorted(good))
