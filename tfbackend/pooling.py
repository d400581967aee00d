"""Which hidden states of a prompt stand for all of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

PICKS = {
    "first": "the first token",
    "last": "the last token",
    "last_real": "the last token that is no padding",
    "mean": "the mean of all tokens",
}
MEAN_LOGITS, TOKENWISE = "mean_logits", "each"
"""Not one token counts but the logits of all: their mean, or those of each for itself."""


class Pick(NamedTuple):
    """One of PICKS, and the id of the token that counts as padding."""

    name: str
    padding: int | None = None


def pick_row(pick: Pick, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states [tokens, hidden] and token ids [tokens] of one prompt -> [hidden]."""
    if pick.name == "mean":
        return hidden.mean(0)
    if pick.name == "last_real":
        return hidden[last_real(ids, pick.padding)]
    return hidden[0 if pick.name == "first" else -1]


def last_real(ids: torch.Tensor, padding: int | None) -> int:
    """Place of the last of the token ids [tokens] that is no padding; the first where all are."""
    if padding is None:
        return ids.shape[0] - 1
    real = (ids != padding).nonzero()
    return int(real[-1]) if real.shape[0] else 0
