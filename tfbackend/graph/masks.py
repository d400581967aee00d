"""What a mask lets a token see, found by asking the mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tfbackend.errors import UnsupportedModelError


@dataclass(frozen=True)
class MaskWindow:
    """What a mask lets a token see of itself and the tokens before it, or of all.

    Attributes:
        window: itself and the `window - 1` before it; None for no such limit.
        chunk: only those of its own chunk, of which the first begins at the first token; None for no chunks.
        both: whether it sees as far behind it as before it.
    """

    window: int | None = None
    chunk: int | None = None
    both: bool = False

    def sees(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Whether the token at `q` sees the one at `kv`, element by element."""
        ahead = kv > q
        seen = torch.ones_like(ahead) if self.both else ~ahead
        if self.window is not None:
            seen = seen & ((q - kv).abs() < self.window)
        return seen if self.chunk is None else seen & (q // self.chunk == kv // self.chunk)


_NEAR, _FAR = 160, 1 << 21
"""Every pair of the first `_NEAR` positions is asked, and pairs around `_FAR`, which is beyond any real context."""


def mask_window(function: Callable[..., Any]) -> MaskWindow:
    """Ask a mask function (batch, head, q, kv) -> bool what it hides: on all pairs of the first positions, where a
    prefix would show, and far out on many distances, those next to its edge included.

    Raises:
        UnsupportedModelError: it is neither causal, nor a causal window, nor causal within chunks, nor hides nothing or
            what is far away on both sides, which is all that vLLM's attention can do.
    """
    ask = _asker(function)
    if ask(_FAR, _FAR + 1) and ask(_FAR, _FAR):
        return _checked(ask, MaskWindow(None if ask(_FAR, 0) else _edge(ask), both=True))
    if ask(_FAR, _FAR + 1) or not ask(_FAR, _FAR):
        raise UnsupportedModelError("A mask is not causal.", found="a token sees the one after it, or not itself")
    if ask(_FAR, 0):
        return _checked(ask, MaskWindow())
    edge = _edge(ask)
    try:
        return _checked(ask, MaskWindow(edge))
    except UnsupportedModelError:
        if edge > 1 and ask(2 * edge - 1, edge) and not ask(edge, edge - 1):
            return _checked(ask, MaskWindow(chunk=edge))
        raise


def _checked(ask: Asker, wanted: MaskWindow) -> MaskWindow:
    _check_near(ask, wanted)
    edge = wanted.window or wanted.chunk or 0
    for q in (_FAR, _FAR + 1, _FAR + 12345, *(n + more for n in (edge, 3 * edge) for more in (-1, 0, 1) if n)):
        _check_row(ask, q, wanted)
    return wanted


Asker = Callable[[Any, Any], torch.Tensor]


def _asker(function: Callable[..., Any]) -> Asker:
    """`function` over index tensors that broadcast, for the first sequence and head."""
    zero = torch.tensor(0)

    def ask(q: Any, kv: Any) -> torch.Tensor:
        q, kv = torch.broadcast_tensors(torch.as_tensor(q), torch.as_tensor(kv))  # type: ignore[no-untyped-call]
        try:
            seen = torch.as_tensor(function(zero, zero, q, kv)).expand(q.shape)
        except RuntimeError:  # it branches on its arguments, and so takes one pair at a time
            pairs = zip(q.flatten(), kv.flatten(), strict=True)
            seen = torch.tensor([bool(function(zero, zero, a, b)) for a, b in pairs]).view(q.shape)
        return seen

    return ask


def _edge(ask: Asker) -> int:
    """The first token that does not see the first one, if all after it do not either."""
    low, high = 0, _FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle, 0) else (low, middle)
    return high


