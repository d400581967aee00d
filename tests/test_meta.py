"""A config becomes a model on meta, or one clear error."""

import json
import math

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

from tfbackend.errors import ConfigError, TfbackendError, UnsupportedModelError
from tfbackend.graph.observe import observe
from tfbackend.meta import INTERFACE_NAME, build, check_config, load_config

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**fields):
    return LlamaConfig(**{**SIZES, **fields})


def test_parameters_are_on_meta_in_the_asked_dtype_and_buffers_are_real():
    meta = build(llama(), torch.bfloat16)
    assert {p.device.type for p in meta.model.parameters()} == {"meta"}
    assert {p.dtype for p in meta.model.parameters()} == {torch.bfloat16}
    buffers = dict(meta.model.named_buffers())
    assert {b.device.type for b in buffers.values()} == {"cpu"}
    inverse = buffers["model.rotary_emb.inv_freq"]
    # base 10000, heads of 16: frequency i is 10000 ** (-i / 8)
    wanted = torch.tensor([10000.0 ** (-i / 8) for i in range(8)])
    torch.testing.assert_close(inverse, wanted)


def test_the_config_is_left_as_it_was():
    config = llama()
    before = config.to_dict()
    meta = build(config, torch.float32)
    assert config.to_dict() == before
    assert meta.model.config._attn_implementation == INTERFACE_NAME
    assert meta.model.config.use_cache is False


def test_default_dtype_comes_back_also_after_an_error():
    build(llama(), torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ConfigError):
        build(llama(pad_token_id=1 << 20), torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32


def test_model_is_in_evaluation():
    assert not any(module.training for module in build(llama(), torch.float32).model.modules())


@pytest.mark.parametrize(
    ("config", "places"),
    [
        (llama(), ("model", "model.embed_tokens", "lm_head", False)),
        (llama(tie_word_embeddings=True), ("model", "model.embed_tokens", "lm_head", True)),
        (
            GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=64),
            ("transformer", "transformer.wte", "lm_head", True),
        ),
        (
            OPTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, ffn_dim=96, vocab_size=64),
            ("model", "model.decoder.embed_tokens", "lm_head", True),
        ),
        (
            CONFIG_MAPPING["gpt_neox"](
                hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
            ),
            ("gpt_neox", "gpt_neox.embed_in", None, False),
        ),
    ],
)
def test_places(config, places):
    meta = build(config, torch.float32)
    base, embedding, head, tied = places
    assert (meta.base_path, meta.embedding_path, meta.tied) == (base, embedding, tied)
    assert meta.head_path == (head or meta.head_path)
    assert isinstance(meta.model.get_submodule(meta.head_path), torch.nn.Linear)
    assert meta.base is meta.model.get_submodule(base)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": math.nan}}, "rope_parameters.factor"),
    ],
)
def test_numbers_that_are_none_are_named(fields, word):
    with pytest.raises(ConfigError, match=word):
        check_config(llama(**fields))


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_that_are_none_are_named(name, value):
    config = llama()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=name):
        check_config(config)


def test_heads_that_do_not_divide():
    config = llama()
    config.num_key_value_heads = 3
    with pytest.raises(ConfigError, match="4 query heads, 3 KV heads"):
        check_config(config)


def test_what_a_class_cannot_be_built_with_is_a_config_error():
    config = llama()
    config.hidden_act = "no_such_activation"
    with pytest.raises(ConfigError, match="no_such_activation"):
        build(config, torch.float32)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"model_type": "no_such_model"}'),
        '{"model_type": "llama", "initializer_range": -1}',
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}',
    ],
)
def test_config_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TfbackendError, match=tmp_path.name):
        load_config(str(tmp_path))


def test_folder_without_a_config(tmp_path):
    with pytest.raises(ConfigError, match=tmp_path.name):
        load_config(str(tmp_path))


def test_config_of_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama().to_dict()))
    assert load_config(str(tmp_path)).hidden_size == 64


