"""What to build in place of a Transformers module, as frozen data.

Each spec says what a layer computes and leaves how to `tfbackend.layers`. `reference()` builds the same layer in plain
torch at full width on one rank: it is what a rewrite is proven with, so it is written for clarity and not for speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tfbackend.activations import ACTIVATIONS
from tfbackend.expertspec import ExpertsSpec
from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.loopedspec import DenseExpertsSpec, LoopedExpertsSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.moespec import MoESpec
from tfbackend.nativespec import StatefulSpec
from tfbackend.standinspec import AllKeysSpec, IdleSpec
from tfbackend.tablespec import FixedRopeSpec as FixedRopeSpec
from tfbackend.tablespec import GrownTableSpec as GrownTableSpec

COLWISE, ROWWISE, REPLICATED = "colwise", "rowwise", "replicated"
COLWISE_GATHER, ROWWISE_SPLIT = "colwise_gather_output", "rowwise_split_input"
ROWWISE_PARTIAL = "rowwise_partial"
"""Rowwise, with what the ranks give left to be added up by whoever asked for it."""
LINEAR_STYLES = (COLWISE, ROWWISE, REPLICATED, COLWISE_GATHER, ROWWISE_SPLIT, ROWWISE_PARTIAL)


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer. `style` says how tensor-parallel ranks share its weight [out_features, in_features]."""

    in_features: int
    out_features: int
    bias: bool
    style: str = REPLICATED

    def reference(self) -> nn.Module:
        return nn.Linear(self.in_features, self.out_features, bias=self.bias)

    def __str__(self) -> str:
        return f"{self.style} linear {self.in_features}->{self.out_features}"


@dataclass(frozen=True)
class MergedLinearSpec:
    """Sibling linears of one input as one matrix product; the output is theirs side by side, colwise-sharded each."""

    in_features: int
    out_features: tuple[int, ...]
    bias: bool
    style: str = COLWISE

    def reference(self) -> nn.Module:
        return nn.Linear(self.in_features, sum(self.out_features), bias=self.bias)

    def __str__(self) -> str:
        return f"merged linear {self.in_features}->{'+'.join(map(str, self.out_features))}"


@dataclass(frozen=True)
class QKVSpec:
    """Query, key and value projections as one matrix product, sharded by heads.

    Attributes:
        in_features: width of the input.
        head_dim, v_head_dim: width of a query/key head and of a value head.
        num_heads, num_kv_heads: heads over all ranks; a KV head is replicated where there are more ranks than KV heads.
    """

    in_features: int
    head_dim: int
    v_head_dim: int
    num_heads: int
    num_kv_heads: int
    bias: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Output widths of query, key and value on one rank."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim

    def reference(self) -> nn.Module:
        return nn.Linear(self.in_features, sum(self.sizes), bias=self.bias)

    def __str__(self) -> str:
        return f"QKV {self.in_features}->{self.num_heads}+2x{self.num_kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True)
class NormSpec:
    """A normalisation over the last dimension.

    Attributes:
        kind: "rms" (x / sqrt(mean(x^2) + eps)) or "layer" (mean-centred).
        size: length of the last dimension.
        eps: added under the root.
        weight: "plain" (w), "zero_centred" (1 + w) or "none".
        bias: whether a bias is added; layer norms only.
    """

    kind: str
    size: int
    eps: float
    weight: str = "plain"
    bias: bool = False

    def reference(self) -> nn.Module:
        return _ReferenceNorm(self)

    def __str__(self) -> str:
        detail = {"plain": "", "zero_centred": ", weight 1 + w", "none": ", no weight"}[self.weight]
        return f"{self.kind} norm {self.size}, eps {self.eps:g}{detail}"


class _ReferenceNorm(nn.Module):
    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.ones(spec.size)) if spec.weight != "none" else None
        self.bias = nn.Parameter(torch.zeros(spec.size)) if spec.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.spec.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.spec.eps)
        if self.weight is not None:
            normed = normed * (self.weight.float() + (1.0 if self.spec.weight == "zero_centred" else 0.0))
        if self.bias is not None:
            normed = normed + self.bias.float()
        return normed.to(x.dtype)


