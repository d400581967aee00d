"""What a builder of layers needs of the engine, taken from VllmConfig once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tfbackend.layers.rotary import RotaryTables


@dataclass(frozen=True)
class BuildContext:
    """Attributes:
    dtype: of parameters.
    device: where parameters are made.
    quant_config, cache_config: vLLM's, handed to its layers as they are.
    tp_size: ranks that share a layer.
    eplb: whether experts move between ranks while the engine runs.
    redundant_experts: copies of experts beyond one of each, over all ranks.
    sequence_parallel_moe: whether tensor-parallel ranks share out the tokens of experts that are spread over ranks.
    rotary_tables: what the rotary layers of the model share.
    """

    dtype: torch.dtype
    device: torch.device
    quant_config: Any
    cache_config: Any
    tp_size: int
    eplb: bool = False
    redundant_experts: int = 0
    sequence_parallel_moe: bool = False
    rotary_tables: RotaryTables = field(default_factory=RotaryTables)
