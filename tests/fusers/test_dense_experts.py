"""Experts that all run on every token: the forms that are routed instead, and what is like them and is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Llama4TextConfig

from tests.sites import WIDTH, decide
from tfbackend.expertspec import ExpertsSpec
from tfbackend.loopedspec import DenseExpertsSpec, ExpertsPart
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec

EXPERTS, INNER = 6, 48


class Experts(nn.Module):
    """[experts * tokens, width], a block of rows for each expert."""

    def __init__(self):
        super().__init__()
        self.into = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.out = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))

    def forward(self, rows):
        gate, up = torch.bmm(rows.view(EXPERTS, -1, WIDTH), self.into).chunk(2, dim=-1)
        return torch.bmm(self.act(gate) * up, self.out).view(-1, WIDTH)

    def act(self, gate):
        return F.silu(gate)


class Shifted(Experts):
    """Makes something of nothing."""

    def forward(self, rows):
        return super().forward(rows) + 0.1


class OddGate(Experts):
    def act(self, gate):
        return torch.tanh(gate)


class Mixing(Experts):
    """Rows of one expert see each other."""

    def forward(self, rows):
        return super().forward(
            rows - rows.view(EXPERTS, -1, WIDTH).mean(1, keepdim=True).expand(-1, 7, -1).flatten(0, 1)
        )


class Block(nn.Module):
    top_k = 2

    def __init__(self, experts=Experts):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), experts()
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)

    def scores(self, x):
        logits = self.router(x)
        best, ids = logits.topk(self.top_k, dim=1)
        return torch.full_like(logits, -torch.inf).scatter(1, ids, best).sigmoid()

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.scores(flat)
        rows = flat.repeat(EXPERTS, 1)
        rows = rows * scores.transpose(0, 1).reshape(-1, 1)
        given = self.experts(rows)
        out = self.shared(flat)
        out.add_(given.reshape(EXPERTS, -1, WIDTH).sum(dim=0))
        return out.view(x.shape)


class One(Block):
    top_k = 1


class WeighedAfter(Block):
    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.scores(flat).t()
        given = self.experts(flat.repeat(EXPERTS, 1)).view(EXPERTS, -1, WIDTH)
        routed = (given * scores.unsqueeze(-1)).sum(0)
        return (routed + self.shared(flat)).view(x.shape)


class WeighedTwice(Block):
    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.scores(flat)
        rows = flat.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        given = self.experts(rows).view(EXPERTS, -1, WIDTH)
        return (given * scores.t().unsqueeze(-1)).sum(0).view(x.shape)


class Threshold(Block):
    """As many experts as are likely enough."""

    def scores(self, x):
        scores = self.router(x).softmax(-1)
        return scores * (scores > 0.2)


class SeesTheRest(Block):
    """What each expert gave goes elsewhere too."""

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        rows = flat.repeat(EXPERTS, 1) * self.scores(flat).transpose(0, 1).reshape(-1, 1)
        given = self.experts(rows)
        total = given.reshape(EXPERTS, -1, WIDTH).sum(dim=0)
        return (total + given.reshape(EXPERTS, -1, WIDTH).amax(0)).view(x.shape)


PARTS = (
    ExpertsPart("into", "w13_weight", None, transposed=True),
    ExpertsPart("out", "w2_weight", None, transposed=True),
)


@pytest.mark.parametrize(
    ("cls", "top_k", "before"), [(Block, 2, True), (One, 1, True), (WeighedAfter, 2, False)], ids=lambda x: str(x)
)
def test_what_is_routed(cls, top_k, before):
    decision = decide(cls)
    rewrite = decision.rewrite("dense_experts")
    inner = ExpertsSpec(EXPERTS, 1 if before else top_k, WIDTH, INNER)
    assert dict(rewrite.children) == {"routed": DenseExpertsSpec(inner, top_k, before, PARTS)}
    text = decision.text()
    assert "self.routed(flat, scores" in text
    assert "self.experts" not in text
    assert ".repeat" not in text
    assert "self.shared(flat)" in text


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (WeighedTwice, "not to weigh and add them up"),
        (Threshold, "changes from token to token"),
        (SeesTheRest, ""),
        (lambda: Block(OddGate), "none of the ways"),
        (lambda: Block(Shifted), "none of the ways"),
        (lambda: Block(Mixing), "none of the ways"),
    ],
)
def test_what_is_left_alone(block, reason):
    told = decide(block).reason("dense_experts")
    assert told != "silent"
    assert reason in told


def test_quantized_experts_are_left():
    assert "quantized" in decide(Block, quantization="fp8").reason("dense_experts")


def test_the_layer_is_given_no_more_than_it_needs():
    """Over experts in plain torch: what the original gives, and a third choice left out shows."""
    block = Block()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(7, WIDTH)
    with torch.no_grad():
        scores = block.scores(x)
        rows = x.repeat(EXPERTS, 1) * scores.t().reshape(-1, 1)
        wanted = block.experts(rows).view(EXPERTS, -1, WIDTH).sum(0)
        spec = DenseExpertsSpec(ExpertsSpec(EXPERTS, 1, WIDTH, INNER), 2, True, PARTS)
        reference = spec.experts.reference()
        reference.into, reference.out = block.experts.into.transpose(1, 2), block.experts.out.transpose(1, 2)
        torch.testing.assert_close(spec.compute(reference, x, scores), wanted)
        one = DenseExpertsSpec(spec.experts, 1, True, PARTS)
        assert (one.compute(reference, x, scores) - wanted).abs().max() > 0.1


def test_a_model_of_transformers():
    config = Llama4TextConfig(
        hidden_size=64,
        intermediate_size=96,
        intermediate_size_mlp=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        pad_token_id=0,
        num_local_experts=4,
        num_experts_per_tok=1,
        moe_layers=[1],
    )
    plan = make_plan(build(config, torch.float32), ServingSpec(compiled=True, tp_size=2))
    (rewrite,) = [r for r in plan.rewrites if r.fuser == "dense_experts"]
    spec = dict(rewrite.children)["routed"]
    assert (rewrite.qualname, spec.experts, spec.top_k, spec.before) == (
        "layers.1.feed_forward",
        ExpertsSpec(4, 1, 64, 96),
        1,
        True,
    )
