"""Whole mixture-of-experts blocks: what is read off their routers and shared experts, and what is left to its own code.

Each router here is written out the way some model might write it; the rule that it must be taken for is written beside.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fusers.test_experts import EXPERTS, INNER, Experts, made
from tests.fusers.test_glu import GLU
from tests.sites import WIDTH, decide, lines
from tfbackend.expertspec import ExpertsSpec
from tfbackend.graph.observe import observe
from tfbackend.moespec import MoESpec, RouterSpec

TOP_K, ROUTED = 2, ExpertsSpec(EXPERTS, 2, WIDTH, INNER)


class Gate(nn.Module):
    """Scores by a softmax over all experts; subclasses change what they are about."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def logits(self, x):
        return F.linear(x, self.weight)

    def forward(self, x):
        weights, ids = self.logits(x).softmax(-1).topk(TOP_K, dim=-1)
        return ids, weights


class AddsUpToOne(Gate):
    def forward(self, x):
        ids, weights = super().forward(x)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20)


class SoftmaxOfTheChosen(Gate):
    def forward(self, x):
        best, ids = self.logits(x).topk(TOP_K, dim=-1)
        return ids, best.softmax(-1)


class Scaled(Gate):
    def __init__(self):
        super().__init__()
        self.factor = 2.5

    def forward(self, x):
        ids, weights = super().forward(x)
        return ids, weights * self.factor


class Sigmoid(Gate):
    def forward(self, x):
        weights, ids = self.logits(x).sigmoid().topk(TOP_K, dim=-1)
        return ids, weights / weights.sum(-1, keepdim=True)


class Biased(Gate):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.empty(EXPERTS))

    def logits(self, x):
        return F.linear(x, self.weight, self.offset)


class Corrected(Gate):
    def __init__(self):
        super().__init__()
        self.steer = nn.Buffer(torch.zeros(1, EXPERTS))

    def logits(self, x):
        return F.linear(x.float(), self.weight.float())

    def forward(self, x):
        scores = self.logits(x).sigmoid()
        ids = (scores + self.steer).topk(TOP_K, dim=-1, sorted=False)[1]
        return ids, scores.gather(-1, ids)


class BiasedAndCorrected(Corrected):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, EXPERTS)
        del self.weight

    def logits(self, x):
        return self.linear(x)


class Grouped(Gate):
    """Two groups of three, of which the one with the best expert is used."""

    def __init__(self):
        super().__init__()
        self.n_group, self.topk_group = 2, 1

    def merit(self, groups):
        return groups.max(-1).values

    def forward(self, x):
        scores = self.logits(x).softmax(-1)
        choice = self.choice(scores).view(-1, self.n_group, EXPERTS // self.n_group)
        best = self.merit(choice).topk(self.topk_group, dim=-1)[1]
        mask = torch.zeros(len(x), self.n_group, device=x.device).scatter_(1, best, 1.0)
        ids = choice.masked_fill(mask[..., None] == 0, float("-inf")).flatten(1).topk(TOP_K, dim=-1)[1]
        return ids, scores.gather(1, ids)

    def choice(self, scores):
        return scores


class GroupedAndCorrected(Grouped):
    def __init__(self):
        super().__init__()
        self.steer = nn.Buffer(torch.zeros(EXPERTS))

    def merit(self, groups):
        return groups.topk(2, dim=-1)[0].sum(-1)

    def choice(self, scores):
        return scores + self.steer


RULES = {
    Gate: RouterSpec(renormalize=False),
    AddsUpToOne: RouterSpec(),
    SoftmaxOfTheChosen: RouterSpec(),
    Scaled: RouterSpec(renormalize=False, scale=2.5),
    Sigmoid: RouterSpec("sigmoid"),
    Biased: RouterSpec(renormalize=False, bias=True),
    Corrected: RouterSpec("sigmoid", renormalize=False, correction=True, wide=True),
    BiasedAndCorrected: RouterSpec("sigmoid", renormalize=False, correction=True, bias=True),
    Grouped: RouterSpec(renormalize=False, groups=2, groups_used=1),
    GroupedAndCorrected: RouterSpec(renormalize=False, groups=2, groups_used=1, correction=True),
}


class Block(nn.Module):
    def __init__(self, gate=Gate):
        super().__init__()
        self.router, self.experts = gate(), made(Experts)

    def forward(self, x):
        """A docstring, which goes with the rest."""
        flat = x.view(-1, WIDTH)
        ids, weights = self.router(flat)
        return self.experts(flat, ids, weights).view(x.shape)


class Shared(Block):
    def __init__(self):
        super().__init__()
        self.always = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH, bias=False))

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        ids, weights = self.router(flat)
        return self.experts(flat, ids, weights).view(x.shape) + self.always(x)


