"""What sentence-transformers' files say follows a model: which hidden states are taken together, and how."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tfbackend.errors import UnsupportedModelError

MODES = {
    "cls": "the first token",
    "max": "the largest of each number over all tokens",
    "mean": "the mean of all tokens",
    "mean_sqrt_len_tokens": "the sum of all tokens over the root of their number",
    "weightedmean": "the mean of all tokens, each counted as often as its place says",
    "lasttoken": "the last token",
}
"""Modes of the Pooling module, in the order in which it puts their vectors side by side."""

_SPELLED = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "weightedmean_tokens": "weightedmean"}
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")


def module_names(modules: Sequence[Mapping[str, Any]]) -> list[str]:
    """The classes of the modules that modules.json lists, without their packages.

    Raises:
        UnsupportedModelError: they are not a Transformer, a Pooling, any number of Dense and at most one Normalize, in
            this order.
    """
    names = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    places = [_ORDER.index(name) if name in _ORDER else -1 for name in names]
    single = all(names.count(name) <= 1 for name in _ORDER if name != "Dense")
    if not single or "Pooling" not in names or places != sorted(places) or -1 in places:
        raise UnsupportedModelError(
            "What sentence-transformers does after the model cannot be done here.",
            where="modules.json",
            found=", ".join(names),
            needed="Transformer, Pooling, and then Dense and Normalize or neither",
        )
    return names


def pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The modes that the config of a Pooling module turns on, of MODES and in their order.

    Raises:
        UnsupportedModelError: it turns on none, or one that is not known, or leaves out the tokens of a prompt.
    """
    named = config.get("pooling_mode")
    given = [named] if isinstance(named, str) else [*(named or ())]
    given += [
        k.removeprefix("pooling_mode_") for k, on in config.items() if k.startswith("pooling_mode_") and on is True
    ]
    modes = {_SPELLED.get(mode, mode) for mode in given}
    problem = f"modes {', '.join(sorted(modes)) or 'none'}" if not modes or modes - MODES.keys() else ""
    if config.get("include_prompt", True) is False:
        problem = "include_prompt is false: the tokens of a prompt would have to be left out"
    if problem:
        raise UnsupportedModelError(
            "A Pooling of sentence-transformers cannot be done here.",
            where="config.json of Pooling",
            found=problem,
            needed=", ".join(MODES),
        )
    return tuple(mode for mode in MODES if mode in modes)


def pool(mode: str, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [tokens, hidden] of one text -> [hidden] in float32."""
    hidden = hidden.float()
    if mode == "cls":
        return hidden[0]
    if mode == "lasttoken":
        return hidden[-1]
    if mode == "max":
        return hidden.max(0).values
    if mode == "weightedmean":
        places = torch.arange(1, len(hidden) + 1, device=hidden.device, dtype=hidden.dtype)
        summed: torch.Tensor = places @ hidden
        return summed / places.sum()
    assert mode in ("mean", "mean_sqrt_len_tokens"), mode
    return hidden.mean(0) if mode == "mean" else hidden.sum(0) / math.sqrt(len(hidden))
