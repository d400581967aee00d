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
    rotary_tables: what the rotary layers of the model share.
    """

    dtype: torch.dtype
    device: torch.device
    quant_config: Any
    cache_config: Any
    tp_size: int
    rotary_tables: RotaryTables = field(default_factory=RotaryTables)
