"""Derives the tiny config of any architecture of the causal-LM mapping from its own config class."""

import dataclasses
from functools import cache
from typing import Any

from tests.serve.configs import VARIANTS as CONFIGS
from tests.serve.matrix.overrides import OVERRIDES, VARIANTS
from tests.serve.matrix.rules import HEADS, LAYERS, shrink_blocks, shrink_field, shrink_rope, shrink_types

# What every config has: not the model's to choose, or derived from other fields.
_COMMON = frozenset(
    "transformers_version architectures output_hidden_states output_attentions return_dict dtype is_encoder_decoder "
    "chunk_size_feed_forward id2label label2id problem_type use_cache initializer_range _name_or_path".split()
)


@cache
def architectures() -> tuple[str, ...]:
    """Every ``model_type`` that the installed Transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_type_of(name: str) -> str:
    """The architecture that a name of the matrix stands for: "falcon+alibi" is a variant of "falcon"."""
    return name.partition("+")[0]


def tiny_config(name: str) -> Any:
    """Return a tiny config of an architecture or of a variant of one.

    An architecture of tests/serve/configs.py has the fields it has there; the others follow the rules.
    """
    from transformers import CONFIG_MAPPING

    model_type = model_type_of(name)
    config_class = CONFIG_MAPPING[model_type]
    if name in CONFIGS:
        fields = dict(CONFIGS[name].fields)
    else:
        fields = shrunk_fields(config_class, OVERRIDES.get(model_type, {}) | VARIANTS.get(name, {}))
    return config_class(**fields, dtype="float32")


def shrunk_fields(config_class: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor's keywords for a tiny config of the class: what the rules and the overrides change.

    An override of ``...`` leaves a field to the class; a dict for a sub-config holds overrides of its fields.
    """
    values = _defaults(config_class, overrides)
    subs = {name: type(value) for name, value in values.items() if _is_config(value)}
    fields = {name: shrink_field(name, value) for name, value in values.items() if name not in subs}
    if fields.get("kv_lora_rank"):  # latent attention has a key and a value for each query head
        fields["num_key_value_heads"] = HEADS
    fields |= _layered(values, overrides.get("num_hidden_layers"))
    fields |= overrides
    for name, sub_class in subs.items():
        own = overrides.get(name, {})
        fields[name] = sub_class(**shrunk_fields(sub_class, own)) if isinstance(own, dict) else own
    return {name: value for name, value in fields.items() if value is not ...}


def _is_config(value: Any) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _defaults(config_class: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Every field of the class with its default; overridden sub-configs are made even if the class would not."""
    made = {name: sub() for name, sub in config_class.sub_configs.items() if _may_make(sub, overrides.get(name))}
    default = config_class(**made)
    named = {field.name for field in dataclasses.fields(config_class)} - _COMMON
    # vars, not getattr: some classes refuse to name one value where it differs by layer
    return {name: value for name, value in sorted(vars(default).items()) if name in named}


def _may_make(sub_class: Any, override: Any) -> bool:
    return isinstance(override, dict) and dataclasses.is_dataclass(sub_class)


def _layered(values: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """Return the fields that have an entry for each layer, at least two layers of each kind, and the layer number."""
    types, blocks = values.get("layer_types"), values.get("mlp_layer_types")
    length = layers or max(LAYERS * len(set(kinds or ())) for kinds in (types, blocks, "."))
    fields: dict[str, Any] = {}
    if types:
        fields["layer_types"] = shrink_types(types, length)
    if blocks:
        fields["mlp_layer_types"] = shrink_blocks(blocks, length)
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(values.get(name), int):
            fields[name] = length
    for name, value in values.items():
        if name not in fields and isinstance(value, (list, tuple)) and len(value) == values.get("num_hidden_layers"):
            fields[name] = [item if (tiny := shrink_field(name, item)) is ... else tiny for item in value[:length]]
    if isinstance(values.get("rope_parameters"), dict):
        fields["rope_parameters"] = shrink_rope(values["rope_parameters"])
    return fields
