"""Rotations that cast back to the model's dtype are read in every dtype that models are served in."""

import pytest
import torch
from transformers import CohereConfig, LlamaConfig

from tfbackend.meta import build
from tfbackend.plan import draft_plan
from tfbackend.serving import ServingSpec

SMALL = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 128,
         "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}  # fmt: skip


def plan_of(config, dtype):
    return draft_plan(build(config, dtype), ServingSpec(dtype=dtype))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_rotation_that_casts_there_and_back(dtype):
    """Cohere rotates in float32: fused where the model is float32, and left with that reason where it is not."""
    plan = plan_of(CohereConfig(**SMALL), dtype)
    assert plan.counts["rope"] == (dtype == torch.float32)
    assert [miss.reason for miss in plan.misses] == (
        [] if dtype == torch.float32 else ["rotates in float32, the kernel in the model's dtype"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_rotation_that_casts_nothing(dtype):
    assert plan_of(LlamaConfig(**SMALL), dtype).counts["rope"] == 1
