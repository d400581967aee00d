"""Norms that vLLM has no class for, and its own ones with the kernels that its library has and its classes do not call.

On a CPU in eager mode vLLM runs RMS norms as chains of small torch operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.model_executor.layers import layernorm

_VECTOR = 16
"""The CPU kernels take rows of whole vectors; this many elements are whole ones for every dtype."""

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class RMSNorm(layernorm.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, has_weight: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(hidden_size, eps, has_weight=has_weight, dtype=dtype)
        self._whole_vectors = hidden_size % _VECTOR == 0
        self.register_buffer("unit", torch.ones(hidden_size, dtype=self.weight.dtype), persistent=False)

    def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        """As vLLM's, by kernels where x and weight are of one dtype and nothing is being compiled.

        The kernel is given a weight of ones and the weight is multiplied on after it: that rounds where Transformers
        rounds, and small models are known to change their answer in bfloat16 if it does not.
        """
        usual = residual is None and self.unit.dtype == x.dtype and self._whole_vectors
        if not usual or torch.compiler.is_compiling():
            normed: Normed = self.forward_native(x, residual)
            return normed
        normed = _kernel(x, self.unit, self.variance_epsilon)
        return normed.mul_(self.weight) if self.has_weight else normed


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
