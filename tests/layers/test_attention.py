"""What the attention layer that keeps biases behind its keys hands to vLLM's, against the reference."""

import pytest
import torch
from vllm.model_executor.layers.attention import Attention

from tfbackend.errors import ConfigError
from tfbackend.layers.attention import BiasedAttention
from tfbackend.layerspecs import AttentionSpec

TOKENS, HEADS, KV_HEADS = 7, 4, 2


def drawn(heads, dim, dtype, spread=1.0):
    return (torch.randn(1, heads, TOKENS, dim, generator=torch.Generator().manual_seed(heads * dim)) * spread).to(dtype)


def bare(spec):
    """The layer without vLLM's part of it, which only an engine can make."""
    layer = BiasedAttention.__new__(BiasedAttention)
    torch.nn.Module.__init__(layer)
    layer.head_size, layer.kv_cache_dtype, layer.layer_name = spec.cached_dim, "auto", "model.site.attn"
    layer.fit(spec.head_dim, spec.v_head_dim)
    layer.weigh(spec.scale)
    return layer


def flat(x):
    return x[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(32, 32), (16, 64), (62, 8)])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_the_bias_reaches_the_scores(monkeypatch, dtype, head_dim, v_head_dim, size):
    """vLLM's attention stands for any kernel: here it computes the reference on the wider heads."""
    spec = AttentionSpec(HEADS, KV_HEADS, head_dim, v_head_dim, head_dim**-0.5, key_bias=True)
    width = spec.cached_dim

    def attend(self, query, key, value):
        assert self.head_size == width
        q, k, v = (x.view(1, TOKENS, -1, width).transpose(1, 2).float() for x in (query, key, value))
        plain = AttentionSpec(HEADS, KV_HEADS, width, width, spec.scale).reference()
        return plain(q, k, v).flatten(2)[0]

    monkeypatch.setattr(Attention, "forward", attend)
    layer = bare(spec)
    q, k, v = drawn(HEADS, head_dim, dtype), drawn(KV_HEADS, head_dim, dtype), drawn(KV_HEADS, v_head_dim, dtype)
    bias = drawn(KV_HEADS, 1, dtype, size)[..., 0]
    wanted = spec.reference()(q.float(), k.float(), v.float(), key_bias=bias.float())
    got = layer(flat(q), flat(k), flat(v), key_bias=bias[0].t())
    without = spec.reference()(q.float(), k.float(), v.float(), key_bias=torch.zeros_like(bias.float()))
    # The two columns hold 16 bits of a bias in bfloat16, where one would be off by 0.2 at this size.
    torch.testing.assert_close(got, wanted.flatten(2)[0], rtol=1e-3, atol=5e-3)
    assert (wanted - without).abs().max() > 0.1


def test_keys_with_a_bias_are_not_cached_in_fewer_bits():
    spec = AttentionSpec(HEADS, KV_HEADS, 32, 32, 0.2, key_bias=True)
    layer = bare(spec)
    layer.kv_cache_dtype = "fp8_e4m3"
    with pytest.raises(ConfigError, match="kv-cache-dtype auto"):
        layer.weigh(0.2)
