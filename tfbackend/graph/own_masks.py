"""Windows of modules that hide tokens by themselves, found by looking at all of the mask that may ever be used.

A mask that Transformers makes is asked what it hides (see masks.py). One that a module keeps, or makes in its forward,
can only be seen at work: its softmax is run over as many tokens as the engine accepts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tfbackend.graph.inline import InlineError
from tfbackend.graph.masks import MaskWindow
from tfbackend.graph.query import SDPA, SOFTMAX
from tfbackend.graph.rehearsal import Rehearsal

_LARGEST = 1 << 28
"""Scores over all heads that are looked at; 1 GiB of float32."""


def own_windows(
    rehearsal: Rehearsal, slopes: Mapping[str, tuple[float, ...]], tokens: int
) -> dict[str, int | str | None]:
    """Path -> the window of that module, None for all earlier tokens; or a text, why it has none.

    Args:
        slopes: path -> ALiBi slope of each head, 0 where it has none: far tokens are not hidden for being far.
        tokens: the longest context there is.
    """
    if max(map(len, slopes.values())) * tokens * tokens > _LARGEST:
        return dict.fromkeys(slopes, f"it has a mask of its own, of which {tokens} tokens are too many to look at")
    found: dict[str, int | str | None] = {}

    def visit(module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = rehearsal.paths[id(module)]
        with _Watch(slopes[path]) as watch:
            module.forward(*args, **kwargs)
        found[path] = watch.window()
        return rehearsal.blank(path, tokens)

    rehearsal.run(dict.fromkeys(slopes, visit), seed=1, hiding=False, tokens=tokens)
    return found


def long_rises(
    rehearsal: Rehearsal, slopes: Mapping[str, tuple[float, ...]], tokens: int
) -> dict[str, tuple[torch.Tensor, float]]:
    """Path -> (what the last of `tokens` tokens adds to its own score over those of the others, [heads, tokens], and
    how large the added numbers are), as far as memory lets one look.

    Where all weights give 0 nothing but what is added to the scores is left of them.
    """
    tokens = min(tokens, int((_LARGEST / 2 / max(map(len, slopes.values()))) ** 0.5))
    found: dict[str, tuple[torch.Tensor, float]] = {}

    def visit(module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = rehearsal.paths[id(module)]
        with _Watch(None) as watch:
            module.forward(*args, **kwargs)
        row = watch.scores[0].double()
        seen = row > _HIDDEN
        found[path] = (row[:, -1:] - row).where(seen, torch.nan), row[seen].abs().max().item()
        return rehearsal.blank(path, tokens)

    rehearsal.run(dict.fromkeys(slopes, visit), seed=1, hiding=False, tokens=tokens, spread=0.0)
    return found


_HIDDEN = -9e3
"""Scores below this are hidden; -1e4 is the least that models hide with."""


class _Watch(TorchFunctionMode):
    """Notes the last row of scores of the one softmax of a forward, and, given the slopes of a bias, what is visible to
    all heads alike."""

    def __init__(self, slopes: tuple[float, ...] | None) -> None:
        super().__init__()
        self.slopes = None if slopes is None else torch.tensor(slopes)[:, None, None]
        self.visible: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []
        self.uneven = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and look at what it weighs where it is a softmax or an attention of torch's."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in SOFTMAX:
            self._look(args[0] if args else kwargs["input"])
        elif name == SDPA:
            self._look(_mask_of(*args, **kwargs))
        return func(*args, **kwargs)

    def _look(self, scores: torch.Tensor) -> None:
        scores = scores.flatten(0, -3) if scores.dim() > 3 else scores
        self.scores.append(scores[:, -1].clone())
        if self.slopes is None:
            return
        if self.slopes.any():
            places = torch.arange(scores.shape[-1])
            scores = scores + self.slopes * (places[:, None] - places[None, :])
        heads = scores.softmax(-1) > 0
        self.visible.append(heads[0])
        self.uneven |= not all(torch.equal(head, heads[0]) for head in heads)

    def window(self) -> int | str | None:
        """What was seen, as a window; None where it hides nothing but the future, or nothing."""
        if len(self.visible) != 1 or self.uneven:
            return "its heads hide different tokens"
        return None if self.visible[0].all() else window_of(self.visible[0])


def _mask_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    """What scaled_dot_product_attention adds to its scores, [heads, tokens, tokens]."""
    tokens = query.shape[-2]
    if is_causal:
        attn_mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if attn_mask is None:
        return torch.zeros(1, tokens, tokens)
    added = (
        torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else attn_mask
    )
    return added if added.dim() > 2 else added[None]


def window_of(visible: torch.Tensor) -> int | str | None:
    """The window of a square of what is visible, None where it is plainly causal; a text where it is neither."""
    tokens = visible.shape[0]
    window = int(visible[-1].sum())
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    if not torch.equal(visible, (distance >= 0) & (distance < max(window, 1))):
        return "what it hides is neither causal nor a sliding window"
    return None if window == tokens else window


def combined(own: int | None, given: int | None) -> int | None:
    """The window under two masks."""
    return min((w for w in (own, given) if w is not None), default=None)


def given_window(rehearsal: Rehearsal, path: str) -> MaskWindow | None:
    """What the masks hide that this module is given; None where the model makes none.

    A mask that the model has changed on the way is told by its values only: then all that were made must be alike.

    Raises:
        InlineError: they are not, or one cannot be served.
    """
    masks, (args, kwargs) = rehearsal.seen.masks, rehearsal.seen.calls[path][0]
    own = [masks[id(x)][1] for x in (*args, *kwargs.values()) if id(x) in masks]
    windows = set(own or (window for _, window in masks.values()))
    if any(isinstance(window, str) for window in windows):
        raise InlineError(next(window for window in windows if isinstance(window, str)))
    if len(windows) > 1:
        raise InlineError("its mask is made of one of several that the model has")
    return next((window for window in windows if isinstance(window, MaskWindow)), None)
