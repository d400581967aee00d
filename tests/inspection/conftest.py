"""Small real checkpoints, and the inspections of famous configs, each made once."""

import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.inspection.golden import GOLDEN
from tfbackend.inspection.examine import Request, inspect_model

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 64}  # fmt: skip


@functools.cache
def inspected(name, **options):
    """The inspection of a golden config; settings as for Request."""
    return inspect_model(Request(str(GOLDEN / "configs" / f"{name}.json"), **options))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
