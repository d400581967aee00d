"""What the QKV fuser says of a single KV head, and of projections that are another fuser's."""

import torch
from transformers import Gemma3TextConfig, Phi3Config

from tfbackend.meta import build
from tfbackend.plan import draft_plan
from tfbackend.serving import ServingSpec

SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 128}


def plan_of(config, tp_size):
    return draft_plan(build(config, torch.float32), ServingSpec(tp_size=tp_size))


def test_a_norm_over_the_only_kv_head_works_within_it():
    config = Gemma3TextConfig(**SMALL, num_attention_heads=4, num_key_value_heads=1, head_dim=32, pad_token_id=0)
    plan, refusals = plan_of(config, tp_size=2)
    assert not refusals
    assert plan.counts["qkv"] == 2


def test_a_packed_projection_is_no_near_miss_of_three():
    config = Phi3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    plan, refusals = plan_of(config, tp_size=1)
    assert not refusals
    assert plan.counts["packed_qkv"] == 2
    assert [miss.fuser for miss in plan.misses] == []
