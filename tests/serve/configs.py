"""The tiny configurations, as data: every flag that changes what a model computes is set so that it shows.

A default is often trivial: a multiplier of 1, no bias, no soft cap, a window longer than any prompt. Here the windows
(16) are shorter than the longest prompts, the soft caps lie within the range of the logits, no scale is 1, biases
exist and dropout is not 0 (a model left in training mode must fail). ``shows`` names for each such field the trivial
value that a careless backend would serve; tests/serve/test_tiny.py checks that Transformers tells the two apart.

Layers come at least in pairs of each type where their types differ. ``head_dim`` differs from
``hidden_size / num_attention_heads`` wherever the model lets it.
"""

from dataclasses import dataclass, field
from typing import Any

WINDOW = 16
MAX_LEN = 512
S, F = "sliding_attention", "full_attention"
MIXED = [S, F, S, F]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}


@dataclass(frozen=True)
class Variant:
    """One tiny model: its name, ``model_type``, config fields, and the trivial values that must be told apart."""

    name: str
    model_type: str
    fields: dict[str, Any]
    shows: dict[str, Any] = field(default_factory=dict)

    @property
    def main(self) -> bool:
        """Whether this is the variant that stands for its architecture."""
        return self.name == self.model_type


_COMMON = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(theta: float = 1000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | more


class _Table:
    """Collects variants; a variant inherits the fields of its architecture's main one."""

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}

    def main(self, model_type: str, shows: dict[str, Any] | None = None, **fields: Any) -> None:
        merged = {key: value for key, value in (_COMMON | fields).items() if value is not ...}
        self.variants[model_type] = Variant(model_type, model_type, merged, shows or {})

    def variant(self, name: str, shows: dict[str, Any] | None = None, **fields: Any) -> None:
        base = self.variants[name.split("-")[0]]
        self.variants[name] = Variant(name, base.model_type, base.fields | fields, shows or {})


_t = _Table()

# fmt: off
_t.main("llama", head_dim=64, rope_parameters=LLAMA3_ROPE, rms_norm_eps=0.05,
        shows={"rope_parameters": _rope(5e4), "rms_norm_eps": 1e-6})
_t.variant("llama-bias", attention_bias=True, mlp_bias=True)
_t.variant("llama-tied", tie_word_embeddings=True, num_key_value_heads=4)
_t.variant("llama-gelu", hidden_act="gelu", shows={"hidden_act": "gelu_pytorch_tanh"})
_t.variant("llama-gelutanh", hidden_act="gelu_pytorch_tanh", shows={"hidden_act": "gelu"})
_t.variant("llama-relu", hidden_act="relu")
_t.variant("llama-yarn", rope_parameters=YARN_ROPE, shows={"rope_parameters": _rope(1e4)})
_t.variant("llama-linear", rope_parameters=_rope() | {"rope_type": "linear", "factor": 4.0},
           shows={"rope_parameters": _rope()})
_t.variant("llama-dynamic", rope_parameters=_rope() | {"rope_type": "dynamic", "factor": 4.0})
_t.main("mistral", head_dim=64, sliding_window=WINDOW, rope_parameters=_rope(), shows={"sliding_window": None})
_t.variant("mistral-full", sliding_window=None, tie_word_embeddings=True)
_t.main("qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2,
        rope_parameters=_rope(), shows={"layer_types": [F] * 4})
_t.variant("qwen2-full", use_sliding_window=False, layer_types=[F] * 4, tie_word_embeddings=True)
_t.main("qwen3", head_dim=64, rope_parameters=YARN_ROPE, rms_norm_eps=1e-3, shows={"rope_parameters": _rope(1e4)})
_t.variant("qwen3-bias", attention_bias=True, tie_word_embeddings=True)
_t.variant("qwen3-sliding", num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED,
           shows={"layer_types": [F] * 4})
_t.main("gemma", head_dim=64, num_key_value_heads=1, rope_parameters=_rope(), hidden_act="gelu_pytorch_tanh",
        shows={"hidden_act": "silu"})
_t.variant("gemma-gqa", num_key_value_heads=2, attention_bias=True)
_t.main("gemma2", head_dim=64, num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW, rope_parameters=_rope(),
        query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        shows={"layer_types": [F] * 4, "query_pre_attn_scalar": 64, "attn_logit_softcapping": None,
               "final_logit_softcapping": None})
_t.variant("gemma2-nocap", attn_logit_softcapping=None, final_logit_softcapping=None)
_t.variant("gemma2-bias", attention_bias=True, tie_word_embeddings=False)
_GEMMA3_ROPE = {F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}, S: _rope(100.0)}
_t.main("gemma3_text", head_dim=64, num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW,
        query_pre_attn_scalar=24, final_logit_softcapping=3.0, rope_parameters=_GEMMA3_ROPE,
        shows={"layer_types": [F] * 4, "query_pre_attn_scalar": 64, "final_logit_softcapping": None,
               "rope_parameters": {F: _rope(1e4), S: _rope(1e4)}})
