"""How the parameters of the engine's own layers for mixers with state are shared out to ranks; see layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tfbackend.deltaspec import DeltaSpec
from tfbackend.inspection.served import ServedParameter
from tfbackend.nativespec import NativeSpec
from tfbackend.shortconvspec import ShortConvSpec
from tfbackend.ssdspec import SSDSpec


def of_mixer(path: str, spec: NativeSpec, tp: int, dtype: torch.dtype) -> list[ServedParameter]:
    """Every parameter of the layer at `path`."""
    if isinstance(spec, ShortConvSpec):
        dim, bias = spec.dim, spec.bias
        problem = "" if dim % tp == 0 else f"{dim:,} channels do not divide over {tp} ranks"
        parts = [*_columns(f"{path}.in_proj", [3 * dim], [3 * dim // tp], (dim,), bias, dtype)]
        parts += _columns(f"{path}.conv", [dim], [dim // tp], (1, spec.kernel), bias, dtype, linear=False)
        return _with(problem, [*parts, *_rows(f"{path}.out_proj", dim, dim, tp, bias, dtype)])
    return _of_delta(path, spec, tp, dtype) if isinstance(spec, DeltaSpec) else _of_ssd(path, spec, tp, dtype)


def _of_ssd(path: str, spec: SSDSpec, tp: int, dtype: torch.dtype) -> list[ServedParameter]:
    heads, inner = spec.heads // tp, spec.inner // tp
    shared = max(spec.groups // tp, 1) * spec.state_size
    own = [inner, inner, shared, shared, heads]
    parts = [*_columns(f"{path}.in_proj", spec.widths, own, (spec.hidden_size,), spec.in_bias, dtype)]
    conv = (1, spec.kernel)
    parts += _columns(f"{path}.conv1d", spec.widths[1:4], own[1:4], conv, spec.conv_bias, dtype, linear=False)
    parts += _vectors(path, {"A": torch.float32, "D": dtype, "dt_bias": dtype}, spec.heads, tp)
    if spec.norm_groups:
        parts.append(ServedParameter(f"{path}.norm.weight", (spec.inner,), (inner,), dtype, "heads", 0))
    parts += _rows(f"{path}.out_proj", spec.inner, spec.hidden_size, tp, spec.out_bias, dtype)
    return _with(_uneven(spec.heads, spec.groups, tp), parts)


def _of_delta(path: str, spec: DeltaSpec, tp: int, dtype: torch.dtype) -> list[ServedParameter]:
    hidden, channels = (spec.hidden_size,), [spec.conv_dim]
    parts = list[ServedParameter]()
    for name, width in (("in_proj_qkvz", sum(spec.widths)), ("in_proj_ba", 2 * spec.heads)):
        parts += _columns(f"{path}.{name}", [width], [width // tp], hidden, False, dtype)
    parts += _columns(f"{path}.conv1d", channels, [channels[0] // tp], (1, spec.kernel), False, dtype, linear=False)
    parts += _vectors(path, {"A_log": torch.float32, "dt_bias": dtype}, spec.heads, tp)
    parts.append(ServedParameter(f"{path}.norm.weight", (spec.value_dim,), (spec.value_dim,), dtype))
    parts += _rows(f"{path}.out_proj", spec.inner, spec.hidden_size, tp, False, dtype)
    return _with(_uneven(spec.heads, spec.key_heads, tp, one_is_shared=False), parts)


def _vectors(path: str, dtypes: dict[str, torch.dtype], heads: int, tp: int) -> Iterator[ServedParameter]:
    for name, dtype in dtypes.items():
        yield ServedParameter(f"{path}.{name}", (heads,), (heads // tp,), dtype, "heads", 0)


def _uneven(heads: int, groups: int, tp: int, *, one_is_shared: bool = True) -> str:
    if heads % tp:
        return f"{heads:,} heads do not divide over {tp} ranks"
    uneven = groups % tp and not (one_is_shared and groups == 1)
    return f"{groups:,} groups of heads do not divide over {tp} ranks" if uneven else ""


def _with(problem: str, parts: list[ServedParameter]) -> list[ServedParameter]:
    return [replace(parts[0], problem=problem), *parts[1:]]


def _columns(
    path: str,
    whole: Sequence[int],
    own: Sequence[int],
    inner: tuple[int, ...],
    bias: bool,
    dtype: torch.dtype,
    *,
    linear: bool = True,
) -> Iterator[ServedParameter]:
    yield ServedParameter(
        f"{path}.weight", (sum(whole), *inner), (sum(own), *inner), dtype, "columns", 0, linear=linear
    )
    if bias:
        yield ServedParameter(f"{path}.bias", (sum(whole),), (sum(own),), dtype, "columns", 0)


def _rows(path: str, rows: int, columns: int, tp: int, bias: bool, dtype: torch.dtype) -> Iterator[ServedParameter]:
    yield ServedParameter(f"{path}.weight", (columns, rows), (columns, rows // tp), dtype, "rows", 1, linear=True)
    if bias:
        yield ServedParameter(f"{path}.bias", (columns,), (columns,), dtype)
