"""The entry point of vLLM's general plugins. Runs in every process of the engine: cheap, idempotent, touches no
device."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from typing import Any

SUPPORTED_VLLM = ((0, 32), (0, 33))
SUPPORTED_TRANSFORMERS = (5, 16)

_PLAIN = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
_ATTENTION_FREE = ("TransformersAttentionFreeForCausalLM", "TransformersMoEAttentionFreeForCausalLM")
_POOLING = (
    "TransformersEmbeddingModel",
    "TransformersMoEEmbeddingModel",
    "TransformersForSequenceClassification",
    "TransformersMoEForSequenceClassification",
)
_CLASSIFIER = "ForSequenceClassification"
_LABELLING = ("ForQuestionAnswering", "ForQuestionAnsweringSimple", "RewardModel", "ForRewardModeling")
"""Ends of the names of classes that give logits, of which vLLM knows nothing, or for which it has one that embeds."""
_HYBRID = ("TransformersHybridForCausalLM", "TransformersMoEHybridForCausalLM")
_CLASSES = (*_PLAIN, *_HYBRID, *_ATTENTION_FREE, *_POOLING)
_ENGINE = "vllm.v1.engine.core"
_STATE_BACKEND = "tfbackend.layers.state.StateBackend"
_OPS = ("vllm::tfbackend_state", "vllm::tfbackend_distance_attention")
"""Operations that read which requests a step has, at which vLLM cuts a compiled model."""


def register() -> None:
    """Take over the model classes that `--model-impl transformers` resolves to.

    TFBACKEND_DISABLE=1 leaves vLLM's own backend in place; TFBACKEND_ANY_VLLM=1 skips the check of versions.

    Raises:
        VersionError: vLLM or Transformers is of a release that tfbackend was not written for.
    """
    if os.environ.get("TFBACKEND_DISABLE") == "1":
        return
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    if os.environ.get("TFBACKEND_ANY_VLLM") != "1":
        check_versions(vllm.__version__, version("transformers"))
    for name in _CLASSES:
        ModelRegistry.register_model(name, f"tfbackend.models:{name}")
    _admit(type(ModelRegistry))
    _keep_state()
    _settle_pooling()
    _watch_engine()


def _keep_state() -> None:
    """Let vLLM know the layers that keep state, and choose the classes that have them.

    It reads from the class, and not from the model, whether a model keeps state. Which class it takes is the second
    patch of vLLM: `_get_transformers_backend_cls` answers by the cache that Transformers has for the config.
    """
    from vllm.config import CompilationConfig, ModelConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    register_backend(MambaAttentionBackendEnum.CUSTOM, _STATE_BACKEND, is_mamba=True)
    known = CompilationConfig._attention_ops
    known += [op for op in _OPS if op not in known]
    # vLLM sets up the cache of hybrid classes by itself, that of attention-free ones by their names.
    MODELS_CONFIG_MAP.update(dict.fromkeys(_ATTENTION_FREE, MambaModelConfig) | dict.fromkeys(_HYBRID, _HybridConfig))
    _choose(ModelConfig)


class _HybridConfig:
    """What vLLM is told of its cache before it sets that up for a hybrid class."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing is to be told of the model."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        from tfbackend.adapt import cache_whole

        cache_whole(vllm_config)


