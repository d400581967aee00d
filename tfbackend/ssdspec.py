"""A state space with one decay a head (Mamba-2) as frozen data, with its reference; see layerspecs.

z, x B C, dt = in_proj(in_scale * hidden) * scales        x B C = silu(causal convolution of x B C)
dt = softplus(dt + dt_bias) within dt_limit               S = exp(dt A) S + dt x B      per head, S [head_dim, state]
out_proj(norm(silu(z) * (S C + D x)))                     A = -exp(what the checkpoint has)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tfbackend.serving import ServingSpec
from tfbackend.shortconvspec import convolution_problem, packs_convolutions

NO_LIMIT = (0.0, math.inf)


@dataclass(frozen=True)
class SSDSpec:
    """Mamba-2 with its projections, over all ranks.

    Attributes:
        hidden_size: width of a token before and after.
        heads, head_dim, groups, state_size: a head's state is [head_dim, state_size]; heads of a group share B and C.
        kernel: tokens that the convolution sees.
        in_bias, conv_bias, out_bias: whether each has a bias.
        norm_groups: parts of the inner width that are normed each by itself, 0 for no norm.
        eps: of the norm.
        in_scale: multiplies what goes into the first projection.
        scales: multiply z, x, B, C and dt as they come out of it.
        dt_limit: bounds of the time step.
        limited_steps: whether they hold for a token that is decoded by itself too.
        recurrent: dtype of S between calls.
    """

    hidden_size: int
    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    in_bias: bool
    conv_bias: bool
    out_bias: bool
    norm_groups: int
    eps: float = 0.0
    in_scale: float = 1.0
    scales: tuple[float, ...] = (1.0,) * 5
    dt_limit: tuple[float, float] = NO_LIMIT
    limited_steps: bool = True
    recurrent: torch.dtype = torch.float32

    @property
    def inner(self) -> int:
        """Width of x and of z."""
        return self.heads * self.head_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Of z, x, B, C and dt."""
        shared = self.groups * self.state_size
        return self.inner, self.inner, shared, shared, self.heads

    @property
    def conv_dim(self) -> int:
        return sum(self.widths[1:4])

    def rank_bytes(self, tp_size: int, itemsize: int) -> int:
        """Bytes of a request's state on a rank, `itemsize` those of a number of the model's dtype. Where there is one
        group, every rank has it."""
        groups = max(self.groups // tp_size, 1)
        conv = (self.inner // tp_size + 2 * groups * self.state_size) * (self.kernel - 1) * itemsize
        return conv + self.inner // tp_size * self.state_size * self.recurrent.itemsize

    def problem(self, serving: ServingSpec) -> str:
        """Why vLLM's layer cannot have it on the ranks and the device that there are; "" where it can."""
        tp_size = serving.tp_size
        if self.heads % tp_size:
            return f"its {self.heads} heads do not go into {tp_size} ranks"
        if self.groups % tp_size and self.groups != 1:
            return f"its {self.groups} groups do not go into {tp_size} ranks"
        if self.groups % tp_size and not self.conv_bias:
            return f"vLLM shares out one group among {tp_size} ranks only where the convolution has a bias"
        groups = max(self.groups // tp_size, 1)
        channels = self.inner // tp_size + 2 * groups * self.state_size
        if packs_convolutions(serving, self.kernel) and channels % 32:
            return f"vLLM packs convolutions in 32 channels on a CPU, and each rank has {channels}"
        return convolution_problem(serving, self.kernel)

    def reference(self) -> SSDReference:
        return SSDReference(self)

    def __str__(self) -> str:
        parts = [f"Mamba-2, {self.heads} heads of {self.head_dim}x{self.state_size} in {self.groups} groups"]
        parts.append(f"convolution over {self.kernel}")
        if self.norm_groups > 1:
            parts.append(f"norm in {self.norm_groups} parts")
        elif not self.norm_groups:
            parts.append("no norm")
        if self.in_scale != 1.0 or set(self.scales) != {1.0}:
            parts.append("scaled")
        if self.dt_limit != NO_LIMIT:
            where = "" if self.limited_steps else ", in prompts alone"
            parts.append(f"time step from {self.dt_limit[0]:g} to {self.dt_limit[1]:g}{where}")
        return ", ".join(parts)


class SSDReference(nn.Module):
    """[requests, tokens, hidden_size] in and out, from no state. All but the spec is set from outside: two linears, a
    module with the weight [conv_dim, 1, kernel] and the bias of the convolution, three vectors [heads], and the module
    that has the weight of the norm."""

    in_proj: nn.Module
    conv1d: nn.Module
    out_proj: nn.Module
    norm: nn.Module | None
    a_log: torch.Tensor
    skip: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, spec: SSDSpec) -> None:
        super().__init__()
        self.spec = spec

    def bind(self, mixer: nn.Module, places: Mapping[str, str]) -> SSDReference:
        """Take the weights of a mixer, by what the engine's layer calls them."""
        children = {place: mixer.get_submodule(places[place]) for place in ("in_proj", "conv1d", "out_proj")}
        self.in_proj, self.conv1d, self.out_proj = children.values()
        self.norm = mixer.get_submodule(places["norm"]) if "norm" in places else None
        self.a_log, self.skip, self.dt_bias = (mixer.get_parameter(places[place]) for place in ("A", "D", "dt_bias"))
        return self

    def forward(self, hidden: torch.Tensor, prompt: int | None = None) -> torch.Tensor:
        """The first `prompt` tokens are a prompt, the others decoded one by one; None: all are a prompt."""
        z, scanned = self.scan(hidden, prompt)
        return self.out_proj(self.gate(scanned, z))  # type: ignore[no-any-return]

    def scan(self, hidden: torch.Tensor, prompt: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(z, S C + D x), both [requests, tokens, inner]."""
        spec = self.spec
        projected = self.in_proj(hidden * spec.in_scale).float()
        parts = torch.split(projected, [*spec.widths], dim=-1)
        z, x, b, c, dt = (part * scale for part, scale in zip(parts, spec.scales, strict=True))
        mixed = self._convolve(torch.cat((x, b, c), dim=-1))
        requests, tokens = hidden.shape[:2]
        x, b, c = torch.split(mixed, [*spec.widths[1:4]], dim=-1)
        x = x.view(requests, tokens, spec.heads, spec.head_dim)
        b, c = (self._of_heads(part.view(requests, tokens, spec.groups, spec.state_size)) for part in (b, c))
        made = _recur(x, b, c, self._steps(dt, tokens if prompt is None else prompt), -self.a_log.float().exp())
        made = made + self.skip.float()[:, None] * x
        return z, made.reshape(requests, tokens, spec.inner)

    def gate(self, scanned: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        gated, parts = scanned * F.silu(z), self.spec.norm_groups
        if not parts:
            return gated
        weight: Any = self.norm.weight  # type: ignore[union-attr]
        grouped = gated.view(*gated.shape[:-1], parts, self.spec.inner // parts)
        normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.spec.eps)
        return normed.flatten(-2) * weight  # type: ignore[no-any-return]

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.conv1d.weight
        before = F.pad(x.transpose(1, 2), (self.spec.kernel - 1, 0))
        return F.silu(F.conv1d(before, weight, self.conv1d.bias, groups=self.spec.conv_dim)).transpose(1, 2)  # type: ignore[arg-type]

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.spec.heads // self.spec.groups, dim=2)

    def _steps(self, dt: torch.Tensor, prompt: int) -> torch.Tensor:
        steps = F.softplus(dt + self.dt_bias.float())
        limited = steps.clamp(*self.spec.dt_limit)
        return limited if self.spec.limited_steps else torch.cat((limited[:, :prompt], steps[:, prompt:]), dim=1)


def _recur(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """x [requests, tokens, heads, head_dim], b and c [..., heads, state], dt [..., heads], decay [heads] -> like x."""
    state = x.new_zeros((x.shape[0], *x.shape[2:], b.shape[-1]))
    made = []
    for at in range(x.shape[1]):
        kept = (dt[:, at] * decay).exp()[..., None, None] * state
        state = kept + (dt[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        made.append((state * c[:, at, :, None]).sum(-1))
    return torch.stack(made, dim=1)
