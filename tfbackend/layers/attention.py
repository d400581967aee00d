"""vLLM's attention for value heads of another width than query and key heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.attention import Attention


class PaddedAttention(Attention):
    """Fills the narrower heads up with zeros, which change no score and no weighted sum, and cuts the output back.

    vLLM keeps keys and values of one width. `fit` says what came in; the layer itself is built for the wider of both.
    """

    qk_dim: int
    v_dim: int

    def fit(self, qk_dim: int, v_dim: int) -> None:
        """Take query and key heads of `qk_dim` and value heads of `v_dim`, neither wider than the layer's."""
        assert max(qk_dim, v_dim) == self.head_size, (qk_dim, v_dim, self.head_size)
        self.qk_dim, self.v_dim = qk_dim, v_dim

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **keywords: Any
    ) -> torch.Tensor:
        """[tokens, heads * qk_dim], [tokens, KV heads * qk_dim], [tokens, KV heads * v_dim] ->
        [tokens, heads * v_dim]."""
        output: torch.Tensor = super().forward(
            pad_heads(query, self.qk_dim, self.head_size),
            pad_heads(key, self.qk_dim, self.head_size),
            pad_heads(value, self.v_dim, self.head_size),
            *args,
            **keywords,
        )
        return cut_heads(output, self.head_size, self.v_dim)


def pad_heads(x: torch.Tensor, dim: int, width: int) -> torch.Tensor:
    """[tokens, heads * dim] -> [tokens, heads * width], zeros behind each head."""
    if dim == width:
        return x
    return F.pad(x.reshape(*x.shape[:-1], -1, dim), (0, width - dim)).flatten(-2)


def cut_heads(x: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """[tokens, heads * width] -> [tokens, heads * dim], the front of each head."""
    if dim == width:
        return x
    return x.reshape(*x.shape[:-1], -1, width)[..., :dim].flatten(-2)