@dataclass(frozen=True)
class ActMulSpec:
    """`activation(first half) * second half` over the last dimension: [..., 2n] -> [..., n]."""

    activation: str

    def reference(self) -> nn.Module:
        return _ReferenceActMul(self.activation)

    def __str__(self) -> str:
        return f"{self.activation}-and-mul"


class _ReferenceActMul(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](first) * second


@dataclass(frozen=True)
class EmbeddingSpec:
    """A vocabulary table [num_embeddings, dim]; rows are multiplied by `scale` after the look-up."""

    num_embeddings: int
    dim: int
    scale: float = 1.0

    def reference(self) -> nn.Module:
        return _ReferenceEmbedding(self)

    def __str__(self) -> str:
        scaled = f", scaled by {self.scale:g}" if self.scale != 1.0 else ""
        return f"vocabulary embedding {self.num_embeddings}x{self.dim}{scaled}"


class _ReferenceEmbedding(nn.Module):
    def __init__(self, spec: EmbeddingSpec) -> None:
        super().__init__()
        self.scale = spec.scale
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight) * self.scale


@dataclass(frozen=True)
class RotarySpec:
    """Rotation of query and key by position.

    Attributes:
        head_dim: width of a head.
        rotary_dim: how much of it, from the front, is rotated.
        neox: True pairs element i with i + rotary_dim/2, False pairs 2i with 2i + 1.
        wide: True where the rotation is computed in float32 and cast back.
        half: how cos/sin are folded: "first" repeats the half after itself, "even" repeats each element.
        copy: whether query and key are read by others too, so that they must not be rotated in place.
    """

    head_dim: int
    rotary_dim: int
    neox: bool = True
    wide: bool = False
    half: str = "first"
    copy: bool = False

    @property
    def picked(self) -> slice:
        """Which elements of cos and sin [..., rotary_dim] are one half, told apart."""
        half = self.rotary_dim // 2
        return slice(0, half) if self.half == "first" else slice(0, 2 * half, 2)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [..., head_dim] by cos and sin [..., rotary_dim / 2]."""
        wide = x.float() if self.wide else x
        turned, rest = wide[..., : self.rotary_dim], wide[..., self.rotary_dim :]
        if self.neox:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        turned = torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
        return turned.to(x.dtype)

    def reference(self) -> nn.Module:
        return _ReferenceRotary(self)

    def __str__(self) -> str:
        style = "neox" if self.neox else "interleaved"
        return f"rotary {self.rotary_dim}/{self.head_dim} {style}"


class _ReferenceRotary(nn.Module):
    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos[..., self.spec.picked].unsqueeze(1), sin[..., self.spec.picked].unsqueeze(1)
        return self.spec.rotate(query, cos, sin), self.spec.rotate(key, cos, sin)


BIAS_COLUMNS = 2
"""Elements of a key that hold its bias: the second has what rounding left over of the first."""

KERNEL_WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Widths of a head that attention kernels have."""


