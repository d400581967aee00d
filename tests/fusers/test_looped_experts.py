"""Experts that a model loops over: every layout that is read, and what differs from all readings in one place."""

import time

import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from transformers import DbrxConfig, LongcatFlashConfig

from tests.sites import WIDTH, decide
from tfbackend.errors import UnsupportedModelError
from tfbackend.expertspec import ExpertsSpec
from tfbackend.fusers.looping import read_experts
from tfbackend.graph.routed import routed_call, stand_in
from tfbackend.loopedspec import ExpertsPart, LoopedExpertsSpec
from tfbackend.meta import build
from tfbackend.plan import draft_plan, make_plan
from tfbackend.serving import ServingSpec

EXPERTS, INNER = 6, 48


class Looped(nn.Module):
    """Asks which experts have tokens and goes through those; `one` is one expert."""

    def __init__(self):
        super().__init__()
        self.experts, self.inner = EXPERTS, INNER
        self.fill()

    def fill(self):
        self.first = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.second = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def one(self, x, expert):
        gate, up = (x @ self.first[expert].T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.second[expert].T

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            out.index_add_(0, token, self.one(x[token], expert) * self.weigh(weights[token, slot, None]))
        return out

    def weigh(self, weights):
        return weights


class Flat(Looped):
    """All experts' rows in one matrix, the last product's weight [in, out]."""

    def fill(self):
        self.inside = nn.Module()
        for name in ("b", "c", "a"):
            self.inside.register_parameter(name, nn.Parameter(torch.empty(EXPERTS * INNER, WIDTH)))

    def one(self, x, expert):
        a, b, c = (w.view(EXPERTS, self.inner, -1)[expert] for w in (self.inside.a, self.inside.b, self.inside.c))
        return (F.gelu(x @ a.T) * (x @ b.T)) @ c


class Interleaved(Looped):
    def one(self, x, expert):
        both = x @ self.first[expert].T
        return (F.silu(both[:, 0::2]) * both[:, 1::2]) @ self.second[expert].T


class Ungated(Looped):
    def fill(self):
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))

    def one(self, x, expert):
        return F.relu(x @ self.up[expert]).square() @ self.down[expert]


class WithIdentity(Looped):
    """Two more ids than experts with weights, one of the tensors longer for it."""

    def fill(self):
        super().fill()
        self.first = nn.Parameter(torch.empty(EXPERTS + 2, 2 * INNER, WIDTH))

    def one(self, x, expert):
        assert expert < EXPERTS + 2
        return x if expert >= EXPERTS else super().one(x, expert)


class Doubled(Looped):
    def weigh(self, weights):
        return 2 * weights


class Squared(Looped):
    def weigh(self, weights):
        return weights.square()


class LastIsLouder(Looped):
    def one(self, x, expert):
        return super().one(x, expert) * (1.01 if expert == EXPERTS - 1 else 1.0)


class UpFirst(Looped):
    def one(self, x, expert):
        up, gate = (x @ self.first[expert].T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.second[expert].T


class Tanh(Looped):
    def one(self, x, expert):
        gate, up = (x @ self.first[expert].T).chunk(2, dim=-1)
        return (torch.tanh(gate) * up) @ self.second[expert].T


class Limited(Looped):
    """The same as silu near 0, and cut far out."""

    def one(self, x, expert):
        gate, up = (x @ self.first[expert].T).chunk(2, dim=-1)
        return (F.silu(gate).clamp(max=1.5) * up) @ self.second[expert].T


class Biased(Looped):
    def fill(self):
        super().fill()
        self.bias = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def one(self, x, expert):
        return super().one(x, expert) + self.bias[expert]


class Buffered(Looped):
    def fill(self):
        super().fill()
        self.register_buffer("scales", torch.ones(EXPERTS))


class Block(nn.Module):
    def __init__(self, experts, *, more=0, named=False):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS + more, bias=False)
        self.experts, self.named = experts, named

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, ids = self.router(flat).softmax(-1).topk(2, dim=-1)
        if self.named:
            return self.experts(flat, weights=weights, ids=ids).view(x.shape)
        return self.experts(flat, ids, weights).view(x.shape)


def spec_of(cls, **block):
    decision = decide(lambda: Block(cls(), **block))
    assert decision.observation.looped == {cls}
    return decision.rewrite("looped_experts", "site.experts").layer


SPEC = ExpertsSpec(EXPERTS, 2, WIDTH, INNER)
STACKED = (ExpertsPart("first", "w13_weight", None), ExpertsPart("second", "w2_weight", None))


def test_stacked_and_flat_and_turned_and_ungated():
    assert spec_of(Looped) == LoopedExpertsSpec(SPEC, (0, 1, 2), STACKED)
    flat = spec_of(Flat)
    assert (flat.experts.activation, flat.experts.gated) == ("gelu", True)
    assert flat.parts == (
        ExpertsPart("inside.a", "w13_weight", 0),
        ExpertsPart("inside.b", "w13_weight", 1),
        ExpertsPart("inside.c", "w2_weight", None, transposed=True),
    )
    assert spec_of(Interleaved).experts.interleaved
    ungated = spec_of(Ungated)
    assert (ungated.experts.activation, ungated.experts.gated, ungated.experts.kernel) == ("relu2", False, False)
    assert [(p.source, p.transposed) for p in ungated.parts] == [("up", True), ("down", True)]


