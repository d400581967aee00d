"""Blocks of the KV cache for attention within chunks: whole ones in each, or a refusal by name."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Llama4TextConfig

from tfbackend.adapt import settle_chunks
from tfbackend.errors import UnsupportedModelError
from tfbackend.layerspecs import AttentionSpec
from tfbackend.meta import build


def config(block, device):
    cache = SimpleNamespace(block_size=block)
    return SimpleNamespace(cache_config=cache, device_config=SimpleNamespace(device_type=device))


def plan(*chunks):
    return SimpleNamespace(
        attention=[(f"layers.{n}", AttentionSpec(4, 2, 32, 32, 1.0, chunk=c)) for n, c in enumerate(chunks)]
    )


@pytest.mark.parametrize(
    ("block", "device", "chunks", "wanted"),
    [
        (128, "cpu", (8192, None), 128),
        (128, "cpu", (32, None), 32),
        (128, "cpu", (96,), 32),
        (128, "cpu", (None, None), 128),
        (16, "cuda", (8192,), 16),
        (64, "cuda", (48, 96), 16),
    ],
)
def test_a_chunk_has_whole_blocks(block, device, chunks, wanted):
    engine = config(block, device)
    settle_chunks(engine, plan(*chunks))
    assert engine.cache_config.block_size == wanted


@pytest.mark.parametrize(("device", "chunks"), [("cpu", (16,)), ("cpu", (8192, 48)), ("cuda", (24,))])
def test_chunks_of_no_whole_blocks_are_refused(device, chunks):
    with pytest.raises(UnsupportedModelError, match="chunks of"):
        settle_chunks(config(128, device), plan(*chunks))


def test_the_reference_hides_other_chunks():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 8, 4, generator=generator) for _ in range(3))
    whole, chunked = (AttentionSpec(2, 2, 4, 4, 0.5, chunk=c).reference()(q, k, v) for c in (None, 3))
    assert torch.allclose(whole[:, :3], chunked[:, :3])
    for start, end in ((3, 6), (6, 8)):
        part = AttentionSpec(2, 2, 4, 4, 0.5).reference()(*(x[:, :, start:end] for x in (q, k, v)))
        assert torch.allclose(part, chunked[:, start:end], atol=1e-6)
    assert not torch.allclose(whole[:, 3:], chunked[:, 3:], atol=1e-3)


def test_a_base_model_beside_the_prefix_that_its_class_names():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    made = build(Llama4TextConfig(**sizes, head_dim=16, num_hidden_layers=1, num_local_experts=2), torch.float32)
    assert (made.base_path, made.embedding_path, made.head_path) == ("model", "model.embed_tokens", "lm_head")