def _check_near(ask: Asker, window: MaskWindow) -> None:
    q, kv = torch.arange(_NEAR)[:, None], torch.arange(_NEAR)[None, :]
    wanted, seen = window.sees(q, kv), ask(q, kv)
    if not torch.equal(seen, wanted):
        at = (seen != wanted).nonzero()[0].tolist()
        found = f"token {at[0]} {'sees' if seen[at[0], at[1]] else 'does not see'} token {at[1]}"
        raise UnsupportedModelError("A mask is neither causal nor a sliding window nor in chunks.", found=found)


def _check_row(ask: Asker, q: int, window: MaskWindow) -> None:
    edge = window.window or (q % window.chunk + 1 if window.chunk else 0)
    distances = {*range(-2, 8192), *range(8192, q, 997), *(1 << n for n in range(21)), *range(edge - 99, edge + 99), q}
    places = {q - d for d in distances if d <= q} | ({q + d for d in distances if d <= q} if window.both else set())
    kv = torch.tensor(sorted(places))
    wanted, seen = window.sees(torch.tensor(q), kv), ask(q, kv)
    if not torch.equal(seen, wanted):
        wrong = seen != wanted
        distance, verb = q - int(kv[wrong][-1]), "sees" if seen[wrong][-1] else "does not see"
        raise UnsupportedModelError(
            "A mask has holes, or reaches further for some tokens than for others.",
            found=f"token {q} {verb} the one {distance} before it",
        )


Masks = dict[int, tuple[torch.Tensor, MaskWindow | str]]
"""id of a mask -> the mask, and what it hides or why that cannot be served."""

_windows: Masks = {}


def _tagged_mask(
    *args: Any, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
) -> torch.Tensor:
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    try:
        _windows[id(mask)] = (mask, mask_window(mask_function))
    except UnsupportedModelError as error:
        _windows[id(mask)] = (mask, str(error))
    return mask


@contextmanager
def masks_that_answer() -> Iterator[Masks]:
    """While observing, masks are tags that know their window. Yields what is known of those made so far.

    Position ids are not searched for packed sequences meanwhile: that reads values, and meta tensors have none. Chunks
    begin at the first token, there being no padding before it.
    """
    search, overlay = masking_utils.find_packed_sequence_indices, masking_utils.chunked_overlay
    made: Masks = {}
    ALL_MASK_ATTENTION_FUNCTIONS.register("tfbackend", _tagged_mask)
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    masking_utils.chunked_overlay = lambda size, padding: overlay(size, torch.zeros(len(padding), dtype=torch.long))
    try:
        yield made
    finally:
        made.update(_windows)
        masking_utils.find_packed_sequence_indices, masking_utils.chunked_overlay = search, overlay
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop("tfbackend", None)
        _windows.clear()


def mask_of_one(*_: Any, **keywords: Any) -> torch.Tensor:
    """A mask [1, 1, 1, 1] for models that cannot go without one; nobody attends with it."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=keywords.get("device"))


_OPEN = "tfbackend-open"


@contextmanager
def masks_for(model_config: Any, *, hiding: bool) -> Iterator[None]:
    """While running on real numbers, masks are those of Transformers' eager attention, or hide nothing at all."""
    ALL_MASK_ATTENTION_FUNCTIONS.register(_OPEN, _open_mask)
    configs = [model_config, model_config.get_text_config()] if hasattr(model_config, "get_text_config") else []
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = "eager" if hiding else _OPEN
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(_OPEN, None)


def _open_mask(*args: Any, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    return torch.zeros((1, 1, q_length, kv_length))


UNREADABLE = "the mask was computed by the model itself and cannot be read"


def read_mask(mask: Any, module: nn.Module, is_causal: Any) -> tuple[MaskWindow | None, str]:
    if mask is None:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if causal is False:
            return MaskWindow(both=True), ""
        return (MaskWindow(None), "") if causal is True else (None, "it has no mask and does not say that it is causal")
    tagged = _windows.get(id(mask))
    if tagged is None:
        return None, UNREADABLE
    return (None, tagged[1]) if isinstance(tagged[1], str) else (tagged[1], "")
