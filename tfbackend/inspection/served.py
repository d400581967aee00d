"""One parameter of the served module tree, as it is shared out to tensor-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ServedParameter:
    """One parameter of the served module tree.

    Attributes:
        name: its path there, "model.layers.0.self_attn.qkv_proj.weight".
        shape: over all ranks, a linear's weight [out, in] whichever way round the checkpoint has it.
        rank_shape: on each rank, padding included.
        dtype: what it is kept in.
        how: "columns", "rows", "heads", "experts", "vocabulary" or "whole".
        dim: the dimension that is shared out, None for none.
        replicas: ranks that hold the same KV head.
        layer: number of its decoder layer, None outside of them.
        linear: whether a quantization method may replace it.
        problem: what does not divide, "" for nothing.
        tied_to: the parameter whose memory this one shares, "" for none.
    """

    name: str
    shape: tuple[int, ...]
    rank_shape: tuple[int, ...]
    dtype: torch.dtype
    how: str = "whole"
    dim: int | None = None
    replicas: int = 1
    layer: int | None = None
    linear: bool = False
    problem: str = ""
    tied_to: str = ""

    @property
    def count(self) -> int:
        """Elements over all ranks, 0 for one that shares another's memory."""
        return 0 if self.tied_to else math.prod(self.shape)

    @property
    def rank_bytes(self) -> int:
        """Bytes on each rank, unquantized; 0 for one that shares another's memory."""
        return 0 if self.tied_to else math.prod(self.rank_shape) * self.dtype.itemsize
