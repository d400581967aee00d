"""Modules that number their tokens by themselves: which are given positions, and which go on counting."""

import pytest
import torch
from torch import nn
from transformers import Llama4TextConfig

from tests.sites import DIM, HEADS, WIDTH, attend, heads
from tfbackend.graph.interface import POSITIONS, token_positions
from tfbackend.graph.observe import TOKENS, observe
from tfbackend.meta import build
from tfbackend.plan import draft_plan
from tfbackend.positions import positions_given
from tfbackend.serving import ServingSpec


class Base(nn.Module):
    def __init__(self, site):
        super().__init__()
        self.embed, self.site = nn.Embedding(50, WIDTH), site

    def forward(self, input_ids, position_ids=None, use_cache=False):
        return self.site(self.embed(input_ids))


class Counting(nn.Module):
    """Scales the query by the token's number."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * DIM)
        self.k_proj = nn.Linear(WIDTH, HEADS * DIM)

    def forward(self, x):
        numbers = torch.arange(x.shape[1], device=x.device) + 0
        q = self.scaled(self.q_proj(x), numbers)
        k = self.k_proj(x)
        return attend(self, heads(q), heads(k), heads(k))

    def scaled(self, q, numbers):
        return q * torch.log1p(numbers.float() / 4)[None, :, None]


class CountsKeysToo(Counting):
    def forward(self, x):
        q = self.scaled(self.q_proj(x), torch.arange(0, x.shape[1], dtype=torch.float32, device=x.device))
        k = self.k_proj(x) + torch.arange(x.shape[1], device=x.device)[None, :, None]
        return attend(self, heads(q), heads(k), heads(k))


class Indexing(Counting):
    """Uses the count to pick tokens."""

    def scaled(self, q, numbers):
        return q[:, numbers]


class FromTheEnd(Counting):
    """Counts up to the number of tokens of the call."""

    def scaled(self, q, numbers):
        return q * (numbers[-1] - numbers + 1)[None, :, None]


class FromOne(Counting):
    def forward(self, x):
        q = self.scaled(self.q_proj(x), torch.arange(1, x.shape[1] + 1, device=x.device))
        return attend(self, heads(q), heads(self.k_proj(x)), heads(self.k_proj(x)))


class HalfWay(Counting):
    """Counts in its forward and in a child."""

    def __init__(self):
        super().__init__()
        self.child = Numbers()

    def scaled(self, q, numbers):
        return super().scaled(q, numbers) + self.child(q)


class Numbers(nn.Module):
    def forward(self, x):
        return x * torch.arange(x.shape[1], device=x.device)[None, :, None]


def given(cls, tmp_path):
    """(edited forward or None, whether a run still sees it count)."""
    with torch.device("meta"):
        base = Base(cls()).eval()
    seen = observe(base)
    assert seen.counting == ["site"], seen
    with positions_given(base, seen, tmp_path) as done:
        counting = observe(base).counting
    assert type(base.site) is cls
    assert POSITIONS not in vars(base.site)
    return done.forwards.get("site"), bool(counting)


def test_a_count_becomes_the_positions(tmp_path):
    text, counting = given(Counting, tmp_path)
    assert "numbers = token_positions(self, torch.arange(x.shape[1], device=x.device)) + 0" in text
    assert not counting


def test_every_count_does(tmp_path):
    text, counting = given(CountsKeysToo, tmp_path)
    assert text.count("token_positions(") == 2
    assert not counting


@pytest.mark.parametrize("cls", [Indexing, FromTheEnd, FromOne, HalfWay])
def test_a_count_that_is_more_than_a_position_stays(cls, tmp_path):
    text, counting = given(cls, tmp_path)
    assert counting
    assert text is None or cls is HalfWay


def test_positions_that_nobody_gave_are_an_error():
    module, counted = nn.Module(), torch.arange(3)
    assert token_positions(module, counted) is counted
    module.tfb_positions = None
    with pytest.raises(RuntimeError, match="not given"):
        token_positions(module, counted)
    module.tfb_positions = torch.tensor([5, 6, 0])
    assert token_positions(module, counted) is module.tfb_positions


def llama4(**more):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": 0}
    layers = {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]}
    return Llama4TextConfig(**sizes, **heads, **layers, **more)


def test_a_model_of_transformers():
    plan, refusals = draft_plan(build(llama4(), torch.float32), ServingSpec())
    assert not refusals
    assert plan.numbered == ("layers.1.self_attn",)
    assert "token_positions(self, torch.arange(hidden_states.shape[1]" in plan.forwards["layers.1.self_attn"]
    assert "qkv_proj" in plan.forwards["layers.1.self_attn"], "edits come together"
    assert "1 given positions" in plan.summary


def test_one_that_cannot_be_proven_is_refused(monkeypatch):
    monkeypatch.setattr("tfbackend.positions._proven", lambda *_: False)
    plan, refusals = draft_plan(build(llama4(), torch.float32), ServingSpec())
    assert not plan.numbered
    assert [r for r in refusals if "numbers its tokens itself" in str(r) and "layers.1.self_attn" in str(r)]


def test_chunks_that_no_context_fills_hide_nothing():
    def chunks(longest):
        plan, _ = draft_plan(build(llama4(attention_chunk_size=24), torch.float32), ServingSpec(max_model_len=longest))
        return [spec.chunk for _, spec in plan.attention]

    assert chunks(25) == [24, None]
    assert chunks(24) == [None, None]
    assert TOKENS < 24
