"""Embeddings and the logits of labels, from the hidden states of whole prompts."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, PoolerConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.pooler import DispatchPooler, PoolingParamsUpdate
from vllm.model_executor.layers.pooler.seqwise import SequencePoolingMethod, get_seq_pooling_method, pooler_for_classify
from vllm.model_executor.layers.pooler.tokwise import pooler_for_token_classify
from vllm.sequence import IntermediateTensors
from vllm.tasks import PoolingTask
from vllm.v1.pool.metadata import PoolingMetadata

from tfbackend import meta
from tfbackend.apply import materialise
from tfbackend.classifier import ClassifierPlan
from tfbackend.errors import UnsupportedModelError
from tfbackend.grafting import graft
from tfbackend.graph.token_types import takes_types
from tfbackend.head import runnable
from tfbackend.meta import CLASSIFY, EMBED
from tfbackend.mixins.base import Base, MaybeTensor
from tfbackend.mixins.sentence import settle_sentence
from tfbackend.pooling import MEAN_LOGITS, TOKENWISE, last_real

_METHODS = {"first": "CLS", "last": "LAST", "mean": "MEAN"}
"""vLLM's names of what is in pooling.PICKS."""


class PoolingMixin(Base):
    """A model that is asked for one thing about each prompt, or about each of its tokens.

    Attributes:
        pooler: picks hidden states and does with them what is left to do.
    """

    pooler: DispatchPooler

    def build_head(self, built: meta.MetaModel, prefix: str) -> None:
        super().build_head(built, prefix)
        if not self.serving.whole_prompts:
            raise UnsupportedModelError(
                "A call of a model that pools has to hold whole prompts.",
                where=self.plan.architecture,
                remedy="Serve it with --no-enable-chunked-prefill --no-enable-prefix-caching",
            )
        assert self.model_config.pooler_config is not None
        self.pooler = self.build_pooler(built, self.model_config.pooler_config)

    def build_pooler(self, built: meta.MetaModel, config: PoolerConfig) -> DispatchPooler:
        """The pooler; mixins have it."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: MaybeTensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: MaybeTensor = None,
        token_type_ids: MaybeTensor = None,
        **_: Any,
    ) -> torch.Tensor:
        """As Base, with the types of tokens [tokens]; none are type 0.

        Raises:
            ValueError: the model takes types, and not having any is something else to it than type 0.
        """
        if not self.plan.typed:
            if token_type_ids is not None and takes_types(self.model):
                raise ValueError(f"{self.plan.architecture} cannot be given types of tokens here")
            token_type_ids = None
        else:  # always of one length and dtype: a compiled decoder knows but one
            types = torch.zeros_like(positions)
            if token_type_ids is not None:
                types[: token_type_ids.shape[0]] = token_type_ids
            token_type_ids = types
        hidden: torch.Tensor = self.decoder(input_ids, positions, inputs_embeds, token_type_ids)
        return hidden


class EmbeddingMixin(PoolingMixin):
    """Hidden states of the token that the user or sentence-transformers' files name; else of the last token where
    tokens see only those before them, and of the first where they see all."""

    task = EMBED

    def build_pooler(self, built: meta.MetaModel, config: PoolerConfig) -> DispatchPooler:
        source = _source_of_pooling(self.model_config)
        if source == _DEFAULT:
            config.seq_pooling_type = "CLS" if self.plan.both_ways else "LAST"
        pooler = DispatchPooler.for_embedding(config)
        settle_sentence(self.model_config, pooler, chosen=source == "user")
        return pooler


class SequenceClassificationMixin(PoolingMixin):
    """Logits of labels as the Transformers class computes them, of each prompt or of each token.

    Attributes:
        head: modules of the Transformers class that are not in its base model, at their own paths.
    """

    task = CLASSIFY

    def build_pooler(self, built: meta.MetaModel, config: PoolerConfig) -> DispatchPooler:
        plan = self.plan.classifier
        if plan is None:
            name = self.plan.architecture
            raise UnsupportedModelError("The model has no head that gives logits of labels.", where=name)
        classifier = self._classifier(built, plan)
        if plan.pick == TOKENWISE:
            return DispatchPooler({"token_classify": pooler_for_token_classify(config, classifier=classifier)})
        if _source_of_pooling(self.model_config) != _DEFAULT:
            pooling = get_seq_pooling_method(config.get_seq_pooling_type())
        elif plan.pick == MEAN_LOGITS:
            made = pooler_for_classify(config, pooling=LogitsPool(classifier))
            return DispatchPooler({"classify": made})
        else:
            pooling = pooling_of(plan)
        return DispatchPooler.for_seq_cls(config, pooling=pooling, classifier=classifier)

    def _classifier(self, built: meta.MetaModel, plan: ClassifierPlan) -> Classifier:
        self.head = nn.Module()
        base = f"{built.base_path}."
        outside = [path for path in plan.modules if not path.startswith(base)]
        inside = [path for path in plan.modules if path.startswith(base)]
        for path in outside:
            graft(self.head, built.model, path)
        for path in inside:  # vLLM pools on one rank, which would wait for the others
            shared = self.model.get_submodule(path.removeprefix(base)).modules()
            if any(getattr(module, "tp_size", 1) > 1 for module in shared if not isinstance(module, ReplicatedLinear)):
                raise UnsupportedModelError(
                    "A part of the base model that its classifier calls is shared out to several ranks.",
                    where=path,
                    remedy="Serve it with --tensor-parallel-size 1",
                )
        dtype = self.context.dtype if inside else self.model_config.head_dtype
        self.head.to(dtype)
        materialise(self.head, self.context)
        root = nn.Module()
        for path in outside:
            graft(root, self.head, path)
        for path in inside:
            graft(root, self.model, path.removeprefix(base), path)
        return Classifier(root, plan, dtype)


class Classifier(nn.Module):
    """Hidden states of tokens -> logits of labels."""

    def __init__(self, root: nn.Module, plan: ClassifierPlan, dtype: torch.dtype) -> None:
        super().__init__()
        # Its parameters are the model's, and have their names there.
        self.__dict__["run"] = runnable(plan.graph, root)
        self.dtype = dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, labels]."""
        logits: torch.Tensor = vars(self)["run"](hidden.to(self.dtype).unsqueeze(1))
        return logits.flatten(0, 1) if logits.dim() == 3 else logits


