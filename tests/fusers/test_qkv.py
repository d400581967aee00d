"""Query, key and value projections, told apart by the dataflow and merged where nothing speaks against it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.sites import DIM, HEADS, KV_HEADS, WIDTH, attend, decide, heads, lines
from tfbackend.layerspecs import AttentionSpec, QKVSpec


class Attention(nn.Module):
    def __init__(self, bias=(False, False, False)):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * DIM, bias=bias[0])
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * DIM, bias=bias[1])
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * DIM, bias=bias[2])
        self.o_proj = nn.Linear(HEADS * DIM, WIDTH, bias=False)

    def forward(self, x):
        q = heads(self.q_proj(x))
        k = heads(self.k_proj(x))
        v = heads(self.v_proj(x))
        return self.o_proj(attend(self, q, k, v))


class Misnamed(Attention):
    """The names say nothing: k_proj gives the values and v_proj the keys."""

    def forward(self, x):
        q = heads(self.q_proj(x))
        return self.o_proj(attend(self, q, heads(self.v_proj(x)), heads(self.k_proj(x))))


class ValueFirst(Attention):
    def forward(self, x):
        v = heads(self.v_proj(x))
        k = heads(self.k_proj(x))
        q = heads(self.q_proj(x))
        return self.o_proj(attend(self, q, k, v))


class HeadNorm(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-5)

    def forward(self, x):
        q, k = self.norm(heads(self.q_proj(x))), self.norm(heads(self.k_proj(x)))
        return self.o_proj(attend(self, q, k, heads(self.v_proj(x))))


class FullNorm(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HEADS * DIM, eps=1e-5)

    def forward(self, x):
        q = heads(self.norm(self.q_proj(x)))
        return self.o_proj(attend(self, q, heads(self.k_proj(x)), heads(self.v_proj(x))))


class KeyTwice(Attention):
    def forward(self, x):
        k = heads(self.k_proj(x) + self.k_proj(x))
        return self.o_proj(attend(self, heads(self.q_proj(x)), k, heads(self.v_proj(x))))


class ValueFromKey(Attention):
    def forward(self, x):
        k = heads(self.k_proj(x))
        return self.o_proj(attend(self, heads(self.q_proj(x)), k, k))


class OtherInput(Attention):
    def forward(self, x):
        return self.o_proj(attend(self, heads(self.q_proj(x)), heads(self.k_proj(x * 2)), heads(self.v_proj(x))))


class WeightRead(Attention):
    def forward(self, x):
        x = x.to(self.q_proj.weight.dtype)
        return self.o_proj(attend(self, heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))))


class WalrusInput(Attention):
    def forward(self, x):
        q = heads(self.q_proj(h := x * 2))
        return self.o_proj(attend(self, q, heads(self.k_proj(h)), heads(self.v_proj(h))))


class InComprehension(Attention):
    def forward(self, x):
        k, v = (heads(self.k_proj(y)) for y in [x]), heads(self.v_proj(x))
        return self.o_proj(attend(self, heads(self.q_proj(x)), next(k), v))


class MultiQuery(Attention):
    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(WIDTH, DIM, bias=False), nn.Linear(WIDTH, DIM, bias=False)


class NoOutput(Attention):
    def forward(self, x):
        return attend(self, heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)))


class ReadElsewhere(Attention):
    """A helper asks for a linear that the rewrite would take away."""

    def scale(self):
        return self.k_proj.in_features / WIDTH

    def forward(self, x):
        q = heads(self.q_proj(x)) * self.scale()
        return self.o_proj(attend(self, q, heads(self.k_proj(x)), heads(self.v_proj(x))))


class FlatView(Attention):
    """A view that split views do not allow."""

    def forward(self, x):
        q = self.q_proj(x).view(-1).view(1, x.shape[1], HEADS, DIM).transpose(1, 2)
        return self.o_proj(attend(self, q, heads(self.k_proj(x)), heads(self.v_proj(x))))


MADE = "(tfb_qkv_proj := self.qkv_proj(x).split(self.qkv_proj_sizes, dim=-1))"


def shards(rewrite):
    return {w.source: w.shard for w in rewrite.weights}


def test_three_calls_become_one():
    plan = decide(Attention)
    rewrite = plan.rewrite("qkv")
    assert lines(plan.text()) == [
        f"q = heads({MADE}[0])",
        "k = heads(tfb_qkv_proj[1])",
        "v = heads(tfb_qkv_proj[2])",
        "return self.o_proj(attend(self, q, k, v))",
    ]
    assert dict(rewrite.children) == {"qkv_proj": QKVSpec(WIDTH, DIM, DIM, HEADS, KV_HEADS, bias=False)}
    assert dict(rewrite.attributes) == {"qkv_proj_sizes": (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)}
    assert shards(rewrite) == {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
    assert not plan.unproven


def test_roles_come_from_the_dataflow_and_not_from_names():
    assert shards(decide(Misnamed).rewrite("qkv")) == {"q_proj": "q", "v_proj": "k", "k_proj": "v"}


def test_the_call_stands_where_the_first_of_them_stood():
    text = lines(decide(ValueFirst).text())
    assert text[0] == f"v = heads({MADE}[2])"
    assert text[2] == "q = heads(tfb_qkv_proj[0])"


def test_input_named_in_the_first_call_stays_there():
    text = lines(decide(WalrusInput).text())
    assert "self.qkv_proj(h := x * 2)" in text[0]


@pytest.mark.parametrize("build", [HeadNorm, FullNorm, MultiQuery])
def test_hits_on_one_rank(build):
    assert decide(build).rewrite("qkv")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Attention(bias=(True, True, False)), "some of the linears have a bias and some have none"),
        (KeyTwice, "k is computed from 2 linears"),
        (ValueFromKey, "query, key and value do not come from three linears"),
        (OtherInput, "q_proj, k_proj, v_proj do not share one input"),
        (WeightRead, "q_proj is used at 2 places of the source, one of them was traced"),
    ],
)
def test_near_misses_say_why(build, reason):
    assert decide(build).reason("qkv") == reason


def test_calls_in_a_scope_of_their_own_are_left_alone():
    """Python 3.12 runs some comprehensions in the frame of the forward, 3.11 none; only the reason differs."""
    assert decide(InComprehension).reason("qkv") in (
        "k_proj is called inside a GeneratorExp",
        "k_proj is not called as self.k_proj(...)",
    )


@pytest.mark.parametrize(
    ("build", "error"), [(ReadElsewhere, "AttributeError"), (FlatView, "RuntimeError: view size is not compatible")]
)
def test_what_the_source_does_not_tell_the_proof_does(build, error):
    plan = decide(build)
    assert plan.reason("qkv").startswith(f"not used, its proof failed: {error}")
    assert plan.rewrite("attention"), "attention itself is served as it is"
    assert plan.rewrite("linear", "site.q_proj"), "the linears are free again"


def test_ranks_share_heads():
    plan = decide(Attention, tp_size=2)
    assert plan.rewrite("qkv").styles == (("o_proj", "rowwise"),)
    assert plan.rewrite("linear", "site.o_proj").layer.style == "rowwise"
    assert decide(HeadNorm, tp_size=2).rewrite("qkv")
    assert decide(FullNorm, tp_size=2).reason("qkv") == "norm works across heads, which ranks do not share"
    assert decide(NoOutput, tp_size=2).reason("qkv") == "no one linear takes the output of all heads"


class NormOfEachHead(Attention):
    """zip ends with the shorter of the two: a rank with half the heads would use the first norms for all it has."""

    def __init__(self):
        super().__init__()
        norms = nn.ModuleList([nn.LayerNorm(DIM) for _ in range(HEADS)])
        self.norm = nn.Module()
        self.norm.norms = norms
        self.norm.__class__ = _EachHead

    def forward(self, x):
        q = self.norm(heads(self.q_proj(x)))
        return self.o_proj(attend(self, q, heads(self.k_proj(x)), heads(self.v_proj(x))))


class _EachHead(nn.Module):
    def forward(self, x):
        return torch.cat([norm(h) for norm, h in zip(self.norms, x.split(1, dim=1), strict=False)], dim=1)


class ScaleOfEachHead(Attention):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, HEADS, 1, DIM))

    def forward(self, x):
        q = heads(self.q_proj(x)) * self.scale
        return self.o_proj(attend(self, q, heads(self.k_proj(x)), heads(self.v_proj(x))))


@pytest.mark.parametrize(("build", "what"), [(NormOfEachHead, "norm"), (ScaleOfEachHead, "scale")])
def test_what_holds_something_for_each_head_stays_on_one_rank(build, what):
    assert decide(build).rewrite("qkv")
    wanted = f"{what} may hold something for each head, which ranks do not share"
    assert decide(build, tp_size=2).reason("qkv") == wanted


def test_stablelm_with_a_norm_for_each_head_gathers_its_heads_on_two_ranks():
    from transformers import StableLmConfig

    from tfbackend.meta import build
    from tfbackend.plan import draft_plan
    from tfbackend.serving import ServingSpec

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = StableLmConfig(**sizes, num_key_value_heads=2, vocab_size=64, qk_layernorm=True)
    plan, refusals = draft_plan(build(config, torch.float32), ServingSpec(tp_size=2))
    assert refusals == ()
    assert {spec.gathered for _, spec in plan.attention} == {True}
    assert any("q_layernorm may hold something for each head" in str(miss) for miss in plan.misses)


class WithKeywords(Attention):
    def __init__(self, **keywords):
        super().__init__()
        self.keywords = keywords

    def forward(self, x):
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return self.o_proj(attend(self, q, k, v, **self.keywords))


class Sinks(Attention):
    def __init__(self, own=True):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.own = own

    def forward(self, x):
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return self.o_proj(attend(self, q, k, v, s_aux=self.sinks if self.own else self.sinks * 2))


class Twice(Attention):
    def forward(self, x):
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return self.o_proj(attend(self, q, k, v) + attend(self, q, k, v))


class OverHeads(Attention):
    """Attends over the heads of each token: the axes are not where they are said to be."""

    def forward(self, x):
        q, k, v = (y.transpose(1, 2) for y in (heads(self.q_proj(x)), heads(self.q_proj(x)), heads(self.q_proj(x))))
        return attend(self, q, k, v)


class PartOfTheKeys(Attention):
    def forward(self, x):
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return self.o_proj(attend(self, q, k[:, :, :3], v[:, :, :3]))


def test_attention_reads_the_call():
    build = lambda: WithKeywords(scaling=0.3, softcap=2.0, dropout=0.0, sliding_window=4, position_ids=None)  # noqa: E731
    assert decide(build).rewrite("attention").children == (
        ("attn", AttentionSpec(HEADS, KV_HEADS, DIM, DIM, 0.3, window=None, soft_cap=2.0)),
    )


def test_attention_without_a_scale_has_the_usual_one():
    spec = dict(decide(lambda: WithKeywords(scaling=None)).rewrite("attention").children)["attn"]
    assert spec.scale == DIM**-0.5


def test_sinks_are_a_parameter_of_the_site():
    assert dict(decide(Sinks).rewrite("attention").children)["attn"].sinks == "sinks"
    assert decide(lambda: Sinks(own=False)).reason("attention") == "its attention sinks are no parameter of the module"


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: WithKeywords(position_bias=1), "the keyword position_bias would be dropped"),
        (lambda: WithKeywords(scaling=torch.ones(1)), "scaling is a Tensor, not a number"),
        (lambda: WithKeywords(dropout=0.1), "dropout 0.1 in evaluation"),
        (
            lambda: WithKeywords(is_causal=False),
            "a token sees those after it, for which each call would have to hold whole prompts",
        ),
        (OverHeads, "it attends over an axis of 4 and not over the 7 tokens of the observed run"),
        (PartOfTheKeys, f"query (1, {HEADS}, 7, {DIM}) and key (1, {KV_HEADS}, 3, {DIM}) are not of the same tokens"),
    ],
)
def test_attention_that_would_lose_something_is_a_miss(build, reason):
    assert decide(build).reason("attention") == reason


def test_wrong_rewrites_are_found_out():
    """Each of these is what a bug in a fuser would make; the proof must see it."""
    from dataclasses import replace

    from tfbackend.fusers.base import WeightEntry
    from tfbackend.proof import prove

    class Square(Attention):
        def __init__(self):
            super().__init__((True, True, True))
            self.k_proj, self.v_proj = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(WIDTH, HEADS * DIM)

    plan = decide(Square)
    site, good = plan.planner.sites["site"], plan.rewrite("qkv")
    group = [r for r in plan.rewrites if r.qualname == "site" and r.fuser != "qkv"]
    assert prove(site, [*group, good]) == ""

    swapped = tuple(replace(w, shard={"q": "k", "k": "q", "v": "v"}[w.shard]) for w in good.weights)
    assert "outputs differ" in prove(site, [*group, replace(good, weights=swapped)])
    other_parts = tuple(replace(e, text=e.text.replace("[1]", "[0]")) for e in good.edits)
    assert "outputs differ" in prove(site, [*group, replace(good, edits=other_parts)])
    assert "wide together" in prove(site, [*group, replace(good, weights=good.weights[:2])])
    assert "AttributeError" in prove(site, [*group, replace(good, edits=good.edits[:1])])
    unbound = (replace(good.edits[0], text="tfb_qkv_proj[0]"), *good.edits[1:])
    assert "NameError" in prove(site, [*group, replace(good, edits=unbound)])
    twice = (*good.weights[:2], WeightEntry("k_proj", "qkv_proj", "v"))
    assert "outputs differ" in prove(site, [*group, replace(good, weights=twice)])


def test_numerics_of_the_rewritten_attention():
    """Outside the prover: the edited text, executed on real tensors, against the class as written."""
    torch.manual_seed(3)
    module = Attention((True, True, True)).eval()
    plan = decide(lambda: Attention((True, True, True)))
    scope = dict(Attention.forward.__globals__)
    scope["attend"] = lambda me, q, k, v: (
        F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
        .transpose(1, 2)
        .flatten(2)
    )
    local: dict = {}
    exec(plan.text(), scope, local)
    merged = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
    merged.weight.data = torch.cat([module.q_proj.weight, module.k_proj.weight, module.v_proj.weight])
    merged.bias.data = torch.cat([module.q_proj.bias, module.k_proj.bias, module.v_proj.bias])
    x = torch.randn(1, 5, WIDTH)
    wanted = module.o_proj(
        scope["attend"](module, heads(module.q_proj(x)), heads(module.k_proj(x)), heads(module.v_proj(x)))
    )
    module.qkv_proj, module.qkv_proj_sizes = merged, dict(plan.rewrite("qkv").attributes)["qkv_proj_sizes"]
    torch.testing.assert_close(local["forward"](module, x), wanted)
