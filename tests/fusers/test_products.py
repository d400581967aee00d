"""Linears told by what they compute, whichever way round they keep their weight, and how ranks share pairs of them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.sites import DIM, HEADS, KV_HEADS, WIDTH, attend, decide, heads, lines
from tfbackend.fusers.base import WeightEntry
from tfbackend.fusers.products import LinearShape, linear_shape
from tfbackend.graph.trial import materialise
from tfbackend.layerspecs import LinearSpec, MergedLinearSpec, QKVSpec

Q, KV = HEADS * DIM, KV_HEADS * DIM


class Turned(nn.Module):
    """A weight [in, out] without a bias."""

    def __init__(self, rows=WIDTH, columns=24):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, x):
        return x @ self.weight


class TurnedBias(Turned):
    def __init__(self, rows=WIDTH, columns=24):
        super().__init__(rows, columns)
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class OtherWay(TurnedBias):
    """As in nn.Linear, and no subclass of it."""

    def __init__(self, rows=WIDTH, columns=24):
        super().__init__(columns, rows)
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class ByTransposition(OtherWay):
    def forward(self, x):
        return x.reshape(-1, x.shape[-1]).mm(self.weight.t()).view(*x.shape[:-1], -1) + self.bias


class TurnedTwice(TurnedBias):
    def forward(self, x):
        return F.linear(x, self.weight.transpose(0, 1), self.bias)


class Clipped(TurnedBias):
    def forward(self, x):
        return super().forward(x).clamp(-8, 8)


class BiasTwice(TurnedBias):
    def forward(self, x):
        return torch.addmm(self.bias, x[0], self.weight)[None] + self.bias


class BiasUnused(TurnedBias):
    def forward(self, x):
        return x @ self.weight


class HalfTheBias(TurnedBias):
    def forward(self, x):
        return torch.addmm(self.bias, x[0], self.weight, beta=0.5)[None]


class Residual(Turned):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return x @ self.weight + x


class TokensSwapped(TurnedBias):
    def forward(self, x):
        return torch.matmul(x.flip(1), self.weight) + self.bias


class WithBuffer(TurnedBias):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))


HITS = {
    Turned: LinearShape(WIDTH, 24, False, True),
    TurnedBias: LinearShape(WIDTH, 24, True, True),
    OtherWay: LinearShape(WIDTH, 24, True, False),
    ByTransposition: LinearShape(WIDTH, 24, True, False),
    TurnedTwice: LinearShape(WIDTH, 24, True, True),
}


def on_meta(build):
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("build", HITS)
def test_linears_by_what_they_compute(build):
    assert linear_shape(on_meta(build)) == HITS[build]
    entry = (WeightEntry("", "", transposed=True),) if HITS[build].transposed else ()
    rewrite = decide(build).rewrite("linear")
    assert (rewrite.layer, rewrite.weights) == (LinearSpec(WIDTH, 24, HITS[build].bias), entry)


@pytest.mark.parametrize("build", [Clipped, BiasTwice, BiasUnused, HalfTheBias, Residual, TokensSwapped, WithBuffer])
def test_what_computes_anything_else_is_none(build):
    assert linear_shape(on_meta(build)) is None
    assert decide(build).reason("linear") == "silent"


@settings(max_examples=40, deadline=None)
@given(
    wide=st.integers(1, 12), out=st.integers(1, 12), build=st.sampled_from([*HITS, Conv1D]), tokens=st.integers(1, 6)
)
def test_the_shape_says_what_the_module_computes(wide, out, build, tokens):
    """Square ones are where a wrong way round would fit as well."""
    module = on_meta(lambda: Conv1D(out, wide) if build is Conv1D else build(wide, out))
    shape = linear_shape(module)
    assert (shape.in_features, shape.out_features) == (wide, out)
    real = materialise(module, torch.Generator().manual_seed(tokens))
    weight = real.weight.t() if shape.transposed else real.weight
    x = torch.randn(1, tokens, wide)
    assert torch.allclose(F.linear(x, weight, real.bias if shape.bias else None), real(x), atol=1e-5)


class PackedConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = Conv1D(Q + 2 * KV, WIDTH)
        self.out = Conv1D(WIDTH, Q)

    def forward(self, x):
        q, k, v = self.qkv(x).split((Q, KV, KV), dim=2)
        return self.out(attend(self, heads(q), heads(k), heads(v)))


class ConvPair(nn.Module):
    def __init__(self, act=None, mid=48):
        super().__init__()
        self.up, self.down, self.act = Conv1D(mid, WIDTH), Conv1D(WIDTH, mid), act or nn.GELU()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class ConvSiblings(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Conv1D(16, WIDTH), nn.Linear(WIDTH, 24)

    def forward(self, x):
        return torch.cat((self.a(x), self.b(x).tanh()), dim=-1)


def test_packed_projection_with_its_weight_the_other_way_round():
    plan = decide(PackedConv, tp_size=2)
    rewrite = plan.rewrite("packed_qkv")
    assert dict(rewrite.children) == {"qkv": QKVSpec(WIDTH, DIM, DIM, HEADS, KV_HEADS, bias=True)}
    assert rewrite.weights == (WeightEntry("qkv", "qkv", None, transposed=True),)
    assert lines(plan.text())[0] == "q, k, v = self.qkv(x).split(self.qkv_sizes, dim=-1)"
    assert plan.rewrite("linear", "site.out").layer == LinearSpec(Q, WIDTH, True, "rowwise")


def test_merged_with_one_that_lies_the_usual_way():
    rewrite = decide(ConvSiblings).rewrite("merged_column")
    assert dict(rewrite.children) == {"a_b": MergedLinearSpec(WIDTH, (16, 24), bias=True)}
    assert [entry.transposed for entry in rewrite.weights] == [True, False]


def test_a_wrong_way_round_fails_its_proof(monkeypatch):
    """Of a square weight nothing but its values tells."""
    square = decide(lambda: TurnedBias(WIDTH, WIDTH))
    assert square.rewrite("linear").weights
    monkeypatch.setattr("tfbackend.proof_parts.Turned.forward", lambda self, x: F.linear(x, self.weight, self.bias))
    assert decide(lambda: TurnedBias(WIDTH, WIDTH)).reason("linear").startswith("not used, its proof failed: outputs")


# ---- pairs on ranks ----


def styles(*build, **keywords):
    plan = decide(*build, tp_size=2, **keywords)
    found = [r for r in plan.rewrites if r.fuser == "linear" and r.qualname.startswith("site.")]
    return {r.qualname.removeprefix("site."): r.layer.style for r in found}


class Looped(nn.Module):
    """Element-wise, written out."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class PlainPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return self.second(self.first(x).relu().square())