class _Pooling:
    """What vLLM calls to set up the configs of a model that pools."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Called first, while there is but the model's config."""
        from tfbackend.reranker import settle_labels

        importlib.import_module(_ENGINE)
        _watch_engine()  # here too: an engine that is forked from this process loads no plugins
        vars(model_config)["is_encoder_decoder"] = False  # a cached property
        settle_labels(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Called last, with all of them."""


class _Embedding(_Pooling):
    """Likewise of one that gives vectors."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        from tfbackend.mixins.sentence import settle_activation

        _Pooling.verify_and_update_model_config(model_config)
        settle_activation(model_config)


def _settle_pooling() -> None:
    """Let the front end know what is not in the config of a model that pools.

    The decoder of one that has an encoder too is given what the encoder is, so to the engine it has none; and a
    language model that ranks has as many labels as its config names tokens for. Whether vectors have length one it is
    told by the files of sentence-transformers, of which vLLM reads only those that it knows by name.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    MODELS_CONFIG_MAP.update({name: _Embedding if name.endswith("EmbeddingModel") else _Pooling for name in _POOLING})


def _watch_engine() -> None:
    """Let an engine in this process ask the ranks that have its model what requests they can do.

    It does so once they have loaded it, and before it takes any request: part of the third patch of vLLM, which is in
    mixins/requests.py.
    """
    module = sys.modules.get(_ENGINE)
    if module is None:
        return
    original = module.EngineCore._initialize_kv_caches
    if getattr(original, "asks_ranks", False):
        return

    @wraps(original)
    def initialize(self: Any, *args: Any, **keywords: Any) -> Any:
        from tfbackend.mixins.requests import ask_ranks

        made = original(self, *args, **keywords)
        ask_ranks(self)
        return made

    vars(initialize)["asks_ranks"] = True
    module.EngineCore._initialize_kv_caches = initialize


def _choose(config_class: Any) -> None:
    original = config_class._get_transformers_backend_cls
    if getattr(original, "asks_for_state", False):
        return

    @wraps(original)
    def choose(self: Any) -> str:
        name: str = original(self)
        if self.runner == "pooling" and "MultiModal" in name and _takes_text_only(self.architectures):
            name = name.replace("MultiModal", "")
        if self.runner == "pooling" and str((self.architectures or [""])[0]).endswith(_LABELLING):
            return name.replace("ForCausalLM", _CLASSIFIER).replace("EmbeddingModel", _CLASSIFIER)
        if name not in _PLAIN:
            return name
        from tfbackend.graph.statecache import kept_by

        return name.replace("ForCausalLM", f"{kept_by(self.hf_config)}ForCausalLM")

    vars(choose)["asks_for_state"] = True
    config_class._get_transformers_backend_cls = choose


def _admit(registry: Any) -> None:
    """Let vLLM's registry resolve models whose classes do not name Transformers' attention interface.

    It refuses them before any model class is asked, because its own backend would have nothing to serve them with.
    Ours reads their attention from what it does, and refuses by name what it cannot serve. This is the first patch of
    vLLM: `_try_resolve_transformers` runs with the answer "compatible" where it is about to resolve to a class of
    ours, and as it was for all others.
    """
    original = registry._try_resolve_transformers
    if getattr(original, "admits_all", False):
        return

    @wraps(original)
    def resolve(self: Any, architecture: str, model_config: Any) -> Any:
        if architecture in _CLASSES:  # resolved before
            return architecture
        if model_config._get_transformers_backend_cls() not in _CLASSES:
            return original(self, architecture, model_config)
        with _compatible():
            return original(self, architecture, model_config)

    vars(resolve)["admits_all"] = True
    registry._try_resolve_transformers = resolve


def _takes_text_only(architectures: list[str]) -> bool:
    """Whether the Transformers class takes nothing but text: vLLM takes every config that has parts for one of more."""
    import transformers

    modalities = getattr(getattr(transformers, (architectures or [""])[0], None), "input_modalities", ())
    return tuple([modalities] if isinstance(modalities, str) else modalities) == ("text",)


@contextmanager
def _compatible() -> Iterator[None]:
    """While entered, every model class of Transformers says that it is compatible."""
    from transformers import PreTrainedModel

    asked = vars(PreTrainedModel)["is_backend_compatible"]
    PreTrainedModel.is_backend_compatible = classmethod(lambda cls: True)
    try:
        yield
    finally:
        PreTrainedModel.is_backend_compatible = asked


def check_versions(vllm_version: str, transformers_version: str) -> None:
    """Refuse releases that were not tested, with a sentence that names those that were.

    Raises:
        VersionError: one of the two is out of range.
    """
    from tfbackend.errors import VersionError

    remedy = "Install a supported release, or set TFBACKEND_ANY_VLLM=1 to try this one"
    if _release(vllm_version) not in SUPPORTED_VLLM:
        supported = " or ".join(".".join(map(str, release)) for release in SUPPORTED_VLLM)
        raise VersionError(
            "This release of vLLM is not supported.",
            found=f"vLLM {vllm_version}",
            needed=f"vLLM {supported}",
            remedy=remedy,
        )
    if _release(transformers_version) < SUPPORTED_TRANSFORMERS:
        least = ".".join(map(str, SUPPORTED_TRANSFORMERS))
        raise VersionError(
            "This release of Transformers is not supported.",
            found=f"Transformers {transformers_version}",
            needed=f"Transformers {least} or later",
            remedy=remedy,
        )


def _release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)
