"""What routed experts compute, as frozen data, with its reference; see layerspecs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from tfbackend.activations import ACTIVATIONS

EXPERT_ACTIVATIONS = (*ACTIVATIONS, "swigluoai")
"""swigluoai is gpt-oss's: (up + 1) * gate * sigmoid(alpha * gate)."""


@dataclass(frozen=True)
class ExpertsSpec:
    """Many small gated MLPs, of which each token uses `top_k`, and adds up what they give by the router's weights.

    Attributes:
        num_experts, top_k: over all ranks, and for each token.
        hidden, intermediate: width of the input and output, and between the two matrix products.
        activation: one of EXPERT_ACTIVATIONS.
        gated: activation(gate) * up; else activation(up) alone.
        bias: whether both products add one.
        transposed: the checkpoint has [experts, in, out] instead of [experts, out, in].
        interleaved: the checkpoint has gate0, up0, gate1, up1 ... instead of all gates before all ups.
        alpha: inside swigluoai.
        limit: gate is cut to at most this, up to within plus and minus this; None for no limit.
        kernel: whether vLLM has a kernel for all this on the platform served.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    transposed: bool = False
    interleaved: bool = False
    alpha: float | None = None
    limit: float | None = None
    kernel: bool = True

    @property
    def width(self) -> int:
        """Elements that the first product gives: gate and up, or up alone."""
        return (2 if self.gated else 1) * self.intermediate

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all experts' tensors as the checkpoint has them, by the name of the served parameter."""
        way = -1 if self.transposed else 1
        own = {"w13_weight": (self.width, self.hidden)[::way], "w2_weight": (self.hidden, self.intermediate)[::way]}
        biases = {"w13_bias": (self.width,), "w2_bias": (self.hidden,)} if self.bias else {}
        return {name: (self.num_experts, *shape) for name, shape in {**own, **biases}.items()}

    def without_kernel(self) -> ExpertsSpec:
        return replace(self, kernel=False)

    def with_top_k(self, top_k: int) -> ExpertsSpec:
        return replace(self, top_k=top_k)

    @staticmethod
    def act(
        activation: str,
        interleaved: bool,
        alpha: float | None,
        limit: float | None,
        x: torch.Tensor,
        *,
        gated: bool = True,
    ) -> torch.Tensor:
        """What is done to the first product: [..., 2 * intermediate] -> [..., intermediate]; as wide if not gated."""
        if not gated:
            return ACTIVATIONS[activation](x if limit is None else x.clamp(max=limit))
        gate, up = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "swigluoai":
            assert alpha is not None
            return (up + 1) * gate * torch.sigmoid(gate * alpha)
        return ACTIVATIONS[activation](gate) * up

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """`act` with the numbers of this spec."""
        return self.act(self.activation, self.interleaved, self.alpha, self.limit, x, gated=self.gated)

    def reference(self) -> nn.Module:
        return _ReferenceExperts(self)

    def __str__(self) -> str:
        inside = f"{self.activation}" + (f" limited to {self.limit:g}" if self.limit is not None else "")
        how = "" if self.kernel else ", in plain torch: vLLM has no kernel for it here"
        return f"{self.top_k} of {self.num_experts} experts {self.hidden}->{self.intermediate}, {inside}{how}"


class _ReferenceExperts(nn.Module):
    """[tokens, hidden], ids and weights [tokens, top_k] -> [tokens, hidden]; one expert of one token at a time.

    Attributes:
        into, out: weights of the two products as the checkpoint has them, given by whoever asks for the reference.
        into_bias, out_bias: what they add, or None.
    """

    into: torch.Tensor
    out: torch.Tensor

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec = spec
        self.into_bias: torch.Tensor | None = None
        self.out_bias: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = []
        for token in range(x.shape[0]):
            row = torch.zeros_like(x[token])
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                row = row + weight * self._expert(x[token], expert)
            rows.append(row)
        return torch.stack(rows)

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        inner = self._product(self.into, self.into_bias, x, expert)
        return self._product(self.out, self.out_bias, self.spec.between(inner), expert)

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, expert: int) -> torch.Tensor:
        matrix = weight[expert].T if self.spec.transposed else weight[expert]
        return matrix @ x if bias is None else matrix @ x + bias[expert]
