"""Edits of a source text as data: spans replaced by text, refused where they overlap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tfbackend.errors import PlanConflictError


@dataclass(frozen=True, order=True)
class Edit:
    """Replace characters [start, end) of a forward's text. `by` is the fuser that wants it."""

    start: int
    end: int
    text: str
    by: str = ""


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text after all edits, whatever their order.

    Raises:
        PlanConflictError: two of them overlap.
    """
    pieces, at, last = [], 0, None
    for edit in sorted(edits):
        if edit.start < at:
            assert last is not None
            raise PlanConflictError(
                "Two rewrites edit the same expression.",
                found=f"{last.by} and {edit.by}",
                where=text[edit.start : edit.end],
            )
        pieces += [text[at : edit.start], edit.text]
        at, last = edit.end, edit
    return "".join([*pieces, text[at:]])