class ReadTwice(PlainPair):
    def forward(self, x):
        y = self.first(x)
        return self.second(y.relu()) + y.sum(-1, keepdim=True)


class Scaled(PlainPair):
    """A number for each of the values between the two."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x):
        return self.second(self.first(x).relu() * self.scale)


class Rolled(PlainPair):
    def forward(self, x):
        return self.second(self.first(x).roll(1, -1))


@pytest.mark.parametrize("build", [ConvPair, lambda: ConvPair(Looped()), lambda: ConvPair(nn.Sequential(nn.ReLU()))])
def test_pair_around_an_activation(build):
    assert styles(build) == {"up": "colwise", "down": "rowwise"}
    assert decide(build).reason("linear_pair") == "silent", "on one rank there is nothing to share"


def test_pair_of_plain_linears_without_a_plan():
    assert styles(PlainPair) == {"first": "colwise", "second": "rowwise"}


@pytest.mark.parametrize("act", [lambda: nn.Softmax(dim=-1), lambda: nn.LayerNorm(48), nn.PReLU])
def test_work_across_the_width_is_not_shared(act):
    assert set(styles(lambda: ConvPair(act())).values()) == {"replicated"}


@pytest.mark.parametrize("build", [ReadTwice, Scaled, Rolled])
def test_what_needs_all_of_the_width_is_not_shared(build):
    assert styles(build) == {"first": "replicated", "second": "replicated"}


def test_the_plan_of_the_model_comes_first():
    assert styles(PlainPair, tp_plan={"site.second": "rowwise_split_input"})["first"] == "replicated"


def test_a_width_that_does_not_divide_is_not_shared():
    assert set(styles(lambda: ConvPair(mid=47)).values()) == {"replicated"}