def test_experts_that_give_what_they_are_given_are_counted():
    found = spec_of(WithIdentity, more=2)
    assert (found.identity, found.experts.num_experts) == (2, EXPERTS)
    assert "2 that give what they are given" in str(found)


def test_arguments_are_known_by_what_they_are():
    assert spec_of(Looped, named=True).places == (0, "ids", "weights")


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Doubled, "none of the ways"),
        (Squared, "none of the ways"),
        (UpFirst, "none of the ways"),
        (Tanh, "none of the ways"),
        (Limited, "none of the ways"),
        (LastIsLouder, "none of the ways"),
        (Biased, "none of the ways"),
        (Buffered, "not the matrices"),
    ],
)
def test_what_is_like_no_reading_is_left(cls, reason):
    decision = decide(lambda: Block(cls()))
    assert reason in decision.reason("looped_experts", "site.experts")


def test_an_expert_unlike_the_others_is_found_among_many():
    """More than the tokens of one try meet."""

    class Many(Looped):
        def fill(self):
            self.first = nn.Parameter(torch.empty(40, 2 * INNER, WIDTH))
            self.second = nn.Parameter(torch.empty(40, WIDTH, INNER))

        def one(self, x, expert):
            return super().one(x, expert) * (1.01 if expert == self.louder else 1.0)

    with init_empty_weights():
        module = Many()
    for module.louder in (-1, 3, 17, 39):
        found = read_experts(module, routed_call(call((7, WIDTH)), {}))
        assert isinstance(found, str) == (module.louder >= 0), (module.louder, found)
    assert "some of its experts differently" in found


def test_quantized_experts_are_left():
    decision = decide(lambda: Block(Looped()), quantization="fp8")
    assert "quantized" in decision.reason("looped_experts", "site.experts")


def call(hidden, ids=torch.long, weights=torch.float32, shape=(7, 2)):
    return torch.empty(hidden, device="meta"), *(torch.empty(shape, dtype=d, device="meta") for d in (ids, weights))


def test_only_calls_with_tokens_and_their_experts_are_answered_for():
    assert stand_in(call((1, 7, WIDTH)), {}).shape == (1, 7, WIDTH)
    assert stand_in(call((7, 2)), {}) is None, "which are the weights cannot be told"
    assert stand_in(call((6, WIDTH)), {}) is None
    assert stand_in(call((7, WIDTH), ids=torch.bool), {}) is None
    assert stand_in(call((7, WIDTH), weights=torch.long), {}) is None
    assert stand_in((*call((7, WIDTH)), 3), {}) is None


@pytest.mark.parametrize("sizes", [(16, 6144, 10752), (64, 2048, 1024), (64, 2048, 2048)])
def test_large_experts_are_read_off_a_narrow_copy(sizes):
    experts, hidden, inner = sizes

    class Wide(Looped):
        def fill(self):
            self.inner = inner
            self.first = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
            self.second = nn.Parameter(torch.empty(experts, hidden, inner))

    with init_empty_weights():
        module = Wide()
    begun = time.monotonic()
    found = read_experts(module, routed_call(call((7, hidden)), {}))
    assert isinstance(found, LoopedExpertsSpec), found
    assert (found.experts.num_experts, found.experts.hidden, found.experts.intermediate) == sizes
    assert time.monotonic() - begun < 30


class Model:
    dbrx = DbrxConfig(
        d_model=64,
        n_heads=4,
        n_layers=2,
        vocab_size=128,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0},
        ffn_config={"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    )
    longcat = LongcatFlashConfig(
        hidden_size=64,
        num_layers=2,
        num_attention_heads=4,
        vocab_size=128,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=6,
        zero_expert_num=3,
        moe_topk=2,
    )


def test_models_of_transformers():
    plan = make_plan(build(Model.dbrx, torch.float32), ServingSpec(compiled=True))
    specs = {r.layer for r in plan.rewrites if r.fuser == "looped_experts"}
    assert {spec.experts for spec in specs} == {ExpertsSpec(4, 2, 64, 96)}
    assert plan.counts["looped_experts"] == 2
    plan = make_plan(build(Model.longcat, torch.float32), ServingSpec(compiled=True))
    specs = {r.layer for r in plan.rewrites if r.fuser == "looped_experts"}
    assert {(spec.experts, spec.identity) for spec in specs} == {(ExpertsSpec(6, 2, 64, 32), 3)}


def test_a_model_whose_loop_is_not_understood_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("tfbackend.fusers.looped_experts.read_experts", lambda *_: "no reading")
    _, refusals = draft_plan(build(Model.dbrx, torch.float32), ServingSpec())
    told = [str(r) for r in refusals if isinstance(r, UnsupportedModelError) and "through the experts" in str(r)]
    assert len(told) == 2, "each of the layers"
    assert "no reading" in told[0]
    assert "blocks.0.ffn.experts" in told[0]
