"""Names of a checkpoint -> places in the served module tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from tfbackend.errors import PlanConflictError
from tfbackend.fusers.base import Rewrite
from tfbackend.weights.clearing import cleared_rows
from tfbackend.weights.conversion import Conversions
from tfbackend.weights.drops import DropRules, drop
from tfbackend.weights.gathering import Gathering
from tfbackend.weights.ledger import Ledger, nearest
from tfbackend.weights.names import Spellings, join
from tfbackend.weights.outcomes import Dropped, Gathered, Outcome, Placement, Shard, Unexpected
from tfbackend.weights.ties import Ties

BASE, HEAD, REST = "model", "lm_head", "head"
"""Where the served module tree has the base model, the head, and whatever else the full model has."""

Present = Callable[[str], bool]
"""Whether this pipeline stage has the module of a place."""


class PlanLike(Protocol):
    """What is read of a plan. Paths in rewrites are relative to the base model, the others to the full model."""

    @property
    def rewrites(self) -> Sequence[Rewrite]: ...
    @property
    def base_path(self) -> str: ...
    @property
    def head_path(self) -> str | None: ...
    @property
    def tied(self) -> bool: ...
    @property
    def embedding_path(self) -> str: ...


def build_weight_map(model: nn.Module, plan: PlanLike, *, quantized: bool = False) -> WeightMap:
    """Read off the meta model and the plan where each tensor of a checkpoint goes.

    Everything needed is copied, so the model may be changed afterwards.

    Args:
        model: the full Transformers model, parameters on meta.
        plan: its rewrites and the places of base model, head and embedding.
        quantized: whether the checkpoint may have tensors beside the parameters (scales, zero points, packed weights).

    Raises:
        PlanConflictError: two rewrites move one module, or move two modules to one place.
    """
    return WeightMap(model, plan, quantized=quantized)


class WeightMap:
    """Where each tensor of a checkpoint goes; made by `build_weight_map`, not changed afterwards."""

    def __init__(self, model: nn.Module, plan: PlanLike, *, quantized: bool) -> None:
        own_prefix = getattr(model, "base_model_prefix", "")
        self._states = {name: state.to("meta") for name, state in model.state_dict().items()}
        self._modules = {name for name, _ in model.named_modules()}
        self._conversions = Conversions(model, self._states)
        self._spellings = Spellings(plan.base_path, own_prefix, plan.head_path, self._conversions.rename)
        self._drops = DropRules(
            self._spellings,
            {name for name, _ in model.named_buffers()} - self._states.keys(),
            self._modules,
            getattr(model, "_keys_to_ignore_on_load_unexpected", None) or (),
            plan.head_path is None,
        )
        self._quantized = quantized
        self._unread = tuple(
            f"{join(plan.base_path, rewrite.qualname, child)}." for rewrite in plan.rewrites for child in rewrite.unread
        )
        self._places = _Places(plan)
        self._ties = _ties(model, plan, self._states)
        table = plan.embedding_path
        self._cleared = {join(table, "weight"): cleared_rows(model, table)} if table else {}
        self._names = {self._places.of(n): n for n in reversed(self._states) if self._is_wanted(n)}

    def _is_wanted(self, canonical: str) -> bool:
        return canonical not in self._ties and not canonical.startswith(self._unread)

    @property
    def targets(self) -> frozenset[str]:
        """All places that a tensor of an unquantized checkpoint can fill."""
        return frozenset(target for target, _ in self._names)

    @property
    def shared(self) -> tuple[tuple[str, str], ...]:
        """(place, place that it shares) of every tied parameter of the base model, merged ones as a whole."""
        pairs: dict[str, str] = {}
        for tied, source in self._ties.items():
            (place, shard), (other, its_shard) = self._places.of(tied), self._places.of(source)
            if place.startswith(f"{BASE}.") and other.startswith(f"{BASE}.") and shard == its_shard:
                pairs[place] = other
        return tuple(pairs.items())

    def expected(self, canonical: str) -> torch.Tensor | None:
        """A meta tensor of the full shape and the dtype that the model has under this canonical name."""
        return self._states.get(canonical)

    def new_ledger(self) -> Ledger:
        """An empty ledger that knows the names for its messages."""
        return Ledger(self._names)

    def resolve(self, name: str) -> Outcome:
        """Where the tensor called `name` goes. Total: every string has an answer.

        A tied parameter resolves to the place of the one that it shares, with `alias_of` set; whether it is a mere copy
        only `stream` can tell.
        """
        return self._resolve(name) or Unexpected(nearest(name, self._states.keys()))

    def stream(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        ledger: Ledger | None = None,
        *,
        present: Present | None = None,
    ) -> Iterator[tuple[Placement, torch.Tensor]]:
        """Place the tensors, converted as Transformers converts them, each as soon as it can be.

        Tensors are held back only while a conversion waits for its other inputs, and one tied parameter while it waits
        to be compared. Dropped and unexpected tensors go to the ledger.

        Args:
            weights: (name, full tensor) in any order.
            ledger: the accounts; without one, problems found here are raised at the end.
            present: whether this pipeline stage has a place; tensors of the others are dropped.

        Raises:
            MissingTensorError: without a ledger, inputs of a conversion are absent at the end.
            UnexpectedTensorError, ShapeMismatchError: likewise without a ledger.
        """
        book = self.new_ledger() if ledger is None else ledger
        gathering = Gathering(self._conversions, self._states, book)
        ties = Ties(self._ties, {name: self._places.of(name)[0] for name in self._ties}, book, present)
        for name, tensor in weights:
            outcome = self._admit(name, tensor, book, present)
            if isinstance(outcome, Placement):
                yield from ties.feed(outcome, tensor)
            elif outcome is not None:
                for placement, converted in gathering.feed(outcome, tensor):
                    yield from ties.feed(placement, converted)
        gathering.finish()
        yield from ties.finish()
        if ledger is None:
            book.raise_problems()

    def _admit(
        self, name: str, tensor: torch.Tensor, ledger: Ledger, present: Present | None
    ) -> Placement | Gathered | None:
        """The outcome of a tensor that is wanted here; any other is booked."""
        outcome = self._resolve(name)
        if isinstance(outcome, Dropped) and (not outcome.ndims or tensor.ndim in outcome.ndims):
            ledger.drop(name, outcome)
        elif outcome is None or isinstance(outcome, Dropped):
            ledger.unexpected(name)
        elif present is not None and not any(present(target) for target in _targets(outcome)):
            ledger.drop(name, drop("other-stage"))
        else:
            return outcome
        return None

    def _resolve(self, name: str) -> Placement | Gathered | Dropped | None:
        if self._unread and any(found.startswith(self._unread) for found in self._spellings.candidates(name)):
            return drop("unread")
        for spelling in self._spellings.current(name):
            gathered = self._gathered(name, spelling)
            if gathered is not None:
                return gathered
            for candidate in self._spellings.prefixed(spelling):
                if candidate in self._states:
                    return self._placement(name, candidate)
        dropped = self._drops.find(name)
        return dropped or (self._beside_parameters(name) if self._quantized else None)

    def _beside_parameters(self, name: str) -> Placement | None:
        """The place of a tensor that a quantized checkpoint has beside a module's parameters: that of its module."""
        for candidate in self._spellings.candidates(name):
            # "q_proj.weight_scale" has the module before its last component, "q_proj.weight.absmax" a parameter.
            parent = candidate.rpartition(".")[0]
            if parent and (parent in self._modules or parent in self._states):
                return self._placement(name, candidate)
        return None

    def _placement(self, name: str, canonical: str) -> Placement:
        source = self._ties.get(canonical)
        own = canonical if source is None else source
        target, shard = self._places.of(own)
        transposed = canonical in self._states and self._places.transposed(own)
        cleared = self._cleared.get(own, ())
        return Placement(target, shard, name, canonical, source, transposed=transposed, cleared=cleared)

    def _gathered(self, name: str, spelling: str) -> Gathered | None:
        met = self._conversions.find(spelling)
        if met is None:
            return None
        renamed, converter = met
        for first in self._spellings.prefixed(renamed):
            results = converter.results(first)
            if results and all(result in self._states for result in results):
                placements = tuple(self._placement(name, result) for result in results)
                return Gathered(name, first, converter, placements)
        return None


