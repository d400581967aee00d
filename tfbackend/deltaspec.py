"""A gated delta rule as frozen data, with its reference; see layerspecs.

q k v = silu(causal convolution of what in_proj_qkvz gives)      z, b, a as their projections give them
S = exp(-exp(A_log) softplus(a + dt_bias)) S                     per head, S [key_dim, value_dim]
S = S + k (beta sigmoid(b) (v - S k))                            q and k of length 1, q / sqrt(key_dim)
out_proj(norm(S q) * gate(z))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tfbackend.serving import ServingSpec
from tfbackend.shortconvspec import convolution_problem

INTERLEAVED, PACKED, APART = "interleaved", "packed", "apart"
"""How a checkpoint has the projections: two, with what belongs to one key head side by side; q k v in one, and z, b
and a in one each; or six."""
PARTS = {INTERLEAVED: ("qkvz", "ba"), PACKED: ("qkv", "z", "b", "a"), APART: ("q", "k", "v", "z", "b", "a")}
"""The projections of each layout, named for what they give, in order."""
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
LENGTH_EPS = 1e-6
"""Added to the square of a query's and a key's length; no layer of vLLM's knows another."""
GPU_DIM = 128
"""Numbers of a head. vLLM has several kernels for GPUs and chooses by the machine; all of them take this many."""


@dataclass(frozen=True)
class DeltaSpec:
    """A gated delta rule with its projections, over all ranks.

    Attributes:
        hidden_size: width of a token before and after.
        key_heads, heads: a key head's query and key are those of heads / key_heads heads.
        key_dim, value_dim: a head's state is [key_dim, value_dim].
        kernel: tokens that the convolution sees.
        layout: INTERLEAVED, PACKED or APART.
        gate: what z goes through, "silu" or "sigmoid".
        beta: what the strength of a write may come up to.
        eps: of the norm.
        recurrent: dtype of S between calls.
    """

    hidden_size: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layout: str
    gate: str = "silu"
    beta: float = 1.0
    eps: float = 0.0
    recurrent: torch.dtype = torch.float32

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Of q, k, v and z."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return keys, keys, values, values

    @property
    def inner(self) -> int:
        """Width of v and of z."""
        return self.widths[3]

    @property
    def conv_dim(self) -> int:
        return sum(self.widths[:3])

    @property
    def parts(self) -> dict[str, int]:
        """Width of each projection of the layout."""
        one = dict(zip("qkvz", self.widths, strict=True)) | {"b": self.heads, "a": self.heads}
        return {part: sum(one[letter] for letter in part) for part in PARTS[self.layout]}

    def rank_bytes(self, tp_size: int, itemsize: int) -> int:
        """Bytes of a request's state on a rank, `itemsize` those of a number of the model's dtype."""
        conv = self.conv_dim // tp_size * (self.kernel - 1) * itemsize
        return conv + self.heads // tp_size * self.key_dim * self.value_dim * self.recurrent.itemsize

    def problem(self, serving: ServingSpec) -> str:
        """Why vLLM's layer cannot have it on the ranks and the device that there are; "" where it can."""
        for what, count in (("key heads", self.key_heads), ("heads", self.heads)):
            if count % serving.tp_size:
                return f"its {count} {what} do not go into {serving.tp_size} ranks"
        if self.beta != 1.0:
            return f"vLLM's layer writes with a strength up to 1, and it with one up to {self.beta:g}"
        return self._kernel_problem(serving) or convolution_problem(serving, self.kernel)

    def _kernel_problem(self, serving: ServingSpec) -> str:
        if serving.device == "cpu":
            return "vLLM's kernels for a CPU take bfloat16 alone, and round on the way what Transformers does not"
        if serving.dtype == torch.float32:
            return "vLLM's kernels for GPUs take no float32"
        if (self.key_dim, self.value_dim) != (GPU_DIM, GPU_DIM):
            return f"vLLM's kernels for GPUs are for states of {GPU_DIM}x{GPU_DIM}, and its are {self._state}"
        return ""

    @property
    def _state(self) -> str:
        return f"{self.key_dim}x{self.value_dim}"

    def reference(self) -> DeltaReference:
        return DeltaReference(self)

    def __str__(self) -> str:
        heads = f"{self.heads} heads of {self._state}, {self.key_heads} key heads"
        parts = [f"gated delta rule, {heads}", f"convolution over {self.kernel}", f"projections {self.layout}"]
        parts += [f"{self.gate} gate"] if self.gate != "silu" else []
        parts += [f"writes up to {self.beta:g}"] if self.beta != 1.0 else []
        return ", ".join(parts)


