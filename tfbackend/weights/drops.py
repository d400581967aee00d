"""The rules by which a tensor of a checkpoint may be left out; there is no other way to lose one."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from tfbackend.weights.names import Spellings
from tfbackend.weights.outcomes import Dropped

RULES: dict[str, str] = {
    "tied-copy": "The config ties this parameter to another one, and the checkpoint's copy equals that one",
    "recomputed-buffer": "The model computes this buffer from its config",
    "ignored-by-class": "The model class lists this name among those to ignore (_keys_to_ignore_on_load_unexpected)",
    "legacy-buffer": "An earlier release of Transformers saved this buffer; the model no longer has it",
    "headless": "The model is served without a language-modelling head",
    "unread": "Nothing is computed from this parameter in any context that the engine accepts",
    "other-stage": "Another pipeline stage has the layer that this tensor belongs to, or the model is served without",
    "unused-cache-scale": "The engine keeps no scale of this kind for its KV cache",
    "ordered-group-index": "The index says that the quantizer took its groups in order, as the engine does",
    "zero-bias": "The quantizer wrote a bias of zeros for a layer that has no bias",
}
"""Id of each rule -> the sentence that is true whenever it is used."""


@dataclass(frozen=True)
class LegacyBuffer:
    """A buffer that a module once saved: `suffix` is its path below a module that still exists.

    Attributes:
        suffix: the last components of the name.
        ndims: numbers of dimensions such a buffer had; another one is a real weight that the model would miss.
        needs: end of the name of a buffer that the model must have today, or "" for no such condition.
    """

    suffix: str
    ndims: tuple[int, ...]
    needs: str = ""


LEGACY_BUFFERS = (
    # One rotary table per attention layer, before it moved to the base model (and, in Llama's first release, cos and
    # sin beside it).
    LegacyBuffer("rotary_emb.inv_freq", (1,), needs="inv_freq"),
    LegacyBuffer("rotary_emb.cos_cached", (2, 3, 4), needs="inv_freq"),
    LegacyBuffer("rotary_emb.sin_cached", (2, 3, 4), needs="inv_freq"),
    # The causal mask and the value it masked with, of GPT-2 and all that was written after it.
    LegacyBuffer("attn.bias", (4,)),
    LegacyBuffer("attn.masked_bias", (0,)),
    LegacyBuffer("attention.bias", (4,)),
    LegacyBuffer("attention.masked_bias", (0,)),
    LegacyBuffer("attn.causal_mask", (4,)),
    # 0 .. max_position_embeddings - 1
    LegacyBuffer("position_ids", (1, 2), needs="position_ids"),
)


class DropRules:
    """Whether a name that has no place may be dropped.

    Args:
        spellings: candidate names.
        buffers: names of the model's non-persistent buffers.
        modules: paths of all modules of the full model, "" among them.
        ignored: regular expressions of the class's own list.
        headless: whether the model has no head.
    """

    def __init__(
        self,
        spellings: Spellings,
        buffers: Collection[str],
        modules: Collection[str],
        ignored: Collection[str],
        headless: bool,
    ) -> None:
        self._spellings = spellings
        self._buffers = buffers
        self._modules = modules
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in sorted(ignored))) if ignored else None
        self._headless = headless

    def find(self, name: str) -> Dropped | None:
        """The first rule that drops `name`, or None."""
        candidates = tuple(self._spellings.candidates(name))
        if any(candidate in self._buffers for candidate in candidates):
            return drop("recomputed-buffer")
        if self._ignored and any(self._ignored.search(spelling) for spelling in self._spellings.current(name)):
            return drop("ignored-by-class")
        for legacy in LEGACY_BUFFERS:
            if any(self._was_buffer(candidate, legacy) for candidate in candidates):
                return drop("legacy-buffer", legacy.ndims)
        if self._headless and any(self._spellings.head_leaf(spelling) for spelling in self._spellings.current(name)):
            return drop("headless")
        return None

    def _was_buffer(self, candidate: str, legacy: LegacyBuffer) -> bool:
        if candidate != legacy.suffix and not candidate.endswith(f".{legacy.suffix}"):
            return False
        if legacy.needs and not any(buffer.endswith(legacy.needs) for buffer in self._buffers):
            return False
        # A rotary table sat in a module of its own that may be gone: its parent must be there. A mask sat in the
        # attention module itself. A layer that the model does not have makes neither true.
        parent = candidate.rpartition(".")[0]
        return parent in self._modules or (parent.endswith("rotary_emb") and parent.rpartition(".")[0] in self._modules)


def drop(rule: str, ndims: tuple[int, ...] = ()) -> Dropped:
    """The answer that rule `rule` gives."""
    return Dropped(rule, RULES[rule], ndims)