class SharedWithGate(Shared):
    def __init__(self):
        super().__init__()
        self.how_much = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        beside = torch.sigmoid(self.how_much(flat)) * self.always(flat)
        ids, weights = self.router(flat)
        return (beside + self.experts(flat, ids, weights)).view(x.shape)


class NormAfter(Shared):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        ids, weights = self.router(flat)
        return self.norm(3.0 * self.experts(flat, ids, weights).view(x.shape) + self.always(x))


class AlsoWeights(Block):
    def forward(self, x):
        flat = x.view(-1, WIDTH)
        ids, weights = self.router(flat)
        return self.experts(flat, ids, weights).view(x.shape), weights


def answer(build, **serving):
    return decide(build, **serving)


def spec_of(decision, site="site"):
    (child,) = decision.rewrite("moe", site).children
    return child


@pytest.mark.parametrize("gate", RULES, ids=lambda cls: cls.__name__)
def test_rules_of_routers(gate):
    decision = answer(lambda: Block(gate))
    assert spec_of(decision) == ("moe", MoESpec(ROUTED, RULES[gate]))
    assert lines(decision.text()) == ["return self.moe(x)"]
    assert not [m for m in decision.misses if m.fuser in ("moe", "experts")]


def test_every_tensor_of_the_block_has_a_new_place():
    rewrite = answer(lambda: Block(GroupedAndCorrected)).rewrite("moe")
    assert {(entry.source, entry.target) for entry in rewrite.weights} == {
        ("router.weight", "moe.runner.gate.weight"),
        ("router.steer", "moe.correction"),
        ("experts.gate_up_proj", "moe.runner.routed_experts.w13_weight"),
        ("experts.down_proj", "moe.runner.routed_experts.w2_weight"),
    }
    assert set(rewrite.removes) == {"router", "experts"}


@pytest.mark.parametrize(
    ("cls", "beside"), [(Shared, ("always", "", "always.2")), (SharedWithGate, ("always", "how_much", "always.2"))]
)
def test_shared_experts_run_inside(cls, beside):
    decision = answer(cls)
    assert spec_of(decision) == ("moe", MoESpec(ROUTED, RouterSpec(renormalize=False), *beside))
    assert lines(decision.text()) == ["return self.moe(x)"]


def test_what_everything_goes_through_in_the_end_stays_outside():
    decision = answer(NormAfter)
    assert spec_of(decision)[1].router == RouterSpec(renormalize=False, scale=3.0)
    assert lines(decision.text()) == ["return self.norm(self.moe(x))"]


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Shared, "return self.moe(x) + self.always(x)"),
        (SharedWithGate, "return self.moe(x) + self.how_much(x).sigmoid() * self.always(x)"),
    ],
)
def test_ranks_that_share_out_tokens_run_the_shared_expert_outside(cls, text):
    decision = answer(cls, sequence_parallel_moe=True)
    assert spec_of(decision) == ("moe", MoESpec(ROUTED, RouterSpec(renormalize=False)))
    assert lines(decision.text()) == [text]


class OnePart(nn.Module):
    """A base model whose one layer may or may not look at the second thing that its block gives."""

    def __init__(self, looks):
        super().__init__()
        self.block, self.looks = AlsoWeights(), looks

    def forward(self, x):
        hidden, weights = self.block(x)
        return hidden + weights.sum() if self.looks else hidden


def test_an_output_that_nobody_reads_is_dropped():
    decision = answer(lambda: OnePart(looks=False))
    assert spec_of(decision, "site.block")[0] == "moe"
    assert lines(decision.text("site.block")) == ["return self.moe(x), None"]


