"""Attention whose scores get a bias by the query and by how far back the key is.

No kernel takes such a bias. The layer has vLLM's cache, in its pages and by its block tables, and attends in torch,
request by request and so many queries at a time that the scores take a bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, subclass_attention_backend
from vllm.v1.attention.selector import get_attn_backend

from tfbackend.errors import ConfigError
from tfbackend.layers.attention import PaddedAttention, cut_heads, pad_heads
from tfbackend.layerspecs import by_distance

_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Backends of vLLM whose metadata say for each request how many tokens it has, and which pages."""
_SCORES = 1 << 24
"""Scores over all heads at a time; 64 MiB of float32, and some times that on the way."""


@cache
def _uncaptured(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend with metadata for steps that are not captured: which requests there are is read on the host."""
    builder: Any = type(
        f"Uncaptured{backend.get_builder_cls().__name__}",
        (backend.get_builder_cls(),),
        {"_cudagraph_support": AttentionCGSupport.NEVER, "__module__": __name__},
    )
    made: type[AttentionBackend] = subclass_attention_backend("Uncaptured", backend, builder)
    return made


@dataclass(frozen=True)
class Rule:
    """What the layer does with its scores; see AttentionSpec."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class DistanceBiasedAttention(PaddedAttention):
    """As PaddedAttention, but it writes and reads the cache itself: in a page [KV heads, tokens, 2 * head size] a key
    is followed by its value."""

    rule: Rule
    cached_dtypes: ClassVar[tuple[str, ...]] = ("auto", "float32", "bfloat16", "float16")

    def __init__(self, num_heads: int, head_size: int, scale: float, **keywords: Any) -> None:
        cache_config = keywords.get("cache_config")
        dtype = cache_config.cache_dtype if cache_config is not None else "auto"
        if dtype not in self.cached_dtypes:
            raise ConfigError(
                "Attention with a bias by distance reads no keys that are cached in fewer bits.",
                where=keywords.get("prefix", ""),
                found=f"--kv-cache-dtype {dtype}",
                remedy="Serve it with --kv-cache-dtype auto",
            )
        window = keywords.get("per_layer_sliding_window")
        backend = get_attn_backend(head_size, torch.get_default_dtype(), dtype, has_sliding_window=window is not None)
        if backend.get_name() not in _BACKENDS:
            raise ConfigError(
                "Attention with a bias by distance cannot read where the keys of this backend lie.",
                where=keywords.get("prefix", ""),
                found=backend.get_name(),
                needed=f"one of {', '.join(_BACKENDS)}",
                remedy=f"Serve it with --attention-backend {_BACKENDS[1]}",
            )
        super().__init__(num_heads, head_size, scale, attn_backend=_uncaptured(backend), **keywords)
        self.rule = Rule(float(scale), window, keywords.get("logits_soft_cap"))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        distance_bias: torch.Tensor,
        **__: Any,
    ) -> torch.Tensor:
        """As PaddedAttention, with a bias [tokens, heads or 1, extent], of which column c is for the key
        `extent - 1 - c` tokens back."""
        size = self.head_size
        query = pad_heads(query, self.qk_dim, size).reshape(-1, self.num_heads, size)
        key = pad_heads(key, self.qk_dim, size).reshape(-1, self.num_kv_heads, size)
        value = pad_heads(value, self.v_dim, size).reshape(-1, self.num_kv_heads, size)
        output = torch.empty_like(query)
        bias = distance_bias.contiguous()
        torch.ops.vllm.tfbackend_distance_attention(query, key, value, bias, output, self.layer_name)
        return cut_heads(output.flatten(1), size, self.v_dim)

    def serve(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write the keys and values of a step into the cache, and attend; rows that are no request's become zeros."""
        known = get_forward_context().attn_metadata
        metadata: Any = known.get(self.layer_name) if isinstance(known, dict) else None
        output.zero_()
        if metadata is None:  # a step without requests, by which vLLM measures memory
            return
        count, pages = metadata.num_actual_tokens, self._pages()
        write_pages(pages, key[:count], value[:count], metadata.slot_mapping[:count])
        begins, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        sinks = getattr(self.impl, "sinks", None)
        for index, length in enumerate(lengths[: len(begins) - 1]):
            rows = slice(begins[index], begins[index + 1])
            if rows.stop > rows.start:
                request = Request(pages, metadata.block_table[index], length)
                attend(request, query[rows], bias[rows], self.rule, output[rows], sinks)

    def _pages(self) -> torch.Tensor:
        pages: torch.Tensor = self.kv_cache
        heads, wide = self.num_kv_heads, 2 * self.head_size
        if pages.dim() != 4 or (pages.shape[1], pages.shape[3]) != (heads, wide):
            raise RuntimeError(f"pages of {tuple(pages.shape)} hold no {heads} heads of {wide} for each token")
        return pages


def write_pages(pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys and values [tokens, KV heads, size] where `slots` [tokens] say; those of -1 nowhere.

    Args:
        pages: [pages, KV heads, tokens of a page, 2 * size], of any strides.
    """
    kept = slots >= 0
    where = slots[kept].long()
    block = pages.shape[2]
    pages[where // block, :, where % block] = torch.cat((key, value), dim=-1)[kept].to(pages.dtype)


@dataclass(frozen=True)
class Request:
    """Where the keys and values of a request lie.

    Attributes:
        pages: of the cache, see `write_pages`.
        table: [pages of the request], their numbers in the order of its tokens.
        length: its tokens, those of the step included.
    """

    pages: torch.Tensor
    table: torch.Tensor
    length: int

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [KV heads, stop - start, size] of its tokens from `start` to before `stop`, in float32."""
        block = self.pages.shape[2]
        first = start // block
        numbers = self.table[first : -(-stop // block)].long()
        taken = self.pages.index_select(0, numbers).transpose(0, 1).flatten(1, 2)
        key, value = taken[:, start - first * block : stop - first * block].float().chunk(2, dim=-1)
        return key, value


def attend(
    request: Request,
    query: torch.Tensor,
    bias: torch.Tensor,
    rule: Rule,
    output: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of the last tokens of a request.

    Args:
        query: [tokens, heads, size].
        bias: [tokens, heads or 1, extent], see DistanceBiasedAttention.forward.
        output: [tokens, heads, size], written.
        sinks: [heads] logits that take their part of the weights, or None.
    """
    heads = query.shape[1]
    for rows, start, stop in _parts(len(query), heads, request.length, rule.window):
        key, value = request.read(start, stop)
        places = torch.arange(request.length - len(query), request.length, device=query.device)[rows]
        distance = places[:, None] - torch.arange(start, stop, device=query.device)[None, :]
        grouped = query[rows].float().transpose(0, 1).reshape(len(key), -1, query.shape[-1])
        scores = (grouped @ key.transpose(1, 2)).view(heads, *distance.shape) * rule.scale
        if rule.soft_cap:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        scores = scores + by_distance(bias[rows].float().transpose(0, 1), distance)
        scores.masked_fill_((distance < 0) | (distance >= (rule.window or math.inf)), -math.inf)
        weights = _weights(scores, sinks).reshape(len(key), -1, stop - start)
        output[rows] = (weights @ value).view(heads, len(distance), -1).transpose(0, 1).to(output.dtype)


def _parts(count: int, heads: int, length: int, window: int | None) -> Iterator[tuple[slice, int, int]]:
    """(rows of the queries, first key that any of them sees, end of those keys), a bounded number of scores each."""
    before = length - count
    at = 0
    while at < count:
        start = max(0, before + at + 1 - window) if window else 0
        size = max(1, _SCORES // (heads * (length - start)))
        end = min(count, at + size)
        yield slice(at, end), start, before + end
        at = end


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]


@eager_break_during_capture  # type: ignore[untyped-decorator]
def tfbackend_distance_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """Run the layer of that name; opaque to torch.compile, for it goes through the requests of a step."""
    layer = get_forward_context().no_compile_layers[layer_name]
    assert isinstance(layer, DistanceBiasedAttention)
    layer.serve(query, key, value, bias, output)


direct_register_custom_op(
    op_name="tfbackend_distance_attention", op_func=tfbackend_distance_attention, mutates_args=["output"]
)
