"""Collects the inputs of Transformers' conversions, which come one at a time and in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from transformers.core_model_loading import dot_natural_key

from tfbackend.weights.conversion import Conversions, Part
from tfbackend.weights.ledger import Ledger
from tfbackend.weights.outcomes import Gathered, Placement


@dataclass
class _Group:
    """The inputs of one conversion, while they come in.

    `wanted` is the number of elements of all results. Conversions move elements and neither make nor lose any, so the
    inputs are complete exactly when each source pattern has come and they hold that many.
    """

    first: Gathered
    wanted: int
    held: int = 0
    missing_patterns: set[str] = field(default_factory=set)
    parts: dict[tuple[str, str], Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing_patterns = set(self.first.converter.transform.source_patterns)

    def add(self, key: tuple[str, str], part: Part) -> None:
        self.parts[key] = part
        self.held += part.tensor.numel()
        self.missing_patterns.discard(key[0])

    @property
    def complete(self) -> bool:
        return not self.missing_patterns and self.held >= self.wanted

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(sorted((part.source_name for part in self.parts.values()), key=dot_natural_key))


class Gathering:
    """The open conversions of one load.

    At most the inputs of the conversions under way are held: one layer's experts, in a checkpoint in layer order.
    """

    def __init__(self, conversions: Conversions, states: Mapping[str, torch.Tensor], ledger: Ledger) -> None:
        self._conversions = conversions
        self._states = states
        self._ledger = ledger
        self._open: dict[str, _Group] = {}
        self._done: dict[str, dict[tuple[str, str], str]] = {}

    def feed(self, gathered: Gathered, tensor: torch.Tensor) -> Iterator[tuple[Placement, torch.Tensor]]:
        """The results, if this tensor was the last one wanted."""
        name, part = gathered.source_name, gathered.converter.part
        if gathered.group in self._done:
            self._come_late(gathered)
            return
        wanted = sum(self._states[p.canonical].numel() for p in gathered.placements)
        group = self._open.setdefault(gathered.group, _Group(gathered, wanted))
        if part in group.parts:
            self._ledger.duplicate(name, group.parts[part].source_name, str(gathered.placements[0]))
            return
        group.add(part, Part(name, tensor))
        if group.complete:
            del self._open[gathered.group]
            self._done[gathered.group] = {key: member.source_name for key, member in group.parts.items()}
            yield from self._convert(group)

    def finish(self) -> None:
        """Book the conversions that are still open as incomplete, or as not fitting where nothing is absent."""
        for group in self._open.values():
            first, transform = group.first, group.first.converter.transform
            shape = self._states[first.placements[0].canonical].shape
            indices = self._conversions.indices(transform, shape, (index for _, index in group.parts))
            absent = [
                first.converter.respell(first.source_name, pattern, index)
                for pattern in transform.source_patterns
                for index in (indices if "*" in pattern else [""])
                if (pattern, index) not in group.parts
            ]
            if absent:
                for placement in first.placements:
                    self._ledger.incomplete(str(placement), absent)
            else:
                self._misfit(group)
        self._open.clear()

    def _come_late(self, gathered: Gathered) -> None:
        """A tensor for a conversion that is done: an input twice, or one more than the model has."""
        before = self._done[gathered.group].get(gathered.converter.part)
        if before is not None:
            self._ledger.duplicate(gathered.source_name, before, str(gathered.placements[0]))
        else:
            self._ledger.unexpected(gathered.source_name)

    def _convert(self, group: _Group) -> Iterator[tuple[Placement, torch.Tensor]]:
        first = group.first
        try:
            results = self._conversions.run(first.converter.transform, first.group, group.parts)
        except (RuntimeError, ValueError):
            self._misfit(group)
            return
        wanted = {p.canonical: self._states[p.canonical].shape for p in first.placements}
        if {name: tensor.shape for name, tensor in results.items()} != wanted:
            self._misfit(group)
            return
        sources = group.source_names
        for placement in first.placements:
            yield replace(placement, source_name=sources[0], sources=sources), results[placement.canonical]

    def _misfit(self, group: _Group) -> None:
        names = group.source_names
        shapes = sorted({str(tuple(part.tensor.shape)) for part in group.parts.values()})
        placements = group.first.placements
        self._ledger.misfit(
            names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
            ", ".join(str(placement) for placement in placements),
            found=f"{len(names)} tensors of {' and '.join(shapes)}",
            needed="together " + " and ".join(str(tuple(self._states[p.canonical].shape)) for p in placements),
        )
