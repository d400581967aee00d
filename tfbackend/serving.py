"""The planner's whole view of the engine: plain frozen values, no vLLM in sight."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ServingSpec:
    """What the engine will run the model with.

    Attributes:
        dtype: dtype of weights and activations.
        tp_size: tensor-parallel ranks that share every layer.
        pp_size: pipeline stages that share the layers.
        ep: whether experts are spread over the tensor-parallel ranks.
        sequence_parallel_moe: whether those ranks also share out the tokens that experts see.
        quantization: name of the quantization method, or None.
        max_model_len: longest context the engine accepts, in tokens.
        max_tokens: most tokens that one call of the model holds, of all requests together.
        device: "cpu", "cuda" ...: chooses between kernels, never between meanings.
        compiled: whether torch.compile will run over the decoder.
    """

    dtype: torch.dtype = torch.float32
    tp_size: int = 1
    pp_size: int = 1
    ep: bool = False
    sequence_parallel_moe: bool = False
    quantization: str | None = None
    max_model_len: int = 2048
    max_tokens: int = 8192
    device: str = "cpu"
    compiled: bool = False
