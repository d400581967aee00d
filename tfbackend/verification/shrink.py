"""A tiny config of the same architecture: sizes shrink, everything else stays as it is given.

What decides how the model computes (activations, norms, biases, caps, scalings, kinds of layers, how heads share keys)
is kept; windows shrink below the length of the prompts, so that they are seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 500
HIDDEN = 128
HEADS = 4
HEAD = 32
WINDOW = 16
CONTEXT = 512
_LAYERS = 2


def _most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


# The first pattern that matches the whole name of an integer field decides; others are kept.
_RULES: Sequence[tuple[str, Callable[[int], int]]] = (
    (r"kv_lora_rank", _most(512)),
    (r"q_lora_rank|qk_(nope|rope)_head_dim|v_head_dim|index_head_dim", _most(64)),
    (r"(\w+_)?vocab_size(_\w+)?", _most(VOCABULARY)),
    (r"moe_\w*intermediate_size|shared_\w*intermediate_size|expert_ffn_hidden_size", _most(64)),
    (r"(\w+_)?(intermediate_size|ffn_dim|ffn_hidden_size)|n_inner|dff", _most(192)),
    (r"(\w+_)?hidden_size|d_model|n_embd|word_embed_proj_dim|lru_width", _most(HIDDEN)),
    (r"(num_|n_)(local_|routed_)?experts|moe_num_experts", _most(8)),
    (r"num_experts_per_tok|moe_topk|moe_k|moe_top_k|top_k_experts|n_group|num_expert_group", _most(2)),
    (r"topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace", _most(1)),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|model_max_length", _most(CONTEXT)),
    (r"sliding_window(_size)?|window_size|attention_window_size|attention_chunk_size|local_attention", _most(WINDOW)),
    (r"max_window_layers", _most(_LAYERS)),
)
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_HEAD_SIZES = ("head_dim", "kv_channels", "attention_head_size")
_TOKENS = re.compile(r".*_token_(id|index)")


def shrink_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a tiny config of the same class; `config` is left alone."""
    values = shrink_values(config.to_dict())
    values.pop("quantization_config", None)
    values.pop("torch_dtype", None)
    return type(config).from_dict(values | {"dtype": "float32"})


def shrink_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config, shrunk; a sub-config is shrunk by itself."""
    layers = _layers(values)
    shrunk = {name: _shrink(name, value, values, layers) for name, value in values.items()}
    shrunk |= _heads(values)
    return shrunk


def _shrink(name: str, value: Any, values: Mapping[str, Any], layers: int) -> Any:
    if name in _LAYER_COUNTS:
        return layers if isinstance(value, int) else value
    if name.startswith("rope_"):
        return _shrink_rope(name, value, values)
    if isinstance(value, dict):
        return shrink_values(value) if name.endswith("_config") and name != "quantization_config" else value
    if isinstance(value, list) and len(value) == _layer_count(values):
        return _pick(value, layers)
    if _TOKENS.fullmatch(name):
        return _token(value)
    if isinstance(value, int) and not isinstance(value, bool):
        rule = next((rule for pattern, rule in _RULES if re.fullmatch(pattern, name)), None)
        return rule(value) if rule else value
    return value


def _token(value: Any) -> Any:
    """A special token beyond the small vocabulary becomes one within."""
    if isinstance(value, list):
        return [_token(item) for item in value]
    return 1 if isinstance(value, int) and value >= VOCABULARY else value


def _layer_count(values: Mapping[str, Any]) -> int:
    return next((int(values[n]) for n in _LAYER_COUNTS if isinstance(values.get(n), int)), 0)


def _layers(values: Mapping[str, Any]) -> int:
    """Two layers of each kind that a list of the config tells apart, or that comes up at a regular distance."""
    count = _layer_count(values)
    kinds = [
        len(set(map(str, value)))
        for name, value in values.items()
        if isinstance(value, list) and len(value) == count and not name.endswith("_factor")
    ]
    return min(count, _LAYERS * max([k for k in kinds if k <= 4], default=1)) if count else 0


def _pick(items: list[Any], length: int) -> list[Any]:
    """`length` entries that take each kind in turn, in the order of their first use."""
    distinct = list({str(item): item for item in items}.values())
    return [distinct[i % len(distinct)] for i in range(length)]


def _heads(values: Mapping[str, Any]) -> dict[str, int]:
    """Few heads that share keys as the given ones do: all one, each its own, or some."""
    found: dict[str, int] = {}
    heads = next((values[n] for n in _HEAD_COUNTS if isinstance(values.get(n), int)), None)
    for name in _HEAD_COUNTS:
        if isinstance(values.get(name), int):
            found[name] = HEADS
    for name in _KV_COUNTS:
        if isinstance(kv := values.get(name), int):
            found[name] = 1 if kv == 1 else HEADS if kv == heads else HEADS // 2
    if values.get("kv_lora_rank"):
        found |= {name: HEADS for name in _KV_COUNTS if name in values}
    for name in _HEAD_SIZES:
        if isinstance(values.get(name), int):
            found[name] = _head_size(values)
    return found


def _head_size(values: Mapping[str, Any]) -> int:
    """Larger than hidden size / heads where the given one is not that quotient, so that the two differ here too."""
    size = next((values[n] for n in _HEAD_SIZES if isinstance(values.get(n), int)), None)
    hidden = values.get("hidden_size")
    heads = next((values[n] for n in _HEAD_COUNTS if isinstance(values.get(n), int)), None)
    if size is None or hidden is None or heads is None or size * heads == hidden:
        return HEAD
    return 2 * HEAD


def _shrink_rope(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Rotary parameters whose original maximum the prompts come near to, with as many factors as the head has pairs."""
    if not isinstance(value, dict):
        return value
    shrunk = {key: _shrink_rope(name, item, values) for key, item in value.items()}
    if isinstance(shrunk.get("original_max_position_embeddings"), int):
        shrunk["original_max_position_embeddings"] = min(64, shrunk["original_max_position_embeddings"])
    share = value.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    for key in ("short_factor", "long_factor"):
        if isinstance(factors := shrunk.get(key), list):
            shrunk[key] = _resample(factors, int(_head_size(values) * share) // 2)
    return shrunk


def _resample(items: list[Any], length: int) -> list[Any]:
    return [items[i * len(items) // length] for i in range(length)]
