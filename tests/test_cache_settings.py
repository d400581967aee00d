"""What the engine is told of its cache, by the plan and not by the config alone."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tfbackend.adapt import settle_cache
from tfbackend.layerspecs import AttentionSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.serving import MLASizes

LATENT = MLASpec(4, MLASizes(512, 64, 128, 128), 0.1, "kv_b_proj")
WHOLE = AttentionSpec(4, 4, 192, 128, 0.1)


def settled(spec, device, block, use_mla=True):
    """(tokens of a block, width of a head) that are left in the config of a model with such attention."""
    architecture = SimpleNamespace(head_size=64)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block),
        model_config=SimpleNamespace(use_mla=use_mla, model_arch_config=architecture),
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
