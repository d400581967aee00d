"""The ledger of a load that has not happened: each tensor by name, shape and dtype through the same WeightMap.

The tensors are meta tensors of the shapes in the headers, so Transformers' conversions run for real, on nothing. One
thing cannot be known without values: whether a copy of a tied parameter equals the one it is tied to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tfbackend.inspection.headers import Headers, TensorHeader
from tfbackend.weights import Dropped, Gathered, Ledger, Placement, Shard, WeightMap
from tfbackend.weights.outcomes import describe

_WIDE = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Entry:
    """What would become of one tensor.

    Attributes:
        tensor: its header.
        outcome: "placed", "dropped", "unexpected", "misfit" or "duplicate".
        place: the parameter (and shard) that takes it, "" for none.
        note: the rule that drops it, or what does not fit.
    """

    tensor: TensorHeader
    outcome: str
    place: str = ""
    note: str = ""


@dataclass(frozen=True)
class Gap:
    """A parameter or shard that nothing would fill, and the name that would have."""

    place: str
    wanted: str


@dataclass(frozen=True)
class Accounts:
    """The whole ledger: one entry for each tensor, and the gaps."""

    entries: tuple[Entry, ...]
    gaps: tuple[Gap, ...]
    rules: Mapping[str, str]

    @property
    def counts(self) -> Counter[str]:
        """Tensors by outcome."""
        return Counter(entry.outcome for entry in self.entries)

    @property
    def complete(self) -> bool:
        return not self.gaps and not {"unexpected", "misfit", "duplicate"} & self.counts.keys()


class _Recorder(Ledger):
    """A ledger that keeps each tensor's fate by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.fates: dict[str, tuple[str, str, str]] = {}
        self.rules: dict[str, str] = {}
        self.filled: set[tuple[str, Shard]] = set()
        self.lacking: list[Gap] = []

    def place(self, placement: Placement) -> None:
        if self.claim(placement):
            self.filled.add((placement.target, placement.shard))
            for name in placement.origins:
                self.fates.setdefault(name, ("placed", str(placement), "transposed" if placement.transposed else ""))

    def drop(self, source_name: str, dropped: Dropped) -> None:
        super().drop(source_name, dropped)
        self.rules[dropped.rule] = dropped.why
        self.fates[source_name] = ("dropped", "", dropped.rule)

    def unexpected(self, source_name: str) -> None:
        super().unexpected(source_name)
        self.fates[source_name] = ("unexpected", "", "nothing takes it and no rule drops it")

    def misfit(self, source_name: str, place: str, *, found: str, needed: str) -> None:
        super().misfit(source_name, place, found=found, needed=needed)
        self.fates[source_name.partition(" and ")[0]] = ("misfit", place, f"found {found}, needed {needed}")

    def duplicate(self, source_name: str, first: str, place: str) -> None:
        super().duplicate(source_name, first, place)
        self.fates[source_name] = ("duplicate", place, f"{first} goes there too")

    def incomplete(self, place: str, wanted: Iterable[str]) -> None:
        names = tuple(wanted)
        super().incomplete(place, names)
        self.lacking.append(Gap(place, names[0] if names else ""))


def keep_accounts(weight_map: WeightMap, model: nn.Module, headers: Headers, *, quantized: bool) -> Accounts:
    """What would become of every tensor of `headers`.

    Args:
        weight_map: of the planned model.
        model: the full model on meta, for the names of its state.
        quantized: whether the checkpoint is.
    """
    book = _Recorder()
    if all(tensor.shape is not None for tensor in headers.tensors):
        _stream(weight_map, headers, book, quantized)
    else:
        _resolve_names(weight_map, headers, book)
    entries = tuple(Entry(tensor, *book.fates.get(tensor.name, ("placed", "", ""))) for tensor in headers.tensors)
    known = {gap.place for gap in book.lacking}
    gaps = [gap for gap in _gaps(weight_map, model, book.filled, quantized) if gap.place not in known]
    return Accounts(entries, (*book.lacking, *gaps), dict(book.rules))


def _stream(weight_map: WeightMap, headers: Headers, book: _Recorder, quantized: bool) -> None:
    by_name = {tensor.name: tensor for tensor in headers.tensors}
    for placement, tensor in weight_map.stream(_on_meta(headers.tensors), book):
        problem = _misfit(weight_map, placement, tensor, by_name[placement.source_name], quantized)
        if problem is not None:
            book.misfit(placement.source_name, str(placement), found=problem[0], needed=problem[1])
        elif (rival := _rival(book, placement)) is not None:
            book.duplicate(placement.source_name, rival, str(placement))
        else:
            book.place(placement)


def _on_meta(tensors: Sequence[TensorHeader]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in tensors:
        assert tensor.shape is not None
        yield tensor.name, torch.empty(tensor.shape, device="meta")


def _rival(book: _Recorder, placement: Placement) -> str | None:
    """The tensor that already has the place, by name; None where the place is free."""
    taken = [(placement.target, placement.shard), (placement.target, None)]
    if any(place in book.filled for place in taken):
        places = {describe(*place) for place in taken}
        return next((name for name, fate in book.fates.items() if fate[1] in places), "another tensor")
    return None


def _misfit(
    weight_map: WeightMap, placement: Placement, tensor: torch.Tensor, header: TensorHeader, quantized: bool
) -> tuple[str, str] | None:
    """(found, needed) where shape or kind of dtype is not that of the place."""
    expected = weight_map.expected(placement.canonical)
    if expected is None or (quantized and header.dtype not in _WIDE):
        return None  # only the quantization method knows its shape
    if tensor.shape != expected.shape:
        return str(tuple(tensor.shape)), str(tuple(expected.shape))
    if expected.dtype.is_floating_point and header.dtype not in _WIDE:
        return header.dtype, f"{expected.dtype} or another float dtype"
    return None


def _resolve_names(weight_map: WeightMap, headers: Headers, book: _Recorder) -> None:
    """The part that can be known of names alone."""
    for tensor in headers.tensors:
        outcome = weight_map.resolve(tensor.name)
        if isinstance(outcome, Placement) and outcome.alias_of is None:
            book.place(outcome)
        elif isinstance(outcome, Placement):
            book.fates[tensor.name] = ("placed", str(outcome), f"tied to {outcome.alias_of}")
        elif isinstance(outcome, Gathered):
            for placement in outcome.placements:
                book.filled.add((placement.target, placement.shard))
            book.fates[tensor.name] = ("placed", str(outcome.placements[0]), "through a conversion of Transformers")
        elif isinstance(outcome, Dropped):
            book.drop(tensor.name, outcome)
        else:
            book.unexpected(tensor.name)


def _gaps(weight_map: WeightMap, model: nn.Module, filled: set[tuple[str, Shard]], quantized: bool) -> list[Gap]:
    modules = {target.rpartition(".")[0] for target, _ in filled}
    gaps = []
    for canonical in model.state_dict():
        outcome = weight_map.resolve(canonical)
        if not isinstance(outcome, Placement) or outcome.alias_of is not None:
            continue
        if (outcome.target, outcome.shard) in filled or (outcome.target, None) in filled:
            continue
        if quantized and outcome.target.rpartition(".")[0] in modules:
            continue  # packed weights have names of their own
        gaps.append(Gap(str(outcome), canonical))
    return gaps