def projection_places(layout: str) -> Iterator[tuple[str, str]]:
    """(projection, what the engine's layer calls it): one of its two linears, with the number of the shard where the
    linear is made of several."""
    for target, letters in (("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba")):
        parts = [part for part in PARTS[layout] if part[0] in letters]
        for number, part in enumerate(parts):
            yield part, f"{target}.{number}" if len(parts) > 1 else target


class DeltaReference(nn.Module):
    """[requests, tokens, hidden_size] in and out, from no state. All but the spec is set from outside: the projections
    of the layout, a module with the weight [conv_dim, 1, kernel] of the convolution, two vectors [heads], the module
    that has the weight [value_dim] of the norm, and the last linear."""

    projections: Mapping[str, nn.Module]
    conv1d: nn.Module
    norm: nn.Module
    out_proj: nn.Module
    a_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, spec: DeltaSpec) -> None:
        super().__init__()
        self.spec = spec

    def bind(self, mixer: nn.Module, places: Mapping[str, str]) -> DeltaReference:
        """Take the weights of a mixer, by what the engine's layer calls them."""
        child, named = mixer.get_submodule, projection_places(self.spec.layout)
        self.projections = {part: child(places[place]) for part, place in named}
        self.conv1d, self.norm, self.out_proj = (child(places[name]) for name in ("conv1d", "norm", "out_proj"))
        self.a_log, self.dt_bias = (mixer.get_parameter(places[name]) for name in ("A_log", "dt_bias"))
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made, z = self.scan(hidden)
        return self.out_proj(self.gate(made, z).flatten(-2))  # type: ignore[no-any-return]

    def scan(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(S q, z), both [requests, tokens, heads, value_dim]."""
        spec, (requests, tokens) = self.spec, hidden.shape[:2]
        given = self._projected(hidden)
        mixed = self._convolve(torch.cat([given[name] for name in "qkv"], dim=-1))
        q, k, v = torch.split(mixed, [*spec.widths[:3]], dim=-1)
        q, k = (self._of_heads(x.view(requests, tokens, spec.key_heads, spec.key_dim)) for x in (q, k))
        v, z = (x.view(requests, tokens, spec.heads, spec.value_dim) for x in (v, given["z"]))
        decay = -self.a_log.float().exp() * F.softplus(given["a"] + self.dt_bias.float())
        strength = spec.beta * given["b"].sigmoid()
        return _recur(_unit(q) * spec.key_dim**-0.5, _unit(k), v, decay.exp(), strength), z

    def gate(self, made: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """[..., value_dim] of one head each -> the same."""
        weight: Any = self.norm.weight
        normed: torch.Tensor = made * torch.rsqrt(made.pow(2).mean(-1, keepdim=True) + self.spec.eps) * weight
        return normed * GATES[self.spec.gate](z)

    def _projected(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each of q, k, v, z, b and a is, [requests, tokens, its width], head by head."""
        spec = self.spec
        widths = dict(zip("qkvz", spec.widths, strict=True)) | {"b": spec.heads, "a": spec.heads}
        found = dict[str, torch.Tensor]()
        for part, linear in self.projections.items():
            given, blocks = linear(hidden).float(), spec.key_heads if spec.layout == INTERLEAVED else 1
            own = [widths[letter] // blocks for letter in part]
            pieces = torch.split(given.unflatten(-1, (blocks, -1)), own, dim=-1)
            found |= {letter: piece.flatten(-2) for letter, piece in zip(part, pieces, strict=True)}
        return found

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.conv1d.weight
        before = F.pad(x.transpose(1, 2), (self.spec.kernel - 1, 0))
        return F.silu(F.conv1d(before, weight, groups=self.spec.conv_dim)).transpose(1, 2)

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.spec.heads // self.spec.key_heads, dim=2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + LENGTH_EPS)


def _recur(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, strength: torch.Tensor
) -> torch.Tensor:
    """q and k [requests, tokens, heads, key_dim], v [..., value_dim], kept and strength [requests, tokens, heads] ->
    like v."""
    state = v.new_zeros((v.shape[0], v.shape[2], q.shape[-1], v.shape[-1]))
    made = []
    for at in range(v.shape[1]):
        state = state * kept[:, at, :, None, None]
        known = (state * k[:, at, ..., None]).sum(-2)
        new = (v[:, at] - known) * strength[:, at, :, None]
        state = state + k[:, at, ..., None] * new[..., None, :]
        made.append((state * q[:, at, ..., None]).sum(-2))
    return torch.stack(made, dim=1)
