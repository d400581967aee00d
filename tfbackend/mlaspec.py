"""Latent attention as frozen data, with its reference; see layerspecs.

One latent vector a token is cached, and one key part with positions that all heads share, in place of the keys and
values of every head. A matrix makes these of the latent:

    [k_1 | v_1 | k_2 | v_2 ...] = expand(latent)          score_h = q_h . [k_h | shared part] * scale
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from tfbackend.serving import MLASizes

_NAMES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""What configs call the fields of MLASizes, in their order."""


WIDTHS = (320, 512, 576)
"""Numbers of a token in the cache that vLLM has any kernel for."""


def sizes_named(config: Any) -> MLASizes | str:
    """The widths that a config names, by which vLLM lays out its cache; or what it does not name."""
    found: list[Any] = [getattr(config, name, None) for name in _NAMES]
    absent = [name for name, size in zip(_NAMES, found, strict=True) if not isinstance(size, int) or size <= 0]
    return f"its config has no {', '.join(absent)}" if absent else MLASizes(*found)


@dataclass(frozen=True)
class MLASpec:
    """Causal attention over a cache of latents.

    Attributes:
        num_heads: over all ranks.
        sizes: widths of what is cached and of the heads.
        scale: multiplies q.k before the softmax.
        expand: child of the site that was the linear from latents to heads, [heads * (nope + value), latent].
        max_context: see AttentionSpec.
    """

    num_heads: int
    sizes: MLASizes
    scale: float
    expand: str
    max_context: int | None = None

    window: ClassVar[None] = None
    chunk: ClassVar[None] = None
    soft_cap: ClassVar[None] = None

    @property
    def expanded_dim(self) -> int:
        """Elements that a token has once its latent is expanded, over all heads."""
        return self.num_heads * (self.sizes.nope + self.sizes.value)

    def cached_numbers(self, tp_size: int) -> int:
        """Numbers that each rank keeps of a token: all of them, whatever heads it has."""
        return self.sizes.cached

    def reference(self) -> MLAReference:
        return MLAReference(self)

    def __str__(self) -> str:
        s = self.sizes
        return (
            f"latent attention, {self.num_heads} heads of {s.nope}+{s.rope}, values of {s.value}, "
            f"{s.latent}+{s.rope} numbers of a token in the cache, scale {self.scale:.4g}"
            + (f", contexts of up to {self.max_context} tokens" if self.max_context else "")
        )


class MLAReference(nn.Module):
    """Query [1, heads, tokens, nope + rope], the part of the keys that heads share [1, 1, tokens, rope] and latents
    [1, 1, tokens, latent] in, [1, tokens, heads, value] out. `expand` is set from outside."""

    expand: nn.Module

    def __init__(self, spec: MLASpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, q: torch.Tensor, shared: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        spec, sizes, tokens = self.spec, self.spec.sizes, q.shape[2]
        if tuple(shared.shape) != (1, 1, tokens, sizes.rope) or tuple(latents.shape) != (1, 1, tokens, sizes.latent):
            raise ValueError(f"{tuple(shared.shape)} and {tuple(latents.shape)} are not a key part and latents")
        made = self.expand(latents[0, 0]).view(tokens, spec.num_heads, sizes.nope + sizes.value).transpose(0, 1)
        keys, values = made[..., : sizes.nope].float(), made[..., sizes.nope :].float()
        keys = torch.cat((keys, shared[0].float().expand(spec.num_heads, -1, -1)), dim=-1)
        scores = q[0].float() @ keys.transpose(-1, -2) * spec.scale
        later = torch.arange(tokens)[None, :] > torch.arange(tokens)[:, None]
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        output: torch.Tensor = (weights @ values).to(q.dtype).transpose(0, 1)[None]
        return output
