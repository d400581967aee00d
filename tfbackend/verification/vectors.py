"""What models that pool are asked, and whether two runs gave the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tfbackend.verification.answers import Prompt, Rows, Text
from tfbackend.verification.prompts import Prompts

COSINE = 0.9999
"""Vectors that are nearer than that are taken for the same, where no number of theirs is further off than APART."""
APART = 2e-3


def make_texts(prompts: Sequence[Prompt], vocabulary: int, end: int | None, padding: int | None) -> tuple[Text, ...]:
    """Prompts that a tokenizer may have made: the token that ends a text is at their end, and nowhere else, for some
    models read what stands there. One of them has padding behind it, as some callers leave it."""
    return tuple(Text(_ended(ids, vocabulary, end, padding, padded=place == 1)) for place, ids in enumerate(prompts))


def _ended(ids: Prompt, vocabulary: int, end: int | None, padding: int | None, *, padded: bool) -> Prompt:
    known = [n for n in (end, padding) if n is not None]
    tail: list[int] = []
    if end is not None and 0 <= end < vocabulary:
        other = next((n for n in range(vocabulary) if n not in known), end)
        ids = tuple(other if n == end and end != padding else n for n in ids)
        tail = [end]
    if padded and padding is not None and 0 <= padding < vocabulary and len(ids) > 3:
        tail += [padding, padding]
    return (*ids[: len(ids) - len(tail)], *tail) if tail else ids


def with_types(texts: Sequence[Text]) -> tuple[Text, ...]:
    """Every other text as a pair: the tokens of its second half are of type 1."""
    return tuple(
        Text(text.ids, len(text.ids) // 2) if place % 2 and len(text.ids) > 1 else text
        for place, text in enumerate(texts)
    )


@dataclass(frozen=True)
class Texts:
    """Attributes:
    asked: those that Transformers is asked too.
    others: what fills the large batch.
    unreached: windows that no text reaches past (tokens).
    """

    asked: tuple[Text, ...]
    others: tuple[Text, ...]
    unreached: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest one."""
        return max(len(text.ids) for text in (*self.asked, *self.others))


def texts_of(prompts: Prompts, vocabulary: int, end: int | None, padding: int | None, *, typed: bool) -> Texts:
    """The texts of a verification, made of the prompts for a model that generates."""
    asked, others = (
        make_texts(part, vocabulary, end, padding) for part in ((*prompts.short, *prompts.long), prompts.others)
    )
    return Texts(with_types(asked) if typed else asked, with_types(others) if typed else others, prompts.unreached)


@dataclass(frozen=True)
class Gap:
    """How far two runs lie apart.

    Attributes:
        apart: the largest difference of a number; NaN where one is none, infinite where shapes differ.
        cosine: the least of two rows of the same place.
        rows: how many were compared.
        where: where they differ most, in words.
    """

    apart: float
    cosine: float
    rows: int
    where: str

    def within(self, *, vectors: bool) -> bool:
        """Whether the runs gave the same: as vectors, also by their directions. Nothing is not the same as nothing."""
        near = self.cosine > COSINE if vectors else True
        return self.rows > 0 and self.apart <= APART and near


def gap(expected: Sequence[Rows], got: Sequence[Rows]) -> Gap:
    """Compare what two runs gave for the same texts."""
    if len(expected) != len(got):
        return Gap(math.inf, -1.0, 0, f"{len(expected)} answers expected, {len(got)} came")
    apart, cosine, rows, where = 0.0, 1.0, 0, ""
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        a, b = torch.tensor(want, dtype=torch.float64), torch.tensor(have, dtype=torch.float64)
        if a.shape != b.shape:
            return Gap(math.inf, -1.0, rows, f"text {index}: {tuple(b.shape)} came where {tuple(a.shape)} are expected")
        rows += len(want)
        far = (a - b).abs().amax(-1)
        place = int(far.argmax()) if bool(far.isfinite().all()) else int((~far.isfinite()).nonzero()[0])
        if not float(far[place]) <= apart and apart == apart:  # the first NaN stays
            apart, where = float(far[place]), f"text {index}" + (f", token {place}" if len(want) > 1 else "")
        cosine = min(cosine, float(torch.nn.functional.cosine_similarity(a, b, dim=-1).min()))
    return Gap(apart, cosine, rows, where)
