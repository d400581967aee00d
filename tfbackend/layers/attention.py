"""vLLM's attention for value heads of another width than query and key heads, for keys that have a bias, and for code
that has the heads of all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather
from vllm.model_executor.layers.attention import Attention

from tfbackend.errors import ConfigError
from tfbackend.layerspecs import BIAS_COLUMNS


class PaddedAttention(Attention):
    """Fills the narrower heads up with zeros, which change no score and no weighted sum, and cuts the output back.

    vLLM keeps keys and values of one width. `fit` says what came in; the layer itself is built for the wider of both.
    """

    qk_dim: int
    v_dim: int

    def fit(self, qk_dim: int, v_dim: int) -> None:
        """Take query and key heads of `qk_dim` and value heads of `v_dim`, neither wider than the layer's."""
        assert max(qk_dim, v_dim) <= self.head_size, (qk_dim, v_dim, self.head_size)
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


class BiasedAttention(PaddedAttention):
    """Keeps the bias of a key behind the key, where the query has ones: their product is their sum.

    Before the product is scaled, so the bias is divided by the scale; what rounding takes off it is kept beside it.
    """

    score_scale: float

    def weigh(self, scale: float) -> None:
        """Take `scale` for what multiplies the product of query and key.

        Raises:
            ConfigError: keys are cached in fewer bits than they have, which their biases would not survive.
        """
        if self.kv_cache_dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(
                "Keys that carry a bias cannot be cached in fewer bits.",
                where=self.layer_name,
                found=f"--kv-cache-dtype {self.kv_cache_dtype}",
                remedy="Serve it with --kv-cache-dtype auto",
            )
        self.score_scale = scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        key_bias: torch.Tensor,
        **keywords: Any,
    ) -> torch.Tensor:
        """As PaddedAttention, with a bias [tokens, KV heads]."""
        exact = key_bias.float() / self.score_scale
        near = exact.to(key.dtype)
        bias = torch.stack((near, (exact - near.float()).to(key.dtype)), dim=-1)
        wide = self.qk_dim + BIAS_COLUMNS
        queries = query.reshape(*query.shape[:-1], -1, self.qk_dim)
        ones = queries.new_ones((*queries.shape[:-1], BIAS_COLUMNS))
        keys = torch.cat((key.reshape(*key.shape[:-1], -1, self.qk_dim), bias), dim=-1).flatten(-2)
        output: torch.Tensor = Attention.forward(
            self,
            pad_heads(torch.cat((queries, ones), dim=-1).flatten(-2), wide, self.head_size),
            pad_heads(keys, wide, self.head_size),
            pad_heads(value, self.v_dim, self.head_size),
            *args,
            **keywords,
        )
        return cut_heads(output, self.head_size, self.v_dim)


class GatheredHeads(nn.Module):
    """Mixed into an attention layer of one rank that is given the heads of all ranks: takes its own of them, and puts
    what all ranks give together."""

    _own: tuple[int, int]
    _own_kv: tuple[int, int]
    _heads: tuple[int, int]

    def share(self, num_heads: int, num_kv_heads: int, tp_size: int) -> None:
        """Take the heads of this rank; a KV head that several ranks need is taken by each."""
        rank = get_tensor_model_parallel_rank()
        count, kv_count = num_heads // tp_size, max(1, num_kv_heads // tp_size)
        self._heads = num_heads, num_kv_heads
        self._own, self._own_kv = (rank * count, count), (rank * num_kv_heads // tp_size, kv_count)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **keywords: Any
    ) -> torch.Tensor:
        """As the layer it is mixed into, heads of all ranks in and out."""
        (heads, kv_heads), own, own_kv = self._heads, self._own, self._own_kv
        if "key_bias" in keywords:
            keywords["key_bias"] = take_heads(keywords["key_bias"], kv_heads, own_kv)
        output: torch.Tensor = super().forward(
            take_heads(query, heads, own),
            take_heads(key, kv_heads, own_kv),
            take_heads(value, kv_heads, own_kv),
            *args,
            **keywords,
        )
        output = tensor_model_parallel_all_gather(output, -1)
        return output


@cache
def gathered(cls: type[nn.Module]) -> Any:
    """The attention layer with heads gathered from the ranks."""
    return type(f"Gathered{cls.__name__}", (GatheredHeads, cls), {"__module__": __name__})


def take_heads(x: torch.Tensor, heads: int, own: tuple[int, int]) -> torch.Tensor:
    """[tokens, heads * dim] -> [tokens, own heads * dim]; `own` has the first of them and how many."""
    width = x.shape[-1] // heads
    return x.narrow(-1, own[0] * width, own[1] * width).contiguous()


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
