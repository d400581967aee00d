"""What the engine is told of its cache, by the plan and not by the config alone."""

from types import SimpleNamespace

import pytest
from transformers import KimiLinearConfig

pytest.importorskip("vllm")

from tfbackend.adapt import cache_whole, hf_config, settle_cache
from tfbackend.layers.mla import HIDDEN_RANK, mla_sizes
from tfbackend.layerspecs import AttentionSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.serving import MLASizes

LATENT = MLASpec(4, MLASizes(512, 64, 128, 128), 0.1, "kv_b_proj")
WHOLE = AttentionSpec(4, 4, 192, 128, 0.1)


def settled(spec, device, block, use_mla=True, **text):
    """(tokens of a block, width of a head) that are left in the config of a model with such attention."""
    architecture = SimpleNamespace(head_size=64)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block),
        model_config=SimpleNamespace(
            use_mla=use_mla, model_arch_config=architecture, hf_text_config=SimpleNamespace(**text)
        ),
        device_config=SimpleNamespace(device_type=device),
    )
    settle_cache(config, SimpleNamespace(attention=iter([("layers.0.self_attn", spec)])))
    return config.cache_config.block_size, architecture.head_size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("block", [16, 64])
def test_blocks_of_latents_are_vllms_and_as_wide_as_what_is_cached(device, block):
    assert settled(LATENT, device, block) == (block, 512 + 64)


@pytest.mark.parametrize(
    ("device", "block", "left"), [("cpu", 16, 128), ("cpu", 64, 64), ("cuda", 16, 16), ("cuda", 64, 64)]
)
def test_blocks_of_whole_keys_and_values(device, block, left):
    assert settled(WHOLE, device, block) == (left, 64)


def test_blocks_that_are_not_for_latents_are_the_users():
    assert settled(WHOLE, "cpu", 16, use_mla=False) == (16, 64)


def with_state(device, config, use_mla=True):
    """The engine's config of a model with state and `config`, whose cache vLLM is about to set up."""
    model = SimpleNamespace(
        use_mla=use_mla, hf_config=config, hf_text_config=config, hf_config_path=None, model="elsewhere"
    )
    return SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type=device), lora_config=None)


@pytest.mark.parametrize(("device", "use_mla", "shown"), [("cpu", True, None), ("cpu", False, 96), ("cuda", True, 96)])
def test_latents_beside_state_are_hidden_from_vllm_on_a_cpu(device, use_mla, shown):
    engine = with_state(device, KimiLinearConfig(kv_lora_rank=96), use_mla)
    cache_whole(engine)
    cache_whole(engine)
    assert engine.model_config.hf_text_config.kv_lora_rank == shown
    built = hf_config(engine)
    assert (built.kv_lora_rank, hasattr(built, HIDDEN_RANK)) == (96, False), "the model is built with its latents"
    assert engine.model_config.hf_text_config.kv_lora_rank == shown


def test_why_there_is_no_cache_of_latents_beside_state():
    engine = with_state("cpu", KimiLinearConfig(kv_lora_rank=96))
    cache_whole(engine)
    engine.model_config.use_mla = False
    assert mla_sizes(engine) == "vLLM has no cache of latents beside state on a CPU"


def test_heads_of_whole_keys_and_values_beside_state():
    """vLLM took the width of a head from the latents, and lays out pages of state by it."""
    assert settled(WHOLE, "cpu", 128, use_mla=False, **{HIDDEN_RANK: 512}) == (128, 192)
