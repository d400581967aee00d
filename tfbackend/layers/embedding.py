"""Vocabulary embeddings that multiply what they look up."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class ScaledVocabParallelEmbedding(VocabParallelEmbedding):
    """[tokens] -> [tokens, dim], rows multiplied by `scale` after the ranks' parts are added up."""

    fused_kind = "embedding"
    scale: float = 1.0

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = super().forward(input_)
        return rows * self.scale
