"""Value heads of another width than query and key heads: padded to one width around the KV cache, and cut back."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    FunnelConfig,
    FunnelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from tests.sites import DIM, HEADS, KV_HEADS, WIDTH, attend, decide, heads
from tests.test_weights_models import Plan
from tfbackend.inspection.memory import BLOCK, make_cache
from tfbackend.layerspecs import AttentionSpec, QKVSpec
from tfbackend.meta import CLASSIFY, build
from tfbackend.plan import draft_plan, make_plan
from tfbackend.serving import ServingSpec
from tfbackend.weights import build_weight_map

SPEC = AttentionSpec(HEADS, KV_HEADS, 24, 16, scale=0.2)
LATENT = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": 3,
}


class NarrowValues(nn.Module):
    def __init__(self, value_dim=4):
        super().__init__()
        self.value_dim = value_dim
        self.q, self.k = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(WIDTH, KV_HEADS * DIM)
        self.v, self.out = nn.Linear(WIDTH, KV_HEADS * value_dim), nn.Linear(HEADS * value_dim, WIDTH)

    def forward(self, x):
        v = self.v(x).view(1, x.shape[1], KV_HEADS, self.value_dim).transpose(1, 2)
        return self.out(attend(self, heads(self.q(x)), heads(self.k(x)), v))


@pytest.mark.parametrize("value_dim", [4, 12])
def test_both_widths_are_in_the_plan(value_dim):
    plan = decide(lambda: NarrowValues(value_dim))
    spec = dict(plan.rewrite("attention").children)["attn"]
    assert (spec.head_dim, spec.v_head_dim, spec.cached_dim) == (DIM, value_dim, max(DIM, value_dim))
    assert f"values of {value_dim}, padded to {spec.cached_dim}" in plan.rewrite("attention").summary
    assert dict(plan.rewrite("qkv").children) == {
        "qkv_proj": QKVSpec(WIDTH, DIM, value_dim, HEADS, KV_HEADS, bias=True)
    }


def test_a_token_costs_what_the_padded_heads_take():
    """2 bytes for each of 2 x 24 numbers of every KV head; without padding it would be 24 + 16."""
    assert make_cache([SPEC], 1, 2).block_bytes == BLOCK * KV_HEADS * (24 + 24) * 2
    assert make_cache([replace(SPEC, v_head_dim=24)], 1, 2) == make_cache([SPEC], 1, 2)


@settings(max_examples=30, deadline=None)
@given(
    qk=st.integers(1, 9), v=st.integers(1, 9), groups=st.integers(1, 3), kv=st.integers(1, 3), tokens=st.integers(1, 6)
)
def test_padding_changes_nothing(qk, v, groups, kv, tokens):
    """Against attention at the true widths, torch's own."""
    layers = pytest.importorskip("tfbackend.layers.attention")
    q, k, value = (torch.randn(tokens, n * dim) for n, dim in ((groups * kv, qk), (kv, qk), (kv, v)))
    width = max(qk, v)
    padded = [layers.pad_heads(x, dim, width) for x, dim in ((q, qk), (k, qk), (value, v))]
    out = layers.cut_heads(attention(*padded, width, width, groups, kv, qk**-0.5), width, v)
    assert torch.allclose(out, attention(q, k, value, qk, v, groups, kv, qk**-0.5), atol=1e-5)


def attention(q, k, v, qk_dim, v_dim, groups, kv, scale):
    """[tokens, heads * dim] -> [tokens, heads * v_dim]."""
    split = [x.view(len(x), -1, dim).transpose(0, 1)[None] for x, dim in ((q, qk_dim), (k, qk_dim), (v, v_dim))]
    out = nn.functional.scaled_dot_product_attention(*split, is_causal=True, scale=scale, enable_gqa=groups > 1)
    return out[0].transpose(0, 1).flatten(1)


def test_latent_attention_is_planned_on_one_rank_and_with_heads_gathered_on_two():
    meta = build(YoutuConfig(**LATENT), torch.float32)
    plan, refusals = draft_plan(meta, ServingSpec())
    assert not refusals
    (found,) = plan.attention
    assert (found[1].head_dim, found[1].v_head_dim) == (32, 16)
    assert not found[1].gathered
    ((_, gathered),) = make_plan(meta, ServingSpec(tp_size=2)).attention
    assert gathered.gathered


# ---- what loading itself changes ----


@pytest.mark.parametrize(("config", "cls"), [(YoutuConfig, YoutuForCausalLM), (LlamaConfig, LlamaForCausalLM)])
def test_rows_that_transformers_zeroes_when_it_loads(config, cls, tmp_path):
    fields = (
        LATENT if config is YoutuConfig else {k: v for k, v in LATENT.items() if "dim" not in k and "lora" not in k}
    )
    model = cls(config(**fields))
    nn.init.ones_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path).model.embed_tokens.weight
    zeroed = tuple((loaded == 0).all(-1).nonzero().flatten().tolist())
    weight_map = build_weight_map(build(config(**fields), torch.float32).model, Plan())
    assert weight_map.resolve("model.embed_tokens.weight").cleared == zeroed
    assert weight_map.resolve("model.norm.weight").cleared == ()


def test_rows_that_a_module_around_the_table_zeroes(tmp_path):
    """funnel initialises its table from the module that holds it, and so clears a loaded row."""
    fields = {"vocab_size": 20, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "block_sizes": [1, 1]}
    config = FunnelConfig(**fields, pad_token_id=3)
    model = FunnelForSequenceClassification(config)
    nn.init.ones_(model.funnel.embeddings.word_embeddings.weight)
    model.save_pretrained(tmp_path)
    loaded = FunnelForSequenceClassification.from_pretrained(tmp_path).funnel.embeddings.word_embeddings.weight
    zeroed = tuple((loaded == 0).all(-1).nonzero().flatten().tolist())
    built = build(config, torch.float32, task=CLASSIFY)
    plan = Plan(base_path="funnel", head_path=None, tied=False, embedding_path=built.embedding_path)
    found = build_weight_map(built.model, plan).resolve("funnel.embeddings.word_embeddings.weight")
    assert found.cleared == zeroed