@dataclass(frozen=True)
class AttentionSpec:
    """Scaled dot-product attention over the KV cache.

    Attributes:
        num_heads, num_kv_heads: heads over all ranks.
        head_dim, v_head_dim: width of a query/key head and of a value head.
        scale: multiplies q.k before the softmax.
        window: how many latest tokens, itself included, a token sees; None for all.
        soft_cap: cap * tanh(score / cap) on the scaled scores; None for no cap.
        sinks: attribute of the site that holds one sink logit per head, or None.
        alibi_slopes: per head over all ranks, what is taken off a score for each token that the key is farther; or
            None.
        key_bias: whether each key has a bias for each KV head, [1, KV heads, tokens], added to its scaled scores.
        max_context: tokens of the longest context in which the original attends as this does; None for any.
        chunk: a token sees those of its own chunk of so many only, the first beginning at the first token; None for no
            chunks.
        both: whether a token sees those behind it too, `window - 1` of them; keys and values are then not cached.
        distance_bias: keyword in which the call gives each token a table of what is added to its scaled scores,
            [1, heads or 1, tokens, extent]; column c is for the key `extent - 1 - c` before it, further back is
            nothing; or None.
        extent: columns of that table.
        gathered: whether each rank is given the heads of all ranks, takes its own, and gives back those of all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: str | None = None
    alibi_slopes: tuple[float, ...] | None = None
    key_bias: bool = False
    max_context: int | None = None
    chunk: int | None = None
    both: bool = False
    distance_bias: str | None = None
    extent: int = 0
    gathered: bool = False

    @property
    def cached_dim(self) -> int:
        """Width of a head in the KV cache, which keeps keys and values of one width: the wider of both. A bias is kept
        behind the keys, and what is wider for it is as wide as kernels have it."""
        if not self.key_bias:
            return max(self.head_dim, self.v_head_dim)
        least = max(self.head_dim + BIAS_COLUMNS, self.v_head_dim)
        return next((width for width in KERNEL_WIDTHS if width >= least), least)

    def cached_numbers(self, tp_size: int) -> int:
        """Numbers that each rank keeps of a token: keys and values of its share of the KV heads, of one at least."""
        return 0 if self.both else max(1, self.num_kv_heads // tp_size) * 2 * self.cached_dim

    def reference(self) -> nn.Module:
        return _ReferenceAttention(self)

    def __str__(self) -> str:
        widths = str(self.head_dim)
        widths += f", values of {self.v_head_dim}" if self.v_head_dim != self.head_dim else ""
        widths += ", a bias for each key" if self.key_bias else ""
        widths += f", padded to {self.cached_dim}" if self.key_bias or self.v_head_dim != self.head_dim else ""
        parts = [f"attention {self.num_heads}/{self.num_kv_heads} heads of {widths}, scale {self.scale:.4g}"]
        parts += ["both ways"] if self.both else []
        parts += [f"a bias for each query and {self.extent} distances"] if self.distance_bias else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"chunks of {self.chunk}"] if self.chunk else []
        parts += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        parts += [f"sinks {self.sinks}"] if self.sinks else []
        parts += [f"contexts of up to {self.max_context} tokens"] if self.max_context else []
        parts += ["ALiBi"] if self.alibi_slopes else []
        return ", ".join(parts + (["heads gathered from the ranks"] if self.gathered else []))


def by_distance(table: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """The bias [..., queries, keys] of keys so far back [queries, keys], of tables [..., queries, extent]: column c is
    for the key `extent - 1 - c` back, and there is none further back and ahead."""
    extent = table.shape[-1]
    columns = (extent - 1 - distance).clamp(0, extent - 1).expand(*table.shape[:-1], -1)
    return table.gather(-1, columns).masked_fill((distance < 0) | (distance >= extent), 0.0)


class _ReferenceAttention(nn.Module):
    """[1, heads, tokens, dim] in, [1, tokens, heads, v_dim] out."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
        key_bias: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        spec, tokens = self.spec, q.shape[-2]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q.float() @ k.float().transpose(-1, -2) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        if key_bias is not None:
            scores = scores + key_bias.float().repeat_interleave(groups, 1)[:, :, None, :]
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
        if distance_bias is not None:
            scores = scores + by_distance(distance_bias.float(), distance)
        if spec.alibi_slopes is not None:
            scores = scores - torch.tensor(spec.alibi_slopes)[:, None, None] * distance
        hidden = (distance < 0) | (distance >= (spec.window or math.inf))
        if spec.both:
            hidden = distance.abs() >= (spec.window or math.inf)
        if spec.chunk is not None:
            numbers = torch.arange(tokens) // spec.chunk
            hidden |= numbers[:, None] != numbers[None, :]
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ v.float()).to(q.dtype).transpose(1, 2)


LayerSpec = (
    AllKeysSpec
    | IdleSpec
    | FixedRopeSpec
    | GrownTableSpec
    | LinearSpec
    | MergedLinearSpec
    | QKVSpec
    | NormSpec
    | ActMulSpec
    | EmbeddingSpec
    | RotarySpec
    | AttentionSpec
    | MLASpec
    | ExpertsSpec
    | LoopedExpertsSpec
    | DenseExpertsSpec
    | GroupedLinearSpec
    | MoESpec
    | StatefulSpec
)
