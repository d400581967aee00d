"""Masks that a module computes, where they come to a bias for each key."""

import math

import pytest
import torch
from transformers import DogeConfig
from transformers.models.doge.modeling_doge import DogeAttention

from tests.sites import SIZES
from tfbackend.biased import bias_of
from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.eager import EagerCall
from tfbackend.graph.inline import InlineError
from tfbackend.layerspecs import AttentionSpec
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec

BOUND = 24


def doge(**fields):
    return build(DogeConfig(**{**SIZES, "keep_window_size": BOUND, **fields}), torch.float32)


def plan_of(**fields):
    return make_plan(doge(**fields), ServingSpec(max_model_len=BOUND))


def test_the_mask_becomes_a_bias_for_each_key():
    plan = plan_of()
    wanted = AttentionSpec(4, 2, 16, 16, 0.25, key_bias=True, max_context=BOUND)
    assert dict(plan.attention) == {"layers.0.self_attn": wanted, "layers.1.self_attn": wanted}
    text = plan.forwards["layers.0.self_attn"]
    assert "key_biased_attention(self, query_states, key_states, value_states, dt_states)" in text
    assert "prepare_dynamic_mask" not in text
    assert "repeat_kv" not in text
    assert plan.counts["qkv"] == plan.counts["rope"] == 2


def test_a_window_stays_beside_the_bias():
    plan = plan_of(sliding_window=5)
    assert {(spec.window, spec.key_bias) for _, spec in plan.attention} == {(5, True)}


def test_one_token_too_many_is_refused():
    with pytest.raises(UnsupportedModelError, match=rf"longer than {BOUND}.*self_attn.*--max-model-len {BOUND}"):
        make_plan(doge(), ServingSpec(max_model_len=BOUND + 1))


def test_ranks_have_the_heads_of_all():
    """And the biases of their keys, of which each takes its own."""
    plan = make_plan(doge(), ServingSpec(tp_size=2, max_model_len=BOUND))
    assert {(spec.gathered, spec.key_bias) for _, spec in plan.attention} == {(True, True)}


# Near misses: other things that a mask may be made of.

original = DogeAttention.prepare_dynamic_mask


def of_the_query(self, *args, **kwargs):
    mask = original(self, *args, **kwargs)
    return mask + torch.arange(mask.shape[-2], device=mask.device)[:, None] * 0.1


def of_the_distance(self, *args, **kwargs):
    mask = original(self, *args, **kwargs)
    at = torch.arange(mask.shape[-2], device=mask.device)
    return mask - (at[:, None] - at[None, :]) * 0.1


def of_a_half(self, *args, **kwargs):
    """Picks half of the keys, however many there are."""
    mask = original(self, *args, **kwargs)
    kept = torch.topk(mask, max(1, mask.shape[-1] // 2), dim=-1).indices
    return mask.masked_fill(torch.zeros_like(mask).scatter(-1, kept, 1.0) == 0, -1e9)


def of_the_large(self, *args, **kwargs):
    """Hides keys of small biases, which no top-k shows."""
    mask = original(self, *args, **kwargs)
    return mask.masked_fill(mask < mask[..., -1:, :].median(), -1e9)


def of_a_few(self, *args, **kwargs):
    """Hides the first key from those far away."""
    mask = original(self, *args, **kwargs).clone()
    mask[..., BOUND - 2 :, 0] = -1e9
    return mask


def of_another(self, *args, **kwargs):
    """A bias that no variable of the forward holds."""
    mask = original(self, *args, **kwargs)
    return mask.where(mask < -1e9, mask * 2)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (of_the_query, "not the same for all tokens"),
        (of_the_distance, "not the same for all tokens"),
        (of_a_half, "neither causal nor a sliding window"),
        (of_the_large, "neither causal nor a sliding window"),
        (of_a_few, "neither causal nor a sliding window"),
        (of_another, "no local variable holds the bias"),
    ],
)
def test_another_mask_is_refused_with_its_reason(monkeypatch, prepare, reason):
    monkeypatch.setattr(DogeAttention, "prepare_dynamic_mask", prepare)
    with pytest.raises(UnsupportedModelError, match=f"computed by the model itself.*{reason}"):
        plan_of()


def added(heads=4, tokens=6):
    bias = torch.randn(2, tokens, generator=torch.Generator().manual_seed(1)).repeat_interleave(heads // 2, 0)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return bias[:, None].expand(-1, tokens, -1).masked_fill(future, -math.inf), bias[:: heads // 2]


def test_a_bias_is_one_for_each_kv_head():
    mask, bias = added()
    assert torch.equal(bias_of(EagerCall(mask, None), 2, None), bias)
    assert torch.equal(bias_of(EagerCall(mask[:1], None), 2, None), bias[:1].expand(2, -1))


def test_query_heads_that_share_a_key_share_its_bias():
    mask, _ = added()
    mask = mask * torch.tensor([1.0, 2.0, 1.0, 1.0])[:, None, None]
    with pytest.raises(InlineError, match="query heads that share a key"):
        bias_of(EagerCall(mask, None), 2, None)


@pytest.mark.parametrize(("window", "seen"), [(3, None), (None, 3), (4, 3)])
def test_a_window_is_the_one_that_the_mask_was_given(window, seen):
    mask, _ = added()
    at = torch.arange(6)
    mask = mask.masked_fill(at[:, None] - at[None, :] >= (seen or 6), -math.inf)
    with pytest.raises(InlineError):
        bias_of(EagerCall(mask, None), 2, window)
    assert bias_of(EagerCall(mask, None), 2, seen).shape == (2, 6)