_DEFAULT = "model_default"


def _source_of_pooling(config: ModelConfig) -> str:
    """Who says which token counts: "user", "sentence_transformers", or nobody, _DEFAULT."""
    return str(getattr(config, "_pooler_config_sources", {}).get("seq_pooling_type", _DEFAULT))


def pooling_of(plan: ClassifierPlan) -> SequencePoolingMethod:
    """vLLM's pooling for what the plan picks."""
    if plan.pick != "last_real" or plan.padding is None:
        return get_seq_pooling_method(_METHODS["last" if plan.pick == "last_real" else plan.pick])
    return LastRealPool(plan.padding)


class LogitsPool(SequencePoolingMethod):
    """The mean of the logits of all tokens of each prompt."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier, self.mean = classifier, get_seq_pooling_method("MEAN")

    def get_supported_tasks(self) -> Set[PoolingTask]:
        return {"classify"}

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> torch.Tensor:
        """[tokens of all prompts, hidden] -> [prompts, labels]."""
        mean: torch.Tensor = self.mean(self.classifier(hidden_states), pooling_metadata)
        return mean


class LastRealPool(SequencePoolingMethod):
    """Hidden states of the last token of each prompt that is no padding."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def get_supported_tasks(self) -> Set[PoolingTask]:
        return {"classify"}

    def get_pooling_updates(self, task: PoolingTask) -> PoolingParamsUpdate:
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> torch.Tensor:
        """[tokens of all prompts, hidden] -> [prompts, hidden]."""
        cursor = pooling_metadata.get_pooling_cursor()
        if cursor.is_partial_prefill():
            raise RuntimeError("a call holds a part of a prompt only")
        prompts = pooling_metadata.get_prompt_token_ids_cpu()
        places = torch.tensor([last_real(ids, self.padding) for ids in prompts])
        return hidden_states[cursor.first_token_indices_gpu + places.to(hidden_states.device)]
