"""A gated short convolution as frozen data, with its reference; see layerspecs.

b, c, x = in_proj(hidden)        out_proj(c * causal convolution of (b * x))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tfbackend.serving import ServingSpec

MOST_TOKENS = 4
"""Tokens that vLLM's kernels for GPUs convolve at most; more they leave out without a word."""


def convolution_problem(serving: ServingSpec, kernel: int) -> str:
    """Why vLLM has no kernel for causal convolutions over so many tokens; "" where it has one."""
    if kernel < 2 or (serving.device != "cpu" and kernel > MOST_TOKENS):
        return f"vLLM convolves 2 to {MOST_TOKENS} tokens, and it has {kernel}"
    return ""


def packs_convolutions(serving: ServingSpec, kernel: int) -> bool:
    """Whether vLLM may lay out the weights of causal convolutions over so many tokens in a way of its own."""
    return serving.device == "cpu" and serving.dtype == torch.bfloat16 and kernel == 4


@dataclass(frozen=True)
class ShortConvSpec:
    """A convolution of each channel over the latest tokens, over all ranks.

    Attributes:
        dim: channels, which are also the width of a token before and after.
        kernel: tokens that it sees.
        bias: whether all three have a bias; vLLM knows no other way.
    """

    dim: int
    kernel: int
    bias: bool

    def rank_bytes(self, tp_size: int, itemsize: int) -> int:
        """Bytes of a request's state on a rank, `itemsize` those of a number of the model's dtype."""
        return self.dim // tp_size * (self.kernel - 1) * itemsize

    def problem(self, serving: ServingSpec) -> str:
        """Why vLLM's layer cannot have it on the ranks and the device that there are; "" where it can."""
        if self.dim % serving.tp_size:
            return f"its {self.dim} channels do not go into {serving.tp_size} ranks"
        if packs_convolutions(serving, self.kernel):
            return f"vLLM packs convolutions over {self.kernel} on a CPU, and its layer does not read them so"
        return convolution_problem(serving, self.kernel)

    def reference(self) -> ShortConvReference:
        return ShortConvReference(self)

    def __str__(self) -> str:
        return f"short convolution of {self.dim} channels over {self.kernel}"


class ShortConvReference(nn.Module):
    """[requests, tokens, dim] in and out, from no state. All but the spec is set from outside."""

    in_proj: nn.Module
    conv: nn.Module
    out_proj: nn.Module

    def __init__(self, spec: ShortConvSpec) -> None:
        super().__init__()
        self.spec = spec

    def bind(self, mixer: nn.Module, places: Mapping[str, str]) -> ShortConvReference:
        """Take the weights of a mixer, by what the engine's layer calls them."""
        self.in_proj, self.conv = mixer.get_submodule(places["in_proj"]), mixer.get_submodule(places["conv"])
        self.out_proj = mixer.get_submodule(places["out_proj"])
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        conv: Any = self.conv
        b, c, x = self.in_proj(hidden).chunk(3, dim=-1)
        before = F.pad((b * x).transpose(1, 2), (self.spec.kernel - 1, 0))
        mixed = F.conv1d(before, conv.weight, conv.bias, groups=self.spec.dim).transpose(1, 2)
        output: torch.Tensor = self.out_proj(c * mixed)
        return output
