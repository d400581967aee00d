"""Embeddings and the logits of labels, from the hidden states of whole prompts."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, PoolerConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.pooler import DispatchPooler, PoolingParamsUpdate
from vllm.model_executor.layers.pooler.seqwise import SequencePoolingMethod, get_seq_pooling_method, pooler_for_classify
from vllm.model_executor.layers.pooler.tokwise import (
    StepPool,
    TokenPooler,
    TokenPoolingMethodOutputItem,
    pooler_for_token_classify,
)
from vllm.sequence import IntermediateTensors
from vllm.tasks import PoolingTask
from vllm.tokenizers import get_tokenizer
from vllm.v1.pool.metadata import PoolingMetadata

from tfbackend import adapt, meta
from tfbackend.apply import materialise
from tfbackend.classifier import ClassifierPlan
from tfbackend.errors import UnsupportedModelError
from tfbackend.grafting import graft
from tfbackend.graph.token_types import takes_types
from tfbackend.head import runnable
from tfbackend.meta import CLASSIFY, EMBED
from tfbackend.mixins.alone import AloneMixin
from tfbackend.mixins.base import MaybeTensor
from tfbackend.mixins.sentence import plan_of, sentence_pooler
from tfbackend.plan_alone import unplanned
from tfbackend.pooling import MEAN_LOGITS, TOKENWISE, last_real
from tfbackend.reranker import Reranker, classifier_weight, head_finder, reranker_of, settle_labels

_METHODS = {"first": "CLS", "last": "LAST", "mean": "MEAN"}
"""vLLM's names of what is in pooling.PICKS."""


class PoolingMixin(AloneMixin):
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
        if self.plan.alone:
            assert input_ids is not None, "a model that runs prompt by prompt is given token ids"
            return self.each_alone(input_ids, positions, token_type_ids)
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
        both = self.plan.both_ways or bool(self.plan.alone)
        if source == _DEFAULT:
            config.seq_pooling_type = "CLS" if both else "LAST"
        plan = plan_of(self.model_config)
        if plan is None:
            return DispatchPooler.for_embedding(config)
        return sentence_pooler(plan, self.model_config, config, self.context.device, chosen=source == "user")


class SequenceClassificationMixin(PoolingMixin):
    """Logits of labels as the Transformers class computes them, of each prompt or of each token.

    Attributes:
        head: modules of the Transformers class that are not in its base model, at their own paths.
        reranker: what the config says of tokens that are labels, None where it says nothing.
        ranked: then the name of the weight that is made of the language model's head.
    """

    reranker: Reranker | None
    ranked: str

    task = CLASSIFY

    def _build(self, prefix: str) -> None:
        self.reranker = reranker_of(self.config)
        settle_labels(self.config)
        super()._build(prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As Base; of a language model that ranks, with rows of its head as the classifier.

        Raises:
            UnsupportedModelError: no classifier can be made of it.
        """
        return super().load_weights(weights if self.reranker is None else self._ranking(self.reranker, weights))

    def _ranking(
        self, reranker: Reranker, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        names, remote = self.model_config, self.model_config.trust_remote_code
        built = meta.build(adapt.hf_config(self.vllm_config), names.dtype, trust_remote_code=remote)
        tokenizer: Any = get_tokenizer(
            names.tokenizer, revision=names.tokenizer_revision, trust_remote_code=names.trust_remote_code
        )
        ids: list[int] = tokenizer.convert_tokens_to_ids(list(reranker.tokens))
        return reranker.convert(weights, ids, head_finder(built, unplanned(built)), self.ranked)

    def build_pooler(self, built: meta.MetaModel, config: PoolerConfig) -> DispatchPooler:
        if self.plan.alone:
            if self.reranker is not None:
                raise UnsupportedModelError(
                    "A language model that runs prompt by prompt cannot be made a classifier.",
                    where=self.plan.architecture,
                    found=self.plan.alone[0],
                )
            return self._settled(built, config)
        plan = self.plan.classifier
        if plan is None:
            name = self.plan.architecture
            raise UnsupportedModelError("The model has no head that gives logits of labels.", where=name)
        classifier = self._classifier(built, plan)
        if self.reranker is not None:
            self.ranked = classifier_weight(built.model, plan)
        if plan.pick == TOKENWISE:
            return DispatchPooler({"token_classify": labels_of_tokens(config, classifier)})
        if self.reranker is not None and _source_of_pooling(self.model_config) == _DEFAULT:
            pooling = get_seq_pooling_method("LAST")
        elif _source_of_pooling(self.model_config) != _DEFAULT:
            pooling = get_seq_pooling_method(config.get_seq_pooling_type())
        elif plan.pick == MEAN_LOGITS:
            made = pooler_for_classify(config, pooling=LogitsPool(classifier))
            return DispatchPooler({"classify": made})
        else:
            pooling = pooling_of(plan)
        made = pooler_for_classify(config, pooling=pooling, classifier=classifier)
        return DispatchPooler({"token_classify": labels_of_tokens(config, classifier), "classify": made})

    def _settled(self, built: meta.MetaModel, config: PoolerConfig) -> DispatchPooler:
        """The pooler where each row is logits already, and all rows of a text are alike."""
        if built.tokenwise:
            return DispatchPooler({"token_classify": pooler_for_token_classify(config, classifier=_as_is)})
        if _source_of_pooling(self.model_config) != _DEFAULT:
            raise UnsupportedModelError(
                "The pooling of a classifier that runs prompt by prompt cannot be chosen: its class does it.",
                where=self.plan.architecture,
                found=f"seq_pooling_type {config.seq_pooling_type}",
            )
        made = pooler_for_classify(config, pooling=get_seq_pooling_method("LAST"), classifier=_as_is)
        return DispatchPooler({"classify": made})

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


def _as_is(logits: torch.Tensor) -> torch.Tensor:
    return logits


_DEFAULT = "model_default"


def _source_of_pooling(config: ModelConfig) -> str:
    """Who says which token counts: "user", "sentence_transformers", or nobody, _DEFAULT."""
    return str(getattr(config, "_pooler_config_sources", {}).get("seq_pooling_type", _DEFAULT))


def pooling_of(plan: ClassifierPlan) -> SequencePoolingMethod:
    """vLLM's pooling for what the plan picks."""
    if plan.pick != "last_real" or plan.padding is None:
        return get_seq_pooling_method(_METHODS["last" if plan.pick == "last_real" else plan.pick])
    return LastRealPool(plan.padding)


def labels_of_tokens(config: PoolerConfig, classifier: Classifier) -> TokenPooler:
    """The pooler for logits of each token, or of those that end a step, as of reward models that judge a process."""
    if config.get_tok_pooling_type() != "STEP":
        return pooler_for_token_classify(config, classifier=classifier)
    return pooler_for_token_classify(config, pooling=StepLabels(classifier), classifier=_as_is)


class StepLabels(StepPool):
    """Logits of the tokens that end a step: what a request wants returned is chosen of them, and not of what they are
    made of."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.__dict__["classifier"] = classifier

    def forward(
        self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata
    ) -> list[TokenPoolingMethodOutputItem]:
        """[tokens of all prompts, hidden] -> for each prompt [steps, labels]."""
        chosen: list[TokenPoolingMethodOutputItem] = super().forward(
            vars(self)["classifier"](hidden_states), pooling_metadata
        )
        return chosen


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
