"""What a model's own code hands to eager attention on real numbers, masks of its own included."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tfbackend.graph.own_masks import window_of
from tfbackend.graph.tracing import Frame, frame_of

_HIDDEN = -9e3
"""Scores below this are hidden; -1e4 is the least that models hide with."""


@dataclass(frozen=True)
class EagerCall:
    """One call of the attention interface.

    Attributes:
        added: what the mask adds to the scores, [heads or 1, tokens, tokens]; None where there is no mask.
        frame: the forward of the calling module at that moment; None where it does not call by itself.
    """

    added: torch.Tensor | None
    frame: Frame | None

    def visible(self) -> torch.Tensor:
        """What is not hidden, of the shape of `added`."""
        assert self.added is not None
        return self.added > _HIDDEN

    def windows(self) -> set[int | str | None]:
        """The window of each head: None for all earlier tokens; a text where it is none."""
        return {window_of(head) for head in self.visible()} if self.added is not None else {"it has no mask"}


@contextmanager
def eager_calls() -> Iterator[list[EagerCall]]:
    """Collects the calls made meanwhile by modules that are set to eager attention, which get zeros for it."""
    calls: list[EagerCall] = []

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **given: Any
    ) -> tuple[torch.Tensor, None]:
        mask = given.get("attention_mask", mask)
        code = inspect.unwrap(type(module).forward).__code__
        calls.append(EagerCall(_added(mask), frame_of(code)))
        return value.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None

    known = ALL_ATTENTION_FUNCTIONS._global_mapping
    before = known.get("eager")
    ALL_ATTENTION_FUNCTIONS.register("eager", attend)
    try:
        yield calls
    finally:
        known.pop("eager")
        if before is not None:
            ALL_ATTENTION_FUNCTIONS.register("eager", before)


def _added(mask: Any) -> torch.Tensor | None:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape[1:]).masked_fill(~mask[0], -math.inf)
    return mask[0].float()
