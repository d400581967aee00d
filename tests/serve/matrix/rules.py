"""Rules that shrink a config class: the name and the default of a field give its tiny value.

The values are those of tests/serve/configs.py: windows shorter than the prompts, multipliers that are not 1, biases on,
soft caps within the range of the logits. What no rule can know is in overrides.py.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from tests.serve.configs import MAX_LEN, WINDOW

VOCAB = 500
LAYERS = 2
HIDDEN = 128
HEADS = 4

Rule = tuple[str, Callable[[Any], Any]]


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _at_most(limit: int) -> Callable[[Any], Any]:
    return lambda default: min(default, limit) if isinstance(default, int) else default


def _unless_none(value: Any) -> Callable[[Any], Any]:
    return lambda default: default if default is None else value


def _if_one(value: float) -> Callable[[Any], Any]:
    """Move a multiplier off 1, where leaving it out could not be seen."""
    return lambda default: value if isinstance(default, float) and default == 1 else default


def _if_number(value: Any) -> Callable[[Any], Any]:
    return lambda default: value if isinstance(default, (int, float)) and not isinstance(default, bool) else default


def _token(default: Any) -> Any:
    """A special token of a large vocabulary becomes one that no prompt holds."""
    return 1 if isinstance(default, int) and default >= VOCAB else default


def _true(default: Any) -> Any:
    return True if default is False else default


# The first pattern that matches the whole name decides.
RULES: Sequence[Rule] = (
    (r"pad_token_id", _constant(0)),
    (r"bos_token_id", _constant(1)),
    (r"eos_token_id", _constant(2)),
    (r".*_token_(id|index)", _token),
    (r"type_vocab_size|task_type_vocab_size", _constant(...)),
    (r"(\w+_)?vocab_size(_\w+)?", _unless_none(VOCAB)),
    # sizes
    (r"index_head_dim", _constant(64)),
    (r"index_topk", _constant(MAX_LEN // 2)),  # as long as the contexts of the matrix: nothing is left out
    (r"kv_lora_rank", _constant(512)),
    (r"q_lora_rank", _constant(64)),
    (r"qk_(nope|rope)_head_dim", _constant(64)),
    (r"v_head_dim", _unless_none(64)),
    (r"head_dim|swa_head_dim|dim_head|kv_channels", _constant(64)),
    (r"attention_head_size", _constant(32)),
    (r"linear_(key|value)_head_dim|linear_head_dim", _constant(32)),
    (r"linear_num_key_heads", _constant(2)),
    (r"linear_num_(value_)?heads", _constant(4)),
    (r"(mamba_)?(d_ssm|d_head|d_state)|ssm_state_size|state_size", _constant(32)),
    (r"mamba_(n|num)_heads", _constant(8)),
    (r"mamba_head_dim", _constant(32)),
    (r"(mamba_)?n_groups", _constant(2)),
    (r"(mamba_)?chunk_size|block_size", _constant(WINDOW)),
    (r"time_step_rank|mamba_dt_rank", _constant(8)),
    (r"rotary_dim", _constant(16)),
    (r"moe_\w*intermediate_size|shared_\w*intermediate_size|expert_ffn_hidden_size", _unless_none(64)),
    (r"(\w+_)?(intermediate_size|ffn_dim|ffn_hidden_size|mid_dim)(_\w+)?|n_inner|dff|dim_ff|feed_forward_size",
     _constant(192)),
    (r"embedding_size|input_embedding_size|output_embedding_size|(\w+_)?embed_dim", _constant(64)),
    (r"hidden_size_per_layer_input", _constant(32)),
    (r"(\w+_)?hidden_size|d_model|n_embd|word_embed_proj_dim|lru_width|attention_hidden_size", _unless_none(HIDDEN)),
    (r"num_(key_value_heads|kv_heads)|swa_num_key_value_heads|kv_n_heads", _constant(2)),
    (r"(num|n)_heads?|((num|n|\w+)_)?attention_heads|index_n_heads", _constant(HEADS)),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers", _constant(...)),
    (r"num_layers_per_stack", _constant(LAYERS)),
    (r"(num_|n_)?(\w+_)?layers?", _if_number(LAYERS)),
    (r"max_(position_embeddings|seq_len)|n_positions|n_ctx|seq_length|model_max_length|context_length|"
     r"(original_)?max_position_embeddings", _constant(MAX_LEN)),
    (r"sliding_window(_size)?|window_size|attention_window_size|attention_chunk_size|local_attention|"
     r"floor_scale|rel_extent",
     _constant(WINDOW)),
    # experts
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", _if_number(8)),
    (r"(num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts)", _constant(2)),
    (r"n_group|num_expert_group", _unless_none(2)),
    (r"topk_group", _unless_none(1)),
    (r"first_k_dense_replace|num_dense_layers", _at_most(1)),
    (r"(num|n)_shared_experts", _at_most(1)),
    # what would be invisible at its default
    (r"(\w*bias|use_bias|use_qkv_bias)", _true),
    (r"attention_multiplier", _constant(0.4)),
    (r"\w*_multiplier|logits_scaling|routed_scaling_factor|route_scale", _if_one(0.6)),
    (r"\w*(softcapping|soft_cap)", _constant(3.0)),
    (r"logit_scale", _if_number(0.4)),
    (r"query_pre_attn_scalar", _constant(24)),
    (r"\w*(dropout|pdrop|layerdrop)\w*", _if_number(0.1)),
    (r"is_decoder", _constant(True)),
)  # fmt: skip

# Chosen by name although a rule above would turn it on: a bias the class adds to something else than a linear's output.
_LEFT = re.compile(r"conv_bias|mamba_\w*_bias|use_conv_bias|use_expert_bias|classifier_bias|decoder_bias|norm_bias")


def shrink_field(name: str, default: Any) -> Any:
    """Return the tiny value of a field, ``...`` where no rule speaks of it: then it is left to the class.

    A field whose rule agrees with its default is named all the same: the class may derive the default from others.
    """
    if _LEFT.fullmatch(name):
        return ...
    for pattern, value in RULES:
        if re.fullmatch(pattern, name):
            return value(default)
    return ...


def shrink_types(kinds: Sequence[str], length: int) -> list[str]:
    """Return ``length`` entries that take each kind in turn, in the order of their first use."""
    distinct = list(dict.fromkeys(kinds))
    return [distinct[i % len(distinct)] for i in range(length)]


def shrink_blocks(kinds: Sequence[str], length: int) -> list[str]:
    """Return ``length`` entries in one run for each kind, so that they pair up with those that alternate."""
    distinct = list(dict.fromkeys(kinds))
    return [distinct[i * len(distinct) // length] for i in range(length)]


def shrink_rope(rope: Any) -> Any:
    """Return rope parameters whose original maximum the longer prompts exceed."""
    if not isinstance(rope, dict):
        return rope
    shrunk = {key: shrink_rope(value) for key, value in rope.items()}
    if shrunk.get("original_max_position_embeddings"):
        shrunk["original_max_position_embeddings"] = 2 * WINDOW
    return shrunk
