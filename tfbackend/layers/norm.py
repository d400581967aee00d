"""RMS norms that use vLLM's compiled kernels where vLLM's own classes do not.

On a CPU in eager mode vLLM runs its norms as chains of small torch operations, though its library has the kernel.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import layernorm


def _kernel_fits(x: torch.Tensor, weight: object) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype == x.dtype and not torch.compiler.is_compiling()


class RMSNorm(layernorm.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is not None or not self.has_weight or not _kernel_fits(x, self.weight):
            return self.forward_native(x, residual)
        return _rms_norm(x, self.weight.data, self.variance_epsilon)


class ZeroCentredRMSNorm(layernorm.GemmaRMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension."""


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, eps)
    return out