def test_an_output_that_somebody_reads_is_kept():
    assert "more than hidden states" in answer(lambda: OnePart(looks=True)).reason("moe", "site.block")


def test_what_is_unread_is_known_of_every_output():
    base = answer(lambda: OnePart(looks=False)).planner.base
    assert observe(base).unread("site.block") == [True, True]
    assert observe(base).unread("site") is None
    looking = answer(lambda: OnePart(looks=True)).planner.base
    assert observe(looking).unread("site.block") == [False, False]


class SquareRoot(Gate):
    def forward(self, x):
        ids, weights = super().forward(x)
        return ids, weights.sqrt()


class OwnScale(Gate):
    """One more vector that is neither a bias nor a correction."""

    def __init__(self):
        super().__init__()
        self.per_expert = nn.Parameter(torch.empty(EXPERTS))

    def forward(self, x):
        ids, weights = super().forward(x)
        return ids, weights * self.per_expert[ids]


class TwoMatrices(Gate):
    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def logits(self, x):
        return F.linear(x, self.weight) + F.linear(x, self.other).tanh()


class SoftCap(Gate):
    def logits(self, x):
        return 2.0 * torch.tanh(super().logits(x) / 2.0)


class Corrects(Corrected):
    """The correction is part of the weights."""

    def forward(self, x):
        weights, ids = (self.logits(x).sigmoid() + self.steer).topk(TOP_K, dim=-1)
        return ids, weights


class NormBefore(Block):
    def forward(self, x):
        flat = F.layer_norm(x.view(-1, WIDTH), (WIDTH,))
        ids, weights = self.router(flat)
        return self.experts(flat, ids, weights).view(x.shape)


class Residual(Block):
    def forward(self, x):
        flat = x.view(-1, WIDTH)
        ids, weights = self.router(flat)
        return x + self.experts(flat, ids, weights).view(x.shape)


class Tanh(Shared):
    def forward(self, x):
        flat = x.view(-1, WIDTH)
        ids, weights = self.router(flat)
        return self.experts(flat, ids, weights).view(x.shape) + self.always(x).tanh()


class SecondInput(Block):
    def forward(self, x, y=None):
        flat = x.view(-1, WIDTH)
        ids, weights = self.router(flat)
        return self.experts(flat, ids, weights).view(x.shape)


class GivesTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SecondInput()

    def forward(self, x):
        return self.inner(x, x)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Block(SquareRoot), "none of the rules"),
        (lambda: Block(OwnScale), "none of the rules"),
        (lambda: Block(TwoMatrices), "its router has the tensors"),
        (lambda: Block(SoftCap), "none of the rules"),
        (lambda: Block(Corrects), "none of the rules"),
        (NormBefore, "see something else"),
        (Residual, "what it adds to its experts"),
        (Tanh, "what it adds to its experts"),
    ],
)
def test_what_no_rule_describes_keeps_its_router(build, reason):
    decision = answer(build)
    assert reason in decision.reason("moe")
    assert decision.rewrite("experts", "site.experts")


def test_a_block_that_takes_more_keeps_its_router():
    assert "more than hidden states" in answer(GivesTwo).reason("moe", "site.inner")


def test_the_proof_sees_a_wrong_rule(monkeypatch):
    """Were the rule read wrongly, the whole block would differ from its original and not be used."""
    right = RouterSpec.route
    monkeypatch.setattr(RouterSpec, "route", lambda *a, **k: (right(*a, **k)[0].flip(-1), right(*a, **k)[1]))
    monkeypatch.setattr("tfbackend.fusers.routers._close", lambda *_: True)
    decision = answer(Block)
    assert "proof failed" in decision.reason("moe")
    assert decision.rewrite("experts", "site.experts")


def test_ranks_leave_the_sum_of_a_shared_expert_to_the_block():
    """Only where the expert is shared out by its insides; whoever replaces it says that."""

    class Glu(Shared):
        def __init__(self):
            super().__init__()
            self.always = GLU()

    styles = {
        r.qualname: r.layer.style
        for r in answer(Glu, tp_size=2).rewrites
        if r.fuser == "linear" and r.qualname.startswith("site.always")
    }
    assert styles == {"site.always.down": "rowwise_partial"}
