"""Activation functions by name, and the name of one that is met."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activation_name(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """The name in this module of what `function` computes, found by evaluating it in float64; None if it is none.

    An activation is known by its values and not by its class, since Transformers spells each in several ways. Values
    far out are asked for too: some are clipped there.
    """
    far = torch.tensor([7.0, 11, 30, 101, 1e3, 1e4], dtype=torch.float64)
    x = torch.cat((torch.linspace(-6, 6, 241, dtype=torch.float64), far, -far))
    try:
        y = function(x.clone())
    except (TypeError, RuntimeError, ValueError):
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return None
    for name, known in ACTIVATIONS.items():
        if torch.allclose(y, known(x), rtol=1e-9, atol=1e-9):
            return name
    return None
