"""Stage 1: a config becomes the Transformers model on the meta device, with its buffers real.

The whole `...ForCausalLM` or `...ForSequenceClassification` is built, not the base model alone: what its forward does
between the base model's output and the logits has to be read from the class that does it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForTextEncoding, PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tfbackend.errors import ConfigError, UnsupportedModelError
from tfbackend.graph.interface import attention_interface, experts_interface
from tfbackend.graph.masks import mask_of_one
from tfbackend.refusals import NATIVE
from tfbackend.values import SIZES, check_numbers, check_sizes, place_of

INTERFACE_NAME = "tfbackend"
"""What `config._attn_implementation` and `config._experts_implementation` are set to; Transformers' modules then call
ours."""


WITH_MASKS = "tfbackend-with-masks"
"""Likewise, for models that cannot go without the masks that Transformers makes."""


GENERATE, CLASSIFY, EMBED = TASKS = ("generate", "classify", "embed")
"""What a model is served for: the logits of the next token, those of its labels, or its hidden states."""


@dataclass(frozen=True)
class MetaModel:
    """The model on meta and the places in it that the later stages ask for.

    Attributes:
        model: the full model, for instance LlamaForCausalLM.
        base_path: path of the base model in it ("model", "transformer" ...), "" where there is no head class.
        embedding_path: path of the vocabulary embedding; "" where a model that only pools names none.
        head_path: path of the linear that gives logits, None where there is none.
        tied: whether head and embedding are one parameter.
        task: one of TASKS.
        tokenwise: whether the checkpoint names a class that labels each token, and not the text.
    """

    model: PreTrainedModel
    base_path: str
    embedding_path: str
    head_path: str | None
    tied: bool
    task: str = GENERATE
    tokenwise: bool = False

    @property
    def base(self) -> PreTrainedModel:
        module = self.model.get_submodule(self.base_path) if self.base_path else self.model
        assert isinstance(module, PreTrainedModel)
        return module


def register_interfaces() -> None:
    """Make `tfbackend` a known implementation of attention and of experts in Transformers. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(INTERFACE_NAME, attention_interface)
    ALL_ATTENTION_FUNCTIONS.register(WITH_MASKS, attention_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(WITH_MASKS, mask_of_one)
    ALL_EXPERTS_FUNCTIONS.register(INTERFACE_NAME, experts_interface)


def give_masks(meta: MetaModel) -> None:
    """Let Transformers make the model masks, of one element each."""
    _set_attention(meta.model.config, WITH_MASKS)


def give_back_interfaces(meta: MetaModel) -> None:
    """Let the model attend and go through its experts in Transformers' own ways."""
    _set_attention(meta.model.config, "eager")
    for module in meta.model.modules():  # parts of a model may have copies of its config
        if isinstance(module, PreTrainedModel):
            _set_attention(module.config, "eager")


def build(
    config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False, task: str = GENERATE
) -> MetaModel:
    """Build the model of `config` on meta, parameters in `dtype`.

    The config is copied first: its attention implementation is set to ours.

    Raises:
        ConfigError: the config has a value that the model class cannot be built with.
        UnsupportedModelError: Transformers has no model for this config that does the task.
    """
    check_config(config)
    register_interfaces()
    config = copy.deepcopy(config)
    _set_interfaces(config)
    _restore_window(config)
    with init_empty_weights(include_buffers=False), torch.device("cpu"), _default_dtype(dtype):
        model = _instantiate(config, dtype, trust_remote_code, task)
    _check_class(model, config)
    _set_attention(model.config, INTERFACE_NAME)
    model.eval()
    _spare_the_warning(model)
    for name in ("use_cache", "output_attentions", "output_hidden_states"):
        setattr(model.config, name, False)
    if task == EMBED:
        return MetaModel(model, *_places_of_base(model), task)
    base_path, embedding_path, head_path, tied = _places(model, generates=task == GENERATE)
    if task == CLASSIFY:
        head_path, tied = None, False
    tokenwise = task == CLASSIFY and _classifier_of(config) not in ("", "ForSequenceClassification")
    return MetaModel(model, base_path, embedding_path, head_path, tied, task, tokenwise)


def named_config_class(config: PretrainedConfig) -> type[PretrainedConfig] | None:
    """The config class of the language model that the checkpoint names; None where Transformers has no such model."""
    named = (getattr(config, "architectures", None) or [""])[0]
    if not named.endswith(_LANGUAGE_MODEL):
        return None
    found: type[PretrainedConfig] | None = getattr(getattr(transformers, named, None), "config_class", None)
    return found


_LANGUAGE_MODEL = "ForCausalLM"


def _check_class(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Refuse a config that makes another model than the checkpoint names.

    vLLM reads the config.json of some architectures with a config class of another, and what differs gets lost.
    """
    named, made = (getattr(config, "architectures", None) or [""])[0], type(model).__name__
    both = any(named.endswith(end) and made.endswith(end) for end in (_LANGUAGE_MODEL, *_CLASSIFIERS))
    if named != made and both and hasattr(transformers, named):
        raise UnsupportedModelError(
            "The config makes another model than the one that the checkpoint names.",
            where=type(config).__name__,
            found=made,
            needed=named,
            remedy=NATIVE,
        )


def _instantiate(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool, task: str) -> PreTrainedModel:
    auto = _auto_class(config, task)
    try:
        return _from_config(auto, config, dtype, trust_remote_code)
    except _BUILD_ERRORS as error:
        if not _refuses_ours(error):
            raise _build_error(config, error) from error
    # The class chooses among attention classes of its own; the plainest one writes out what it does.
    _set_attention(config, "eager")
    try:
        return _from_config(auto, config, dtype, trust_remote_code)
    except _BUILD_ERRORS as error:
        raise _build_error(config, error) from error


_BUILD_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RuntimeError, AssertionError),
    ImportError,  # of a package that the class asks for
)


_CLASSIFIERS = {
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
}


def _classifier_of(config: PretrainedConfig) -> str:
    """What the class that the checkpoint names ends with, of `_CLASSIFIERS`; "" where that is something else."""
    named = (getattr(config, "architectures", None) or [""])[0].removesuffix("Simple")
    return next((end for end in _CLASSIFIERS if named.endswith(end)), "")


def _auto_class(config: PretrainedConfig, task: str) -> Any:
    """Transformers' automatic class for the task; classifiers of tokens are told from those of texts by the class that
    the checkpoint names.

    Raises:
        UnsupportedModelError: it has no classifier for this config.
    """
    if task == EMBED:
        return AutoModelForTextEncoding if _names_encoder(config) else AutoModel
    if task == GENERATE:
        return AutoModelForCausalLM if _has_causal_class(config) else AutoModel
    name = _classifier_of(config) or "ForSequenceClassification"
    known = getattr(transformers, _CLASSIFIERS[name])
    if f"AutoModel{name}" not in (getattr(config, "auto_map", None) or {}) and type(config) not in known:
        raise UnsupportedModelError(
            f"Transformers has no model {name} for this config.", where=type(config).__name__, remedy=NATIVE
        )
    return getattr(transformers, f"AutoModel{name}")


def _names_encoder(config: PretrainedConfig) -> bool:
    """Whether the checkpoint names the encoder of a model that has a decoder too."""
    named = (getattr(config, "architectures", None) or [""])[0]
    known = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
    return type(config) in known and known[type(config)].__name__ == named


def _from_config(auto: Any, config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    made: PreTrainedModel = auto.from_config(config=config, dtype=dtype, trust_remote_code=trust_remote_code)
    return made


def _refuses_ours(error: Exception) -> bool:
    """Whether a class could not be built because it does not know our attention implementation."""
    return (isinstance(error, KeyError) and error.args[:1] == (INTERFACE_NAME,)) or repr(INTERFACE_NAME) in str(error)


def _build_error(config: PretrainedConfig, error: Exception) -> ConfigError:
    unknown = error.args[0] if isinstance(error, KeyError) and error.args else None
    field = place_of(unknown, config.to_dict())
    return ConfigError(
        f"{type(config).__name__} does not build a model: {type(error).__name__}: {error}",
        where=f"config.json: {field}" if field else "config.json",
        found=f"{unknown!r}, which Transformers does not know" if field else None,
        remedy="Compare config.json with the one the model was published with",
    )


def _spare_the_warning(model: PreTrainedModel) -> None:
    """Keep Transformers from looking for padding among the tokens of every call, only to warn of a missing mask.

    An engine has no padding, and looking reads values, which meta tensors have not and a GPU would have to wait for.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module)["warn_if_padding_and_no_attention_mask"] = _no_warning


def _no_warning(*_: Any) -> None:
    """Stands in for the warning."""


def _has_causal_class(config: PretrainedConfig) -> bool:
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return True
    return type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def _set_interfaces(config: PretrainedConfig) -> None:
    _set_attention(config, INTERFACE_NAME)
    config.get_text_config()._experts_implementation = INTERFACE_NAME


def _set_attention(config: PretrainedConfig, name: str) -> None:
    config._attn_implementation = name
    text = config.get_text_config()
    if text is not config:
        text._attn_implementation = name


def _restore_window(config: PretrainedConfig) -> None:
    """Put back the 0 by which some classes say "no window": vLLM makes it None, which their masks refuse."""
    text = config.get_text_config()
    if getattr(text, "sliding_window", 0) is None and getattr(text, "use_sliding_window", True) is False:
        text.sliding_window = getattr(type(text)(use_sliding_window=False), "sliding_window", None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_config(config: PretrainedConfig) -> None:
    """Refuse values that no model can have, before they turn into an error deep inside a layer.

    Raises:
        ConfigError: a number is NaN or infinite, or a size is zero or negative.
    """
    text = config.get_text_config()
    check_numbers(text.to_dict())
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    for layer in layers:  # a config whose layers differ in a size refuses to name that size for all of them
        check_sizes({name: getattr(layer, name, None) for name in SIZES})


def _places_of_base(model: PreTrainedModel) -> tuple[str, str, None, bool]:
    """As `_places`, where the whole model is the base model."""
    return "", _embedding_path(model, needed=False), None, False


def _places(model: PreTrainedModel, *, generates: bool) -> tuple[str, str, str | None, bool]:
    base = _base_of(model)
    base_path = "" if base is model else next(name for name, module in model.named_modules() if module is base)
    embedding_path = _embedding_path(model, needed=generates)
    head = model.get_output_embeddings() if base is not model else None
    if head is None and base is not model:
        head = _widest_linear_outside(model, base)
    head_path = next((name for name, module in model.named_modules() if module is head), None) if head else None
    tied = bool(head_path) and _is_tied(model, head_path or "")
    return base_path, embedding_path, head_path, tied


def _input_embedding(model: PreTrainedModel) -> nn.Module | None:
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def _embedding_path(model: PreTrainedModel, *, needed: bool) -> str:
    embedding = _input_embedding(model)
    paths = [name for name, module in model.named_modules() if module is embedding]
    if not paths and not needed:
        return ""
    if not paths:
        raise UnsupportedModelError(
            "The model names no input embedding.",
            where=type(model).__name__,
            needed="get_input_embeddings() to return a module of the model",
            remedy="Define get_input_embeddings in the modelling file",
        )
    return str(paths[0])


def _base_of(model: PreTrainedModel) -> Any:
    """The base model; where a class names another prefix than the attribute it is at, the one child that embeds."""
    base: Any = model.base_model
    head, embedding = model.get_output_embeddings(), _input_embedding(model)
    if base is not model or head is None:
        return base
    within = [child for child in model.children() if any(m is embedding for m in child.modules())]
    good = (
        len(within) == 1 and isinstance(within[0], PreTrainedModel) and all(m is not head for m in within[0].modules())
    )
    return within[0] if good else base


def _widest_linear_outside(model: PreTrainedModel, base: nn.Module) -> nn.Module | None:
    inside = {id(module) for module in base.modules()}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    return max(linears, key=lambda linear: linear.out_features, default=None)


def _is_tied(model: PreTrainedModel, head_path: str) -> bool:
    keys = model._tied_weights_keys or {}
    names = keys.keys() if isinstance(keys, dict) else keys
    wanted = getattr(model.config, "tie_word_embeddings", False) or getattr(
        model.config.get_text_config(), "tie_word_embeddings", False
    )
    return bool(wanted) and any(name == f"{head_path}.weight" for name in names)


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the config of a folder or a Hub id.

    Raises:
        ConfigError: there is none, it is not JSON, or its model_type is unknown to Transformers.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, json.JSONDecodeError, StrictDataclassError) as error:
        raise ConfigError(f"The config cannot be read: {error}", where=path) from error
    assert isinstance(config, PretrainedConfig)
    return config