class _Places:
    """Canonical name -> (place in the served tree, shard)."""

    def __init__(self, plan: PlanLike) -> None:
        self._base, self._head = plan.base_path, plan.head_path
        self._moves: dict[str, tuple[str, Shard]] = {}
        self._transposed: set[str] = set()
        takers: dict[tuple[str, Shard], str] = {}
        for rewrite in plan.rewrites:
            for entry in rewrite.weights:
                source, move = join(rewrite.qualname, entry.source), (join(rewrite.qualname, entry.target), entry.shard)
                rival = takers.setdefault(move, source)
                self._transposed |= {join(self._base, source, "weight")} if entry.transposed else set()
                if self._moves.setdefault(source, move) != move or rival != source:
                    raise PlanConflictError(
                        "Two rewrites disagree about where a module's weights go.",
                        where=f"{rewrite.fuser} at {rewrite.qualname or 'the base model'}",
                        found=f"{source} -> {move}",
                        needed=f"{source} -> {self._moves[source]}, or another source than {rival}",
                    )

    def of(self, canonical: str) -> tuple[str, Shard]:
        """Place of the tensor of this canonical name."""
        head, base = self._head, self._base
        if head is not None and canonical.startswith(f"{head}."):
            return join(HEAD, canonical.removeprefix(f"{head}.")), None
        if not base or canonical.startswith(f"{base}."):
            path, shard = self._moved(canonical.removeprefix(f"{base}.") if base else canonical)
            return join(BASE, path), shard
        return join(REST, canonical), None

    def transposed(self, canonical: str) -> bool:
        """Whether the tensor of this canonical name is the transpose of what its place takes."""
        return canonical in self._transposed

    def _moved(self, path: str) -> tuple[str, Shard]:
        """The longest leading part of the path that a rewrite moves, moved."""
        parts = path.split(".")
        for cut in range(len(parts), -1, -1):
            move = self._moves.get(".".join(parts[:cut]))
            if move is not None:
                return join(move[0], *parts[cut:]), move[1]
        return path, None


def _ties(model: nn.Module, plan: PlanLike, states: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Canonical name of each tied parameter -> that of the one it shares. For the head, the plan has the last word."""
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if plan.head_path is not None:
        head = join(plan.head_path, "weight")
        ties.pop(head, None)
        if plan.tied:
            ties[head] = join(plan.embedding_path, "weight")
        ties = _into_head(ties, join(plan.head_path, "bias"))
    return {tied: source for tied, source in ties.items() if tied in states and source in states}


def _into_head(ties: dict[str, str], bias: str) -> dict[str, str]:
    """Some classes keep the head's bias beside the linear and tie the two; it is the linear's that is served."""
    source = ties.get(bias)
    if source is None:
        return ties
    others = {tied: bias if shared == source else shared for tied, shared in ties.items() if tied != bias}
    return {**others, source: bias}


def _targets(outcome: Placement | Gathered) -> tuple[str, ...]:
    placements = (outcome,) if isinstance(outcome, Placement) else outcome.placements
    return tuple(placement.target for placement in placements)
