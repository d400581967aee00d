"""The planner's whole view of the engine: plain frozen values, no vLLM in sight."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MLASizes:
    """Widths of latent attention.

    Attributes:
        latent: of the vector that keys and values of all heads are made of.
        rope: of the part of a key that has positions and that all heads share.
        nope: of the part of each head's query and key that has none.
        value: of each head's value.
    """

    latent: int
    rope: int
    nope: int
    value: int

    @property
    def cached(self) -> int:
        """Numbers of a token in the cache of a layer."""
        return self.latent + self.rope

    def __str__(self) -> str:
        return f"latent {self.latent}, rope {self.rope}, nope {self.nope}, value {self.value}"


MLA_OFF = "the engine was not asked for it"
NATIVE_OFF = "the engine was not asked for one"
MAMBA2, SHORT_CONV, GATED_DELTA = "mamba2", "short_conv", "gated_delta"
NATIVES = frozenset({MAMBA2, SHORT_CONV, GATED_DELTA})
"""Kinds of mixers with state that an engine may have layers of its own for."""


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
        whole_prompts: whether each call holds whole prompts only, and no token is generated: a model may then see all
            of a prompt at once.
        mla: widths for which the engine has kernels over a cache of latents, or why it has none.
        natives: kinds of mixers with state that the engine has layers of its own for, or why it has none.
        stateless: why the engine keeps no state of a request but keys and values; "" where it does.
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
    whole_prompts: bool = False
    mla: MLASizes | str = MLA_OFF
    natives: frozenset[str] | str = NATIVE_OFF
    stateless: str = ""