_t.variant("gemma3_text-nocap", final_logit_softcapping=None, attention_bias=True)
_PHI_ROPE = _rope(partial_rotary_factor=0.5)
_PHI_DROP = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
_t.main("phi", rope_parameters=_PHI_ROPE, hidden_act="gelu_new", hidden_size=256, **_PHI_DROP,
        shows={"rope_parameters": _rope(partial_rotary_factor=1.0), "hidden_act": "gelu"})
_t.variant("phi-qknorm", qk_layernorm=True)
_t.main("phi3", rope_parameters=_rope(partial_rotary_factor=0.75), hidden_size=256, sliding_window=WINDOW, **_PHI_DROP,
        original_max_position_embeddings=MAX_LEN,
        shows={"rope_parameters": _rope(partial_rotary_factor=1.0), "sliding_window": None})
_t.variant("phi3-full", sliding_window=None, rope_parameters=_rope(partial_rotary_factor=1.0), tie_word_embeddings=True)
_LONG = {"rope_type": "longrope", "original_max_position_embeddings": MAX_LEN,
         "short_factor": [1.0 + 0.05 * i for i in range(24)], "long_factor": [1.5 + 0.2 * i for i in range(24)]}
_t.variant("phi3-longrope", sliding_window=None, max_position_embeddings=4 * MAX_LEN,
           rope_parameters=_rope(partial_rotary_factor=0.75) | _LONG,
           shows={"rope_parameters": _rope(partial_rotary_factor=0.75)})
_t.main("olmo2", rope_parameters=_rope(), attention_bias=True, rms_norm_eps=1e-3, shows={"rms_norm_eps": 1e-1})
_t.variant("olmo2-mha", num_key_value_heads=4, attention_bias=False, tie_word_embeddings=True)
_t.main("olmo3", num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW,
        rope_parameters={F: YARN_ROPE, S: _rope(1e4)},
        shows={"layer_types": [F] * 4, "rope_parameters": {F: _rope(1e4), S: _rope(1e4)}})
_t.variant("olmo3-onerope", rope_parameters={F: _rope(), S: _rope()}, attention_bias=True)
_t.main("cohere", logit_scale=0.4, use_qk_norm=True, rope_parameters=_rope(), layer_norm_eps=1e-2,
        shows={"logit_scale": 1.0, "layer_norm_eps": 1e-1})
_t.variant("cohere-plain", use_qk_norm=False, attention_bias=True, tie_word_embeddings=False)
_t.main("cohere2", logit_scale=0.4, num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW,
        rope_parameters=_rope(), shows={"logit_scale": 1.0, "layer_types": [S] * 4})
_t.variant("cohere2-bias", attention_bias=True)
_t.main("glm", head_dim=64, rope_parameters=_PHI_ROPE, attention_bias=True,
        shows={"rope_parameters": _rope(partial_rotary_factor=1.0)})
_t.variant("glm-nobias", attention_bias=False, tie_word_embeddings=True)
_t.main("glm4", head_dim=64, rope_parameters=_PHI_ROPE, attention_bias=True,
        shows={"rope_parameters": _rope(partial_rotary_factor=1.0)})
_t.variant("glm4-nobias", attention_bias=False, tie_word_embeddings=True)
_t.main("granite", rope_parameters=_rope(), embedding_multiplier=6.0, logits_scaling=3.0, residual_multiplier=0.3,
        attention_multiplier=0.4, attention_bias=True, mlp_bias=True,
        shows={"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
               "attention_multiplier": 32**-0.5})
_t.variant("granite-tied", attention_bias=False, mlp_bias=False, tie_word_embeddings=True)
_STABLE_ROPE = _rope(partial_rotary_factor=0.25)
_t.main("stablelm", use_qkv_bias=True, qk_layernorm=True, rope_parameters=_STABLE_ROPE, hidden_dropout=0.1,
        shows={"rope_parameters": _rope(partial_rotary_factor=1.0)})
_t.variant("stablelm-parallel", use_parallel_residual=True)
_t.variant("stablelm-plain", use_qkv_bias=False, qk_layernorm=False, tie_word_embeddings=True)
_t.main("starcoder2", sliding_window=WINDOW, rope_parameters=_rope(), use_bias=True, residual_dropout=0.1,
        embedding_dropout=0.1, norm_epsilon=1e-2, shows={"sliding_window": None, "norm_epsilon": 1e-5})
_t.variant("starcoder2-full", sliding_window=None, use_bias=False, tie_word_embeddings=False)
_t.main("gpt_neox", num_key_value_heads=..., rope_parameters=_STABLE_ROPE, hidden_size=256, hidden_dropout=0.1,
        hidden_act="gelu", shows={"rope_parameters": _rope(partial_rotary_factor=1.0), "use_parallel_residual": False,
               "hidden_act": "gelu_new"})
