"""Vocabulary tables with their scales, and rotary embeddings that would rescale."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from tests.sites import WIDTH, Decision, OneSite
from tfbackend.layerspecs import EmbeddingSpec, FixedRopeSpec
from tfbackend.meta import build
from tfbackend.plan import draft_plan
from tfbackend.proof import Prover
from tfbackend.serving import ServingSpec

ROWS = 50


class ByAttribute(nn.Embedding):
    def __init__(self, scale):
        super().__init__(ROWS, WIDTH)
        self.scale = scale

    def forward(self, ids):
        return super().forward(ids) * self.scale


class ByBuffer(nn.Embedding):
    def __init__(self, persistent):
        super().__init__(ROWS, WIDTH)
        self.register_buffer("scale", torch.tensor(1.7), persistent=persistent)

    def forward(self, ids):
        return super().forward(ids) * self.scale.to(self.weight.dtype)


class Shifted(ByAttribute):
    def forward(self, ids):
        return super().forward(ids) + 1


class ByVector(nn.Embedding):
    def __init__(self):
        super().__init__(ROWS, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.scale


def embed(table, dtype=torch.float32):
    base = OneSite([nn.Identity()]).eval()
    base.embed = table
    base = base.to(dtype)
    for module in base.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    return Decision(base, ServingSpec(dtype=dtype), Prover(None))


@pytest.mark.parametrize(
    ("table", "scale"),
    [
        (nn.Embedding(ROWS, WIDTH), 1.0),
        (nn.Embedding(ROWS, WIDTH, padding_idx=3), 1.0),
        (ByAttribute(2.5), 2.5),
        (Gemma3TextScaledWordEmbedding(ROWS, WIDTH, 0, embed_scale=3.25), 3.25),
    ],
)
def test_scale_is_read_from_the_graph(table, scale):
    plan = embed(table)
    assert plan.rewrite("embedding", "embed").layer == EmbeddingSpec(ROWS, WIDTH, scale)
    assert not plan.unproven


def test_scale_is_rounded_as_the_model_rounds_it():
    """1.7 has no bfloat16; the nearest is 1.703125."""
    assert embed(ByBuffer(False)).rewrite("embedding", "embed").layer.scale == pytest.approx(1.7, rel=1e-7)
    table = ByBuffer(False)
    plan = embed(table, torch.bfloat16)
    found = [r.layer.scale for r in plan.planner.collect({})[0] if r.fuser == "embedding"]
    assert found == [1.703125]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (nn.Embedding(ROWS, WIDTH, max_norm=1.0), "renormalises its rows (max_norm)"),
        (ByBuffer(True), "its scale scale may come from the checkpoint"),
        (ByVector(), "its scale scale is not one number"),
        (Shifted(2.0), "also does add"),
    ],
)
def test_other_tables_are_misses(table, reason):
    assert embed(table).reason("embedding", "embed") == reason


def test_only_the_vocabulary_is_taken():
    plan = Decision(OneSite([nn.Identity(), nn.Sequential()]).eval().to("meta"), ServingSpec(), Prover(None))
    assert [r.qualname for r in plan.rewrites if r.fuser == "embedding"] == ["embed"]


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def rope_spec(config, max_model_len):
    plan, refusals = draft_plan(build(config, torch.float32), ServingSpec(max_model_len=max_model_len))
    assert not refusals
    found = [r.layer for r in plan.rewrites if r.fuser == "fixed_rope"]
    return found[0] if found else None


def test_dynamic_rope_is_exact_up_to_the_length_it_was_made_for():
    """Transformers recomputes the frequencies for calls that are longer than max_position_embeddings, here 256."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(**SMALL, max_position_embeddings=256, rope_parameters=rope)
    assert rope_spec(config, 256) == FixedRopeSpec(256, exact=True)
    assert rope_spec(config, 257) == FixedRopeSpec(257, exact=False)
    assert "results differ" in str(rope_spec(config, 257))
    assert "results differ" not in str(rope_spec(config, 256))


def test_longrope_switches_at_its_original_length():
    """Sixteen dimensions rotate, so each list has eight factors; above 128 tokens the long ones are taken."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    config = Phi3Config(
        **SMALL, max_position_embeddings=512, original_max_position_embeddings=128, rope_parameters=rope
    )
    assert rope_spec(config, 128) == FixedRopeSpec(128, exact=True)
    assert rope_spec(config, 512) == FixedRopeSpec(512, exact=False)


@pytest.mark.parametrize("rope_type", ["default", "linear"])
def test_rope_that_never_rescales_is_left_alone(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    assert rope_spec(LlamaConfig(**SMALL, rope_parameters=rope), 1 << 20) is None
