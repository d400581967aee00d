"""Norms that vLLM has no class for, and its own ones with the kernels that its library has and its classes do not call.

On a CPU in eager mode vLLM runs RMS norms as chains of small torch operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.model_executor.layers import layernorm

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class RMSNorm(layernorm.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """As vLLM's, by one kernel call where x and weight are of one dtype and nothing is being compiled."""
        weight = self.weight.data if self.has_weight else None
        if residual is not None or weight is None or weight.dtype != x.dtype or torch.compiler.is_compiling():
            normed: Normed = self.forward_native(x, residual)
            return normed
        return _kernel(x, weight, self.variance_epsilon)


class ZeroCentredRMSNorm(layernorm.GemmaRMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension."""


class ZeroCentredLayerNorm(layernorm.LayerNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * (1 + weight) + bias over the last dimension."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise in the wider of the dtypes of x and weight, as the class it extends."""
        wide = self._compute_dtype(x)
        assert self.weight is not None
        weight, bias = self.weight.to(wide) + 1, None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.normalized_shape, weight, bias, self.eps).to(x.dtype)

    forward_cuda = forward_cpu = forward_xpu = forward_hip = forward_native


def _kernel(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, eps)
    return out
