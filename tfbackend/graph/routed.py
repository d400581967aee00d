"""Calls of modules that hold the experts of a layer: told by what they are given, answered on meta.

A module that goes through its experts by itself asks which of them have tokens, and meta tensors have no values to
ask. What it gives has the shape of the tokens that it is given, so an observed run can go on without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RoutedCall:
    """A call with tokens and what a router decided for each.

    Attributes:
        hidden: tokens [..., hidden].
        ids, weights: [tokens, top_k].
        places: for hidden, ids and weights the number of the argument, or its keyword.
    """

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    places: tuple[int | str, int | str, int | str]

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[1])


def routed_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RoutedCall | None:
    """Hidden states, ids and weights of a call that hands over these three and no other tensor; None of any other."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    if len(given) != 3 or not all(isinstance(x, torch.Tensor) for _, x in given):
        return None
    whole = [(place, x) for place, x in given if not x.dtype.is_floating_point and x.dtype != torch.bool]
    if len(whole) != 1 or whole[0][1].dim() != 2:
        return None
    ids_place, ids = whole[0]
    others = [(place, x) for place, x in given if place != ids_place]
    weights = [(place, x) for place, x in others if x.shape == ids.shape]
    hidden = [(place, x) for place, x in others if x.dim() >= 2 and x.shape[:-1].numel() == ids.shape[0]]
    hidden = [entry for entry in hidden if not weights or entry[0] != weights[0][0]]
    if len(weights) != 1 or len(hidden) != 1 or not all(x.is_floating_point() for _, x in others):
        return None
    places = (hidden[0][0], ids_place, weights[0][0])
    return RoutedCall(hidden[0][1], ids, weights[0][1], places)


def reads_values(error: BaseException) -> bool:
    """Whether this is what torch says to who asks for the values of a meta tensor."""
    return isinstance(error, NotImplementedError) or "meta tensor" in str(error)


def stand_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """What experts would give for this call, as far as a meta run has to know it; None if it is no call of experts."""
    call = routed_call(args, kwargs)
    return None if call is None else torch.empty_like(call.hidden)
