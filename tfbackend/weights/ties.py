"""Parameters that the config ties to one another, most often the head to the embedding table.

Transformers ties two parameters when the checkpoint carries only one of them, whichever that is, or both with equal
values. Where both are there and differ, it believes the checkpoint and leaves them apart. So the tensors have to be
compared before anything is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from tfbackend.weights.drops import drop
from tfbackend.weights.ledger import Ledger
from tfbackend.weights.outcomes import Placement

Placed = tuple[Placement, torch.Tensor]


class Ties:
    """Holds a tied parameter's tensor back until it can be compared with the one that it is tied to.

    Args:
        sources: canonical name of a tied parameter -> canonical name of the one that it shares.
        own_places: canonical name of a tied parameter -> its own place, should the tie have to go.
        ledger: where equal copies are written off.
        present: whether this pipeline stage has a place.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        own_places: Mapping[str, str],
        ledger: Ledger,
        present: Callable[[str], bool] | None = None,
    ) -> None:
        self._watched = frozenset(sources.values())
        self._own_places = own_places
        self._ledger = ledger
        self._present = present
        self._seen: dict[str, torch.Tensor] = {}
        self._held: dict[str, list[Placed]] = {}

    def feed(self, placement: Placement, tensor: torch.Tensor) -> Iterator[Placed]:
        """What can be placed now that this tensor has come: nothing, itself, or itself and those that waited."""
        if placement.alias_of is not None:
            if placement.alias_of in self._seen:
                yield from self._settle(placement, tensor, self._seen[placement.alias_of])
            else:
                self._held.setdefault(placement.alias_of, []).append((placement, tensor))
            return
        if placement.canonical in self._watched:
            self._seen[placement.canonical] = tensor
        yield placement, tensor
        for held, copy in self._held.pop(placement.canonical, ()):
            yield from self._settle(held, copy, tensor)

    def finish(self) -> Iterator[Placed]:
        """Those that waited in vain: the first of each fills the parameter that it was tied to."""
        for waiting in self._held.values():
            (first, tensor), *others = waiting
            yield first, tensor
            for placement, other in others:
                yield from self._settle(placement, other, tensor)
        self._held.clear()
        self._seen.clear()

    def _settle(self, placement: Placement, tensor: torch.Tensor, source: torch.Tensor) -> Iterator[Placed]:
        own_place = self._own_places[placement.canonical]
        if _equal(tensor, source):
            self._ledger.drop(placement.source_name, drop("tied-copy"))
        elif self._present is not None and not self._present(own_place):
            self._ledger.drop(placement.source_name, drop("other-stage"))
        else:
            yield replace(placement, target=own_place, unties=True), tensor


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.device == other.device:
        return True
    common = torch.promote_types(one.dtype, other.dtype) if one.dtype != other.dtype else one.dtype
    return torch.equal(one.to(common), other.to(device=one.device, dtype=common))
