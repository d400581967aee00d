"""The accounts of one load: what became of each tensor, and of each parameter and each shard of it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfbackend.errors import MissingTensorError, ShapeMismatchError, TfbackendError, UnexpectedTensorError
from tfbackend.weights.outcomes import Dropped, Placement, Shard, describe

_SHOWN = 10


@dataclass(frozen=True)
class Misfit:
    """A tensor that has a place, but not its shape or dtype."""

    source_name: str
    place: str
    found: str
    needed: str


@dataclass(frozen=True)
class Duplicate:
    """A second tensor for a place that is filled."""

    source_name: str
    first: str
    place: str


@dataclass(frozen=True)
class Gap:
    """A place that nothing filled, and the checkpoint names that would have."""

    place: str
    wanted: tuple[str, ...]


class Ledger:
    """Written to while the tensors come in, checked when the last one is through.

    Args:
        names: (target, shard) -> the checkpoint name that fills it, for messages.
    """

    def __init__(self, names: Mapping[tuple[str, Shard], str] | None = None) -> None:
        self._names = dict(names or {})
        self._placed: dict[str, dict[Shard, Placement]] = {}
        self._dropped: dict[str, list[str]] = {}
        self._rules: dict[str, str] = {}
        self._unexpected: list[str] = []
        self._misfits: list[Misfit] = []
        self._duplicates: list[Duplicate] = []
        self._incomplete: list[Gap] = []
        self._sources: set[str] = set()

    def claim(self, placement: Placement) -> bool:
        """Book a tensor to its place. False where the place is filled already: both sources are kept for the error."""
        filled = self._placed.setdefault(placement.target, {})
        shard = placement.shard
        rival = next((held for key, held in filled.items() if key == shard or key is None or shard is None), None)
        if rival is not None:
            self._duplicates.append(Duplicate(placement.source_name, rival.source_name, str(placement)))
            return False
        filled[shard] = placement
        self._sources.update(placement.origins)
        return True

    def drop(self, source_name: str, dropped: Dropped) -> None:
        """A rule left the tensor out."""
        self._dropped.setdefault(dropped.rule, []).append(source_name)
        self._rules[dropped.rule] = dropped.why

    def unexpected(self, source_name: str) -> None:
        """Nothing takes the tensor."""
        self._unexpected.append(source_name)

    def misfit(self, source_name: str, place: str, *, found: str, needed: str) -> None:
        """The tensor does not fit its place."""
        self._misfits.append(Misfit(source_name, place, found, needed))

    def duplicate(self, source_name: str, first: str, place: str) -> None:
        """Two tensors are one and the same input of a conversion."""
        self._duplicates.append(Duplicate(source_name, first, place))

    def incomplete(self, place: str, wanted: Iterable[str]) -> None:
        """A conversion lacks inputs at the end of the checkpoint."""
        self._incomplete.append(Gap(place, tuple(wanted)))

    def check(self, expected: Mapping[str, Sequence[Shard]]) -> None:
        """Everything came, once, and fitted.

        Args:
            expected: parameter -> the shards that fill it; () or (None,) for one that is filled as a whole. A whole
                tensor fills all shards.

        Raises:
            ShapeMismatchError: a tensor does not fit its place.
            MissingTensorError: a parameter or shard is not filled.
            UnexpectedTensorError: a tensor has no place, or two have the same.
        """
        self._raise([*self._incomplete, *self._gaps(expected)])

    def raise_problems(self) -> None:
        """The part of `check` that needs no list of parameters; raises the same."""
        self._raise(self._incomplete)

    def _gaps(self, expected: Mapping[str, Sequence[Shard]]) -> list[Gap]:
        known = {gap.place for gap in self._incomplete}
        gaps = []
        for target, shards in expected.items():
            filled = self._placed.get(target, {})
            for shard in shards or (None,):
                if shard in filled or None in filled or describe(target, shard) in known:
                    continue
                name = self._names.get((target, shard)) or self._names.get((target, None))
                gaps.append(Gap(describe(target, shard), (name,) if name else ()))
        return gaps

    def _raise(self, gaps: Sequence[Gap]) -> None:
        if self._misfits:
            raise self._misfit_error()
        if gaps:
            raise self._missing_error(gaps)
        if self._unexpected or self._duplicates:
            raise self._unexpected_error()

    def _misfit_error(self) -> TfbackendError:
        first = self._misfits[0]
        return ShapeMismatchError(
            _listed(
                f"{_count(self._misfits, 'tensor')} of the checkpoint not fitting the model",
                [f"{m.source_name} for {m.place}: found {m.found}, needed {m.needed}" for m in self._misfits],
            ),
            where=f"{first.source_name} for {first.place}",
            found=first.found,
            needed=first.needed,
            remedy="Check that config.json belongs to these weights (hidden_size, head counts, vocab_size, "
            "quantization_config), or download the checkpoint again",
        )

    def _missing_error(self, gaps: Sequence[Gap]) -> TfbackendError:
        loose, all_names = self._unexpected, sorted({*self._sources, *self._unexpected})
        lines = []
        for gap in gaps[:_SHOWN]:
            near = nearest(gap.wanted[0], loose) or nearest(gap.wanted[0], all_names) if gap.wanted else ()
            absent = f"the checkpoint lacks {_shortened(gap.wanted)}" if gap.wanted else "no tensor has this place"
            lines.append(f"{gap.place}: {absent}" + (f"; nearest: {', '.join(near)}" if near else ""))
        found = f"{len(self._sources)} other tensors with a place"
        if loose:
            found += f", and {_count(loose, 'tensor')} without one: {_shortened(loose)}"
        return MissingTensorError(
            _listed(f"{_count(gaps, 'parameter or shard', 'parameters or shards')} not filled", lines, len(gaps)),
            where=gaps[0].place,
            found=found,
            needed=_shortened(gaps[0].wanted) or None,
            remedy="Check that every shard file of the checkpoint is there and was downloaded completely"
            + (", and that the tensors without a place are not the missing ones under another name" if loose else ""),
        )

    def _unexpected_error(self) -> TfbackendError:
        known = sorted(set(self._names.values()))
        lines = [f"{d.source_name} and {d.first} both go to {d.place}" for d in self._duplicates]
        for name in self._unexpected[: max(_SHOWN - len(lines), 0)]:
            near = nearest(name, known)
            lines.append(f"{name} has no place" + (f"; nearest names of the model: {', '.join(near)}" if near else ""))
        total = len(self._duplicates) + len(self._unexpected)
        return UnexpectedTensorError(
            _listed(f"{total} tensor{'s' * (total != 1)} of the checkpoint too many", lines, total),
            where=self._duplicates[0].place if self._duplicates else self._unexpected[0],
            remedy="Remove the tensors from the checkpoint if they belong to something else (an adapter, an optimizer, "
            "more layers than config.json has), or correct config.json",
        )

    def summary(self) -> str:
        """Where the weights went, as a few lines of plain text."""
        stacked = {target: filled for target, filled in self._placed.items() if None not in filled and filled}
        filled = sum(1 for places in self._placed.values() if places)
        lines = [f"{_count(self._sources, 'tensor')} filled {_count(range(filled), 'parameter')}"]
        if stacked:
            shards = sum(len(places) for places in stacked.values())
            lines.append(f"  {len(stacked)} of them stacked, from {shards} shards")
        joined = sum(len(p.origins) for places in self._placed.values() for p in places.values() if p.sources)
        if joined:
            lines.append(f"  {joined} tensors went through a conversion of Transformers")
        for rule, names in sorted(self._dropped.items()):
            lines.append(f"{_count(names, 'tensor')} dropped, {rule}: {_shortened(names)}")
            lines.append(f"  {self._rules[rule]}.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The whole ledger as plain values that json can write."""
        return {
            "placed": {
                target: [
                    {"shard": shard, "tensors": list(p.origins)} | ({"transposed": True} if p.transposed else {})
                    for shard, p in places.items()
                ]
                for target, places in self._placed.items()
                if places
            },
            "dropped": {
                rule: {"why": self._rules[rule], "tensors": list(names)} for rule, names in self._dropped.items()
            },
            "unexpected": list(self._unexpected),
        }


def nearest(name: str, known: Collection[str]) -> tuple[str, ...]:
    """Up to three of the known names that look most like `name`."""
    return tuple(difflib.get_close_matches(name, known, n=3, cutoff=0.6))


def _listed(head: str, lines: Sequence[str], total: int | None = None) -> str:
    total = len(lines) if total is None else total
    shown = [f"  - {line}" for line in lines[:_SHOWN]]
    if total > _SHOWN:
        shown.append(f"  - and {total - _SHOWN} more")
    return "\n".join([f"{head}:", *shown])


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _count(things: Collection[Any], singular: str, plural: str = "") -> str:
    return f"{len(things)} {singular if len(things) == 1 else plural or singular + 's'}"
