"""The prompts of a verification, as token ids: random ones, whose lengths reach past the windows of the model.

Random ids need no tokenizer, and surprise a model more than text does: what it says hangs on all that it has read.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from tfbackend.verification.answers import Prompt

TOKENS = 12
"""How many are generated for each prompt."""
TOGETHER = 30
"""Prompts in the large batch."""
_WIDEST = 1024
"""A window beyond this many tokens is not reached: the oracle reads all of the prompt again for each token."""
_SHARED = 101
_SEED = 7


@dataclass(frozen=True)
class Prompts:
    """Attributes:
    short: those that the quick rungs ask, one past each window that can be reached.
    long: two that begin with the same tokens.
    others: what fills the large batch.
    unreached: windows that no prompt reaches past (tokens).
    """

    short: tuple[Prompt, ...]
    long: tuple[Prompt, ...]
    others: tuple[Prompt, ...]
    unreached: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest one, with what is generated after it."""
        return max(map(len, (*self.short, *self.long, *self.others))) + TOKENS


def make_prompts(vocabulary: int, windows: Iterable[int], limit: int | None, padding: int | None = None) -> Prompts:
    """Prompts for a model.

    Args:
        vocabulary: number of token ids.
        windows: of its attention layers.
        limit: longest context of the model (tokens), None where it names none.
        padding: id of the padding token; longer prompts hold it, for a backend may treat it as something else.
    """
    rng, room = random.Random(_SEED), (limit or 1 << 20) - TOKENS
    known = sorted(set(windows))
    reached = [w for w in known if w <= _WIDEST and w + 5 <= room]

    def draw(length: int) -> Prompt:
        ids = [rng.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(max(1, min(length, room)))]
        if padding is not None and 0 <= padding < vocabulary and len(ids) > 1:
            ids[len(ids) // 2] = padding
        return tuple(ids)

    lengths = [1, 7, 37, 46, *(w + 5 for w in reached if w + 5 > 46)]
    short = tuple(map(draw, lengths))
    shared = draw(_SHARED)
    long = tuple((shared + draw(tail))[-room:] for tail in (9, 20))
    others = tuple(draw(1 + rng.randrange(40)) for _ in range(TOGETHER - len(short) - len(long)))
    return Prompts(short, long, others, tuple(w for w in known if w not in reached))
