"""The plain-torch references, against torch's own layers, and the names of activations."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from tfbackend.activations import activation_name
from tfbackend.layerspecs import (
    ActMulSpec,
    AllKeysSpec,
    AttentionSpec,
    EmbeddingSpec,
    FixedRopeSpec,
    GrownTableSpec,
    LinearSpec,
    MergedLinearSpec,
    NormSpec,
    QKVSpec,
)

torch.manual_seed(0)

SPELLINGS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "gelu_10": None,  # clipped at 10
    "relu6": None,
    "hardswish": None,
    "laplace": None,
    "leaky_relu": None,
    "linear": None,
    "mish": None,
    "prelu": None,
    "sqrtsoftplus": None,
    "tanh": None,
    "xielu": None,
}


def test_every_spelling_of_transformers_is_known():
    assert set(ACT2FN) == set(SPELLINGS)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_activation_names(spelling):
    assert activation_name(ACT2FN[spelling]) == SPELLINGS[spelling]


@pytest.mark.parametrize(
    "function",
    [lambda x: x.sum(), lambda x: x.float(), lambda x: None, lambda x, y: x, lambda x: F.silu(x) + 1e-3, F.softplus],
)
def test_other_functions_have_no_name(function):
    assert activation_name(function) is None


def test_rms_and_layer_norm_equal_torchs():
    x = torch.randn(3, 16) * 0.05
    rms, layer = NormSpec("rms", 16, 1e-3).reference(), NormSpec("layer", 16, 1e-3, bias=True).reference()
    for parameter in (rms.weight, layer.weight, layer.bias):
        parameter.data.normal_()
    torch.testing.assert_close(rms(x), F.rms_norm(x, (16,), rms.weight, 1e-3))
    torch.testing.assert_close(layer(x), F.layer_norm(x, (16,), layer.weight, layer.bias, 1e-3))


def test_zero_centred_and_weightless_norms():
    x = torch.randn(2, 8)
    bare = NormSpec("rms", 8, 1e-6, "none").reference()
    centred = NormSpec("rms", 8, 1e-6, "zero_centred").reference()
    assert list(bare.parameters()) == []
    centred.weight.data.fill_(0.5)
    torch.testing.assert_close(centred(x), bare(x) * 1.5)


def test_norms_keep_the_dtype_of_their_input():
    assert NormSpec("rms", 8, 1e-6).reference()(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("window", "cap", "groups"),
    [(None, None, 1), (None, None, 2), (3, None, 2), (1, None, 1), (None, 0.7, 2), (4, 0.5, 1)],
)
def test_attention_equals_the_textbook(window, cap, groups):
    """Every query head and token by itself, in a loop."""
    heads, tokens, dim, scale = 4, 6, 8, 0.3
    q = torch.randn(1, heads, tokens, dim)
    k, v = torch.randn(1, heads // groups, tokens, dim), torch.randn(1, heads // groups, tokens, 5)
    got = AttentionSpec(heads, heads // groups, dim, 5, scale, window, cap).reference()(q, k, v)
    assert got.shape == (1, tokens, heads, 5)
    for head in range(heads):
        for token in range(tokens):
            first = 0 if window is None else max(0, token - window + 1)
            scores = k[0, head // groups, first : token + 1] @ q[0, head, token] * scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            weights = torch.exp(scores) / torch.exp(scores).sum()
            torch.testing.assert_close(got[0, token, head], weights @ v[0, head // groups, first : token + 1])


def test_alibi_takes_a_slope_for_each_token_between():
    heads, tokens, dim, slopes = 2, 5, 8, (0.5, 0.03)
    q, k, v = (torch.randn(1, heads, tokens, dim) for _ in range(3))
    got = AttentionSpec(heads, heads, dim, dim, 0.3, window=4, alibi_slopes=slopes).reference()(q, k, v)
    for head in range(heads):
        for token in range(tokens):
            seen = range(max(0, token - 3), token + 1)
            scores = torch.stack([q[0, head, token] @ k[0, head, t] * 0.3 - slopes[head] * (token - t) for t in seen])
            torch.testing.assert_close(got[0, token, head], scores.softmax(0) @ v[0, head, list(seen)])


def test_a_bias_is_added_to_the_scores_of_its_key():
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    bias = torch.randn(1, 2, 6)
    mask = (
        bias.repeat_interleave(2, 1)[:, :, None]
        .expand(-1, -1, 6, -1)
        .masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
    )
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    got = AttentionSpec(4, 2, 8, 8, 0.3, key_bias=True).reference()(q, k, v, key_bias=bias)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("window", "extent"), [(None, 3), (None, 9), (2, 3), (5, 2)])
def test_a_bias_by_distance_is_looked_up_from_the_end_of_its_row(window, extent, heads):
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    table = torch.randn(1, heads, 6, extent)
    mask = torch.full((1, 4, 6, 6), -math.inf)
    for head, i, j in itertools.product(range(4), range(6), range(6)):
        if 0 <= i - j < (window or 6):
            mask[0, head, i, j] = table[0, head % heads, i, extent - 1 - i + j] if i - j < extent else 0.0
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    spec = AttentionSpec(4, 2, 8, 8, 0.3, window=window, distance_bias="bias", extent=extent)
    torch.testing.assert_close(spec.reference()(q, k, v, distance_bias=table), wanted)
    assert f"a bias for each query and {extent} distances" in str(spec)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "width"), [(32, 32, 64), (64, 64, 96), (30, 30, 32), (31, 31, 64), (64, 128, 128)]
)
def test_heads_that_carry_a_bias_are_as_wide_as_kernels_have_them(head_dim, v_head_dim, width):
    assert AttentionSpec(4, 2, head_dim, v_head_dim, 0.3, key_bias=True).cached_dim == width
    assert AttentionSpec(4, 2, head_dim, v_head_dim, 0.3).cached_dim == max(head_dim, v_head_dim)


def test_a_sink_takes_its_share_and_gives_nothing():
    q = k = torch.zeros(1, 1, 1, 4)
    v = torch.ones(1, 1, 1, 4)
    spec = AttentionSpec(1, 1, 4, 4, 1.0, sinks="sinks")
    shared = spec.reference()(q, k, v, torch.tensor([math.log(3.0)]))
    torch.testing.assert_close(shared, torch.full((1, 1, 1, 4), 0.25))  # e^0 / (e^0 + 3)


def test_widths():
    spec = QKVSpec(64, head_dim=8, v_head_dim=6, num_heads=4, num_kv_heads=2, bias=True)
    assert spec.sizes == (32, 16, 12)
    assert spec.reference().weight.shape == (60, 64)
    assert MergedLinearSpec(64, (3, 5), bias=False).reference().weight.shape == (8, 64)
    assert LinearSpec(3, 2, bias=False).reference().bias is None


def test_act_and_mul_activates_the_first_half():
    x = torch.tensor([[-1.0, 2.0, 10.0, 100.0]])
    torch.testing.assert_close(ActMulSpec("relu").reference()(x), torch.tensor([[0.0, 200.0]]))


def test_embedding_scales_after_the_look_up():
    table = EmbeddingSpec(4, 2, scale=3.0).reference()
    table.weight = nn.Parameter(torch.arange(8.0).view(4, 2))
    assert table(torch.tensor([[1]])).tolist() == [[[6.0, 9.0]]]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (LinearSpec(2, 3, False), "replicated linear 2->3"),
        (MergedLinearSpec(2, (3, 4), False), "merged linear 2->3+4"),
        (QKVSpec(2, 8, 8, 4, 2, False), "QKV 2->4+2x2 heads of 8"),
        (NormSpec("rms", 4, 1e-6, "zero_centred"), "rms norm 4, eps 1e-06, weight 1 + w"),
        (
            AttentionSpec(4, 2, 8, 8, 0.5, 16, 2.0, "sinks"),
            "attention 4/2 heads of 8, scale 0.5, window 16, soft cap 2, sinks sinks",
        ),
        (
            AttentionSpec(4, 2, 32, 32, 0.5, key_bias=True, max_context=64),
            "attention 4/2 heads of 32, a bias for each key, padded to 64, scale 0.5, contexts of up to 64 tokens",
        ),
        (AllKeysSpec(), "picks all keys, so nothing is picked"),
        (EmbeddingSpec(4, 2, 3.0), "vocabulary embedding 4x2, scaled by 3"),
        (GrownTableSpec(64, ((1, 64),)), "table made for 64 tokens at once"),
        (FixedRopeSpec(64, True), "rotary frequencies fixed for 64 tokens"),
        (ActMulSpec("silu"), "silu-and-mul"),
    ],
)
def test_specs_read_as_one_line(spec, words):
    assert str(spec) == words
