"""Logits as the Transformers class computes them."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

from tfbackend import meta
from tfbackend.apply import materialise
from tfbackend.errors import UnsupportedModelError
from tfbackend.grafting import graft
from tfbackend.head import runnable
from tfbackend.mixins.base import Base


class CausalMixin(Base):
    """A language model: hidden states [tokens, hidden] -> logits [tokens, vocabulary].

    Attributes:
        lm_head: the linear, sharded over the vocabulary.
        head: modules of the Transformers class that its forward runs around the linear, at their own paths.
    """

    def build_head(self, built: meta.MetaModel, prefix: str) -> None:
        super().build_head(built, prefix)
        if self.plan.head is None or built.head_path is None:
            raise UnsupportedModelError("The model has no head that gives logits.", where=self.plan.architecture)
        if self.stage is not None and self.stage.follows:
            self.lm_head, self.head = PPMissingLayer(), PPMissingLayer()
            return
        linear = built.model.get_submodule(built.head_path)
        assert isinstance(linear, nn.Linear)
        name = f"{prefix}.lm_head" if prefix else "lm_head"
        self.lm_head = ParallelLMHead(
            linear.out_features,
            linear.in_features,
            bias=linear.bias is not None,
            params_dtype=self.context.dtype,
            quant_config=self.quant_config,
            prefix=name,
        )
        if self.plan.tied:
            self._tie(built)
        self.logits_processor = LogitsProcessor(
            linear.out_features, scale=self.plan.head.scale, soft_cap=self.plan.head.soft_cap
        )
        self._build_around(built)

    def _tie(self, built: meta.MetaModel) -> None:
        table = self.input_embedding()
        if not isinstance(table, VocabParallelEmbedding):
            raise UnsupportedModelError(
                "The head shares the table of an embedding that could not be replaced.",
                where=built.embedding_path,
                found=type(table).__name__,
                needed="an embedding that the embedding fuser takes",
            )
        self.lm_head = self.lm_head.tie_weights(table)

    def _build_around(self, built: meta.MetaModel) -> None:
        head = self.plan.head
        assert head is not None
        self.head = nn.Module()
        for path in head.modules:
            graft(self.head, built.model, path)
        materialise(self.head, self.context)
        self._before = runnable(head.before, self.head) if head.before else None
        self._after = runnable(head.after, self.head) if head.after else None

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[tokens, hidden] -> [tokens, vocabulary]; None on ranks that do not gather."""
        if self._before is not None:
            hidden_states = self._before(hidden_states.unsqueeze(0)).squeeze(0)
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)
        if self._after is not None and logits is not None:
            logits = self._after(logits.unsqueeze(0)).squeeze(0)
        return logits