def per_layer(head_dim):
    types = ["sliding_attention", "full_attention"]
    fields = SIZES | {"num_hidden_layers": 2, "layer_types": types, "head_dim": 32, "global_head_dim": head_dim}
    return CONFIG_MAPPING["gemma4_text"](**fields)


def test_a_config_whose_layers_differ_in_a_size_is_checked_layer_by_layer():
    check_config(per_layer(64))
    with pytest.raises(ConfigError, match="head_dim"):
        check_config(per_layer(0))


@pytest.mark.parametrize("model_type", ["gptj", "falcon", "gpt_neo"])
def test_models_with_attention_classes_of_their_own_are_built_with_the_plainest(model_type):
    """Their tables of classes have no entry for us; afterwards masks and dispatch are ours all the same."""
    with torch.device("meta"):
        eager = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](), attn_implementation="eager")
    meta = build(CONFIG_MAPPING[model_type](), torch.float32)
    assert [type(m) for m in meta.model.modules()] == [type(m) for m in eager.modules()]
    assert meta.model.config._attn_implementation == INTERFACE_NAME
    assert {m.config._attn_implementation for m in meta.model.modules() if hasattr(m, "config")} == {INTERFACE_NAME}


def test_a_padding_token_is_not_looked_for():
    """GPT2Model reads the tokens of a call to warn of padding once its config names a padding token."""
    config = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    assert not observe(build(config, torch.float32).base).problem


def test_a_window_of_zero_that_vllm_took_away_is_put_back():
    """vLLM sets a sliding_window of 0 to None; Qwen2MoeModel makes a mask with a window in every call, used or not."""
    config = Qwen2MoeConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    assert config.sliding_window == 0
    config.sliding_window = None
    assert observe(build(config, torch.float32).base).problem == ""
    plain = Qwen2Config(use_sliding_window=False, num_hidden_layers=1)
    assert build(plain, torch.float32).model.config.sliding_window is None


def test_a_config_of_another_class_than_the_checkpoint_names_is_refused():
    """vLLM reads deepseek_v32's config.json with DeepSeek-V3's class, which makes DeepSeek-V3."""
    config = LlamaConfig(**SIZES, architectures=["MistralForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="another model"):
        build(config, torch.float32)
    for named in (["LlamaForCausalLM"], ["LlamaModel"], ["OwnForCausalLM"], None):
        config.architectures = named
        assert type(build(config, torch.float32).model).__name__ == "LlamaForCausalLM"


def test_a_class_that_cannot_name_its_embedding_has_none():
    """canine hashes characters into several tables, and raises an error when it is asked for one."""
    made = build(CONFIG_MAPPING["canine"](**SMALL_CANINE), torch.float32, task="classify")
    assert (made.embedding_path, made.base_path) == ("", "canine")


SMALL_CANINE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hash_buckets": 16,
}


@pytest.mark.parametrize(
    ("task", "named", "made"),
    [
        ("generate", None, "LlamaForCausalLM"),
        ("embed", "LlamaForCausalLM", "LlamaModel"),
        ("classify", "LlamaForSequenceClassification", "LlamaForSequenceClassification"),
        ("classify", "LlamaForTokenClassification", "LlamaForTokenClassification"),
        ("classify", None, "LlamaForSequenceClassification"),
    ],
)
def test_the_task_says_which_class_is_built(task, named, made):
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config.architectures = [named] if named else None
    meta = build(config, torch.float32, task=task)
    assert (type(meta.model).__name__, meta.task) == (made, task)
    assert type(meta.base).__name__ == "LlamaModel"
    assert (meta.head_path is None) is (task != "generate")


def test_a_config_without_a_classifier_is_refused():
    config = CONFIG_MAPPING["ctrl"](n_embd=32, n_layer=1, n_head=4, dff=48)
    config.architectures = ["CTRLForTokenClassification"]
    with pytest.raises(UnsupportedModelError, match="no model ForTokenClassification"):
        build(config, torch.float32, task="classify")