_t.variant("gpt_neox-sequential", use_parallel_residual=False)
_t.variant("gpt_neox-nobias", attention_bias=False, hidden_act="gelu_fast", tie_word_embeddings=True)
_t.main("opt", num_key_value_heads=..., intermediate_size=..., ffn_dim=192, activation_function="relu", dropout=0.1)
_t.variant("opt-proj", word_embed_proj_dim=64)
_t.variant("opt-postnorm", word_embed_proj_dim=64, do_layer_norm_before=False)
_t.variant("opt-nobias", enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu")
_t.variant("opt-nofinalnorm", _remove_final_layer_norm=True, tie_word_embeddings=False)
_t.main("smollm3", num_hidden_layers=4, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=WINDOW,
        attention_bias=True, mlp_bias=True, rope_parameters=_rope(),
        shows={"no_rope_layers": [1] * 4, "layer_types": [F] * 4})
_t.variant("smollm3-full", use_sliding_window=False, sliding_window=None, layer_types=[F] * 4, attention_bias=False,
           mlp_bias=False, tie_word_embeddings=False)
_t.main("nemotron", head_dim=64, rope_parameters=_PHI_ROPE, attention_bias=True, mlp_bias=True, norm_eps=1e-2,
        shows={"rope_parameters": _rope(partial_rotary_factor=1.0), "norm_eps": 1e-5, "hidden_act": "relu"})
_t.variant("nemotron-nobias", attention_bias=False, mlp_bias=False, tie_word_embeddings=True)
_t.main("helium", head_dim=32, attention_bias=True, mlp_bias=True, rope_parameters=_rope())
_t.variant("helium-nobias", attention_bias=False, mlp_bias=False, tie_word_embeddings=True)
_t.main("ernie4_5", attention_dropout=..., head_dim=64, use_bias=True, rope_parameters=_rope())
_t.variant("ernie4_5-nobias", use_bias=False, tie_word_embeddings=False)
_t.main("exaone4", num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW,
        rope_parameters=_rope(), shows={"layer_types": [S] * 4})
_t.variant("exaone4-full", sliding_window=None, layer_types=[F] * 4, tie_word_embeddings=True)
_t.main("hunyuan_v1_dense", head_dim=64, attention_bias=True,
        rope_parameters=_rope() | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        shows={"rope_parameters": _rope()})
_t.variant("hunyuan_v1_dense-default", rope_parameters=_rope(), attention_bias=False, tie_word_embeddings=True)
_t.main("apertus", rope_parameters=LLAMA3_ROPE, attention_bias=True, shows={"rope_parameters": _rope(5e4)})
_t.variant("apertus-nobias", attention_bias=False, tie_word_embeddings=True)
_t.main("seed_oss", head_dim=64, attention_bias=True, attention_out_bias=True, mlp_bias=True, rope_parameters=_rope(),
        residual_dropout=0.1)
_t.variant("seed_oss-nobias", attention_bias=False, attention_out_bias=False, mlp_bias=False, tie_word_embeddings=True)
_t.main("arcee", head_dim=64, attention_bias=True, mlp_bias=True, rope_parameters=_rope(), hidden_act="relu2",
        shows={"hidden_act": "relu"})
_t.variant("arcee-nobias", attention_bias=False, mlp_bias=False, rope_parameters=YARN_ROPE, tie_word_embeddings=True)
_t.main("ministral", head_dim=64, num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW,
        rope_parameters=_rope(), shows={"layer_types": [F] * 4, "sliding_window": 2 * WINDOW})
_t.variant("ministral-onewindow", layer_types=[S] * 4, tie_word_embeddings=True)
_t.main("biogpt", num_key_value_heads=..., attention_dropout=..., hidden_dropout_prob=0.1, layerdrop=0.1,
        activation_dropout=0.1, scale_embedding=True, shows={"scale_embedding": False})
_t.variant("biogpt-noscale", scale_embedding=False, hidden_act="relu", tie_word_embeddings=False)
_t.main("persimmon", num_key_value_heads=..., rope_parameters=_PHI_ROPE, hidden_dropout=0.1, qk_layernorm=True,
        shows={"rope_parameters": _rope(partial_rotary_factor=1.0), "hidden_act": "relu"})
_t.variant("persimmon-noqknorm", qk_layernorm=False, tie_word_embeddings=True)
_t.main("gpt_bigcode", hidden_size=..., num_hidden_layers=..., num_attention_heads=..., num_key_value_heads=...,
        intermediate_size=..., max_position_embeddings=..., attention_dropout=..., n_positions=MAX_LEN, n_embd=128,
        n_layer=2, n_head=4, n_inner=192, multi_query=True, activation_function="gelu_pytorch_tanh",
        shows={"scale_attn_weights": False, "activation_function": "gelu"})
_t.variant("gpt_bigcode-mha", multi_query=False)
_t.variant("gpt_bigcode-noscale", scale_attn_weights=False, activation_function="gelu")
_t.main("vaultgemma", head_dim=64, num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW,
        rope_parameters=_rope(), query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        shows={"layer_types": [F] * 4, "query_pre_attn_scalar": 64, "attn_logit_softcapping": None,
               "final_logit_softcapping": None})
_t.variant("vaultgemma-nocap", attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True)
# fmt: on

VARIANTS: dict[str, Variant] = _t.variants
ARCHITECTURES: tuple[str, ...] = tuple(name for name, variant in VARIANTS.items() if variant.main)
