"""Attention that a module writes out: which ways of writing are found, what is measured, and what is left alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import DIM, HEADS, WIDTH, OneSite, heads
from tfbackend.graph.masks import MaskWindow
from tfbackend.graph.observe import observe
from tfbackend.inline import behind_interface
from tfbackend.inspection.diffs import forward_diffs
from tfbackend.layerspecs import AttentionSpec
from tfbackend.meta import build
from tfbackend.plan import draft_plan, make_plan
from tfbackend.serving import ServingSpec

LENGTH = 40
WINDOW = 5
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.1])


def causal(tokens, window=None):
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    return (distance >= 0) & (distance < (window or tokens))


class Written(nn.Module):
    """An attention that hides later tokens by itself; subclasses say how."""

    kv_heads = HEADS

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * DIM)
        self.k = nn.Linear(WIDTH, self.kv_heads * DIM)
        self.v = nn.Linear(WIDTH, self.kv_heads * DIM)
        self.o = nn.Linear(HEADS * DIM, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", causal(LENGTH), persistent=False)
        self.register_buffer("near", causal(LENGTH, WINDOW), persistent=False)
        self.register_buffer("slopes", SLOPES.clone(), persistent=False)
        self.register_buffer("places", torch.arange(LENGTH).float(), persistent=False)

    def forward(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = self.attend(q, k, v)
        return self.o(y.transpose(1, 2).reshape(1, x.shape[1], -1))


class Matmul(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        s = torch.matmul(q, k.transpose(-1, -2)) * 0.3
        s = s.masked_fill(~self.seen[:n, :n], torch.finfo(s.dtype).min)
        return torch.matmul(self.drop(s.softmax(-1)), v)


class DividedInPlace(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        s = q @ k.transpose(-1, -2)
        s /= math.sqrt(2.0)
        s += torch.where(self.seen[:n, :n], 0.0, -1e9)
        w = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
        return w @ v


class ScaledBefore(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        q = q * 0.5
        s = q.float() @ k.float().transpose(2, 3)
        s = torch.where(self.seen[:n, :n], s, torch.tensor(-1e9))
        w = nn.Softmax(dim=-1)(s).type_as(v)
        return w @ v


class Bmm(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        q, k, v = q.squeeze(0), k.squeeze(0).transpose(1, 2), v.squeeze(0)
        s = torch.bmm(q, k)
        w = (s + torch.full((n, n), -1e9, device=q.device).triu(1)).softmax(-1)
        return torch.bmm(w, v).unsqueeze(0)


class Baddbmm(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        bias = (self.slopes[:, None] * self.places[:n])[:, None]
        s = bias.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.2)
        w = s.masked_fill(~self.seen[:n, :n], -1e9).softmax(-1)
        return (w @ v).unsqueeze(0)


class FarAway(Baddbmm):
    """Slopes so steep that far tokens get no weight at all; they are not hidden for that."""

    def __init__(self):
        super().__init__()
        self.slopes = self.slopes * 16


class Rounded(Written):
    """A bias in bfloat16, which the first places do not show."""

    def attend(self, q, k, v):
        n = q.shape[2]
        bias = (self.slopes[:, None].bfloat16() * (self.places[:n] * 9).bfloat16()).float()
        s = q @ k.transpose(-1, -2) + bias[:, None]
        return s.masked_fill(~self.seen[:n, :n], -1e9).softmax(-1) @ v

    def __init__(self):
        super().__init__()
        self.slopes = torch.full((HEADS,), 0.25)


class Einsum(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
        w = s.masked_fill(~self.near[:n, :n], -1e9).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", w, v)
        return y.transpose(1, 2)


class Torchs(Written):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


class TorchsMasked(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen[:n, :n], dropout_p=0.0)


class Shared(Matmul):
    kv_heads = 1


class Repeated(Written):
    kv_heads = 2

    def attend(self, q, k, v):
        n = q.shape[2]
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        s = (q @ k.transpose(-1, -2)).masked_fill(~self.seen[:n, :n], -1e9)
        return s.softmax(-1) @ v


class TwoResults(Written):
    def forward(self, x):
        n = x.shape[1]
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        s = q @ k.transpose(-1, -2)
        w = s.masked_fill(~self.seen[:n, :n], -1e9).softmax(-1)
        y = w @ v
        return self.o(y.transpose(1, 2).reshape(1, n, -1)), w


SPEC = {
    Matmul: AttentionSpec(HEADS, HEADS, DIM, DIM, 0.3),
    DividedInPlace: AttentionSpec(HEADS, HEADS, DIM, DIM, 2**-0.5),
    ScaledBefore: AttentionSpec(HEADS, HEADS, DIM, DIM, 1.0),
    Bmm: AttentionSpec(HEADS, HEADS, DIM, DIM, 1.0),
    Baddbmm: AttentionSpec(HEADS, HEADS, DIM, DIM, 0.2, alibi_slopes=tuple(SLOPES.tolist())),
    FarAway: AttentionSpec(HEADS, HEADS, DIM, DIM, 0.2, alibi_slopes=tuple((SLOPES * 16).tolist())),
    Einsum: AttentionSpec(HEADS, HEADS, DIM, DIM, 0.3, window=WINDOW),
    Torchs: AttentionSpec(HEADS, HEADS, DIM, DIM, 0.3),
    TorchsMasked: AttentionSpec(HEADS, HEADS, DIM, DIM, DIM**-0.5),
    Shared: AttentionSpec(HEADS, 1, DIM, DIM, 0.3),
    Repeated: AttentionSpec(HEADS, 2, DIM, DIM, 1.0),
    TwoResults: AttentionSpec(HEADS, HEADS, DIM, DIM, 1.0),
}


class Base(OneSite):
    def forward(self, input_ids, position_ids=None, use_cache=False):
        found = super().forward(input_ids, position_ids, use_cache)
        return found[0] if isinstance(found, tuple) else found


def inlined(cls, max_model_len=LENGTH):
    """(what was done with a site of `cls`, the specs of the attention seen afterwards)."""
    with init_empty_weights(include_buffers=False):
        base = Base([cls()])
    base.eval()
    before = type(base.site)
    with behind_interface(base, observe(base), ServingSpec(max_model_len=max_model_len)) as done:
        calls = observe(base).attention
    assert type(base.site) is before
    assert not hasattr(base.site, "inline_numbers")
    return done, calls.get("site", [])


@pytest.mark.parametrize("cls", SPEC)
def test_found_and_measured(cls):
    done, calls = inlined(cls)
    assert done.problems == {}
    spec, numbers, (call,) = SPEC[cls], done.numbers["site"], calls
    assert (call.query[1], call.key[1], call.value[3]) == (spec.num_heads, spec.num_kv_heads, spec.v_head_dim)
    assert numbers.scale == pytest.approx(spec.scale, rel=1e-6)
    assert numbers.window == spec.window
    assert (numbers.alibi_slopes is None) == (spec.alibi_slopes is None)
    assert numbers.alibi_slopes is None or numbers.alibi_slopes == pytest.approx(spec.alibi_slopes, rel=1e-5)
    assert "softmax" not in done.methods["site"]


@pytest.mark.parametrize(("cls", "rounded"), [(Rounded, True), (Baddbmm, False), (FarAway, False)])
def test_a_bias_that_is_rounded_is_told(cls, rounded):
    done, _ = inlined(cls)
    assert done.numbers["site"].rounded is rounded


class BetweenHeads(Written):
    """Mixes the weights of heads."""

    def attend(self, q, k, v):
        n = q.shape[2]
        w = (q @ k.transpose(-1, -2)).masked_fill(~self.seen[:n, :n], -1e9).softmax(-1)
        w = w * self.slopes[:, None, None]
        return w @ v


class Capped(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        s = torch.tanh(q @ k.transpose(-1, -2))
        return s.masked_fill(~self.seen[:n, :n], -1e9).softmax(-1) @ v


class Curved(Written):
    """A bias that grows with the square of the distance."""

    def attend(self, q, k, v):
        n = q.shape[2]
        far = (self.places[:n, None] - self.places[None, :n]) ** 2
        s = q @ k.transpose(-1, -2) - 0.1 * far
        return s.masked_fill(~self.seen[:n, :n], -1e9).softmax(-1) @ v


class Flat(Written):
    """A bias that stops growing at a distance of 12."""

    def attend(self, q, k, v):
        n = q.shape[2]
        far = (self.places[:n, None] - self.places[None, :n]).clamp(max=12.0)
        s = q @ k.transpose(-1, -2) - 0.1 * far
        return s.masked_fill(~self.seen[:n, :n], -1e9).softmax(-1) @ v


class Bidirectional(Written):
    def attend(self, q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class BothWaysUpTo(Written):
    """Sees tokens on both sides, but those further off than 20, which no short look shows."""

    def attend(self, q, k, v):
        places = torch.arange(q.shape[2], device=q.device)
        far = (places[:, None] - places[None, :]).abs() > 20
        return (q @ k.transpose(-1, -2)).masked_fill(far, -1e9).softmax(-1) @ v


class BothWaysSloped(Written):
    """Adds less for tokens that are farther, on both sides."""

    def attend(self, q, k, v):
        places = torch.arange(q.shape[2], device=q.device)
        far = (places[:, None] - places[None, :]).abs()
        return (q @ k.transpose(-1, -2) - 0.3 * far).softmax(-1) @ v


class Holes(Written):
    """Hides every token at a distance of 20, which no short look shows."""

    def __init__(self):
        super().__init__()
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
        self.seen = self.seen & (distance != 20)

    def attend(self, q, k, v):
        n = q.shape[2]
        return (q @ k.transpose(-1, -2)).masked_fill(~self.seen[:n, :n], -1e9).softmax(-1) @ v


class HeadsDiffer(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        hidden = torch.stack([~self.seen[:n, :n], ~self.seen[:n, :n], ~self.near[:n, :n], ~self.seen[:n, :n]])
        return (q @ k.transpose(-1, -2)).masked_fill(hidden, -1e9).softmax(-1) @ v


class Twice(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        hidden = ~self.seen[:n, :n]
        one = (q @ k.transpose(-1, -2)).masked_fill(hidden, -1e9).softmax(-1) @ v
        other = (k @ q.transpose(-1, -2)).masked_fill(hidden, -1e9).softmax(-1) @ v
        return one - 0.3 * other


class WeightsUsed(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        w = (q @ k.transpose(-1, -2)).masked_fill(~self.seen[:n, :n], -1e9).softmax(-1)
        return w @ v + w.sum(-1, keepdim=True) * 0.1


class QueryGone(Written):
    def attend(self, q, k, v):
        n = q.shape[2]
        s = (q @ k.transpose(-1, -2)).masked_fill(~self.seen[:n, :n], -1e9)
        q = s.softmax(-1)
        return q @ v


class AttnTaken(Matmul):
    def __init__(self):
        super().__init__()
        self.attn = nn.Identity()


class Elsewhere(Written):
    def attend(self, q, k, v):
        return written_elsewhere(q, k, v, self.seen)


def written_elsewhere(q, k, v, seen):
    n = q.shape[2]
    return (q @ k.transpose(-1, -2)).masked_fill(~seen[:n, :n], -1e9).softmax(-1) @ v


LEFT = {
    BetweenHeads: "weights go through",
    Capped: "no multiple of query times key",
    Curved: "does not grow evenly",
    Flat: "far tokens does not grow as it does for near ones",
    BothWaysUpTo: "neither causal nor a sliding window",
    BothWaysSloped: "its tokens see those after them",
    Holes: "neither causal nor a sliding window",
    HeadsDiffer: "heads hide different tokens",
    Twice: "2 times",
    WeightsUsed: "weights go through sum",
    QueryGone: "no local variable holds its query",
    AttnTaken: "already has an attribute called attn",
    Elsewhere: "in a function outside its class",
}


@pytest.mark.parametrize("cls", LEFT)
def test_left_alone_with_the_reason(cls):
    done, calls = inlined(cls)
    assert done.methods == {}
    assert LEFT[cls] in done.problems["site"]
    assert not calls


def test_attention_both_ways_says_so():
    done, calls = inlined(Bidirectional)
    assert done.numbers["site"].both and done.numbers["site"].window is None
    assert [call.mask for call in calls] == [MaskWindow(both=True)]


def test_a_mask_too_large_to_look_at_is_left_alone():
    done, _ = inlined(Matmul, max_model_len=1 << 16)
    assert "too many to look at" in done.problems["site"]


def spec_of(model_type, **fields):
    """The attention of every layer of a small model, by what the plan says."""
    plan = make_plan(build(CONFIG_MAPPING[model_type](**fields), torch.float32), ServingSpec(max_model_len=64))
    return [spec for _, spec in plan.attention]


def bias_of(model_type, heads, tokens):
    """What Transformers' own function adds to the scores of the last token, from its own place on: [heads, tokens]."""
    if model_type == "mpt":
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        bias = build_mpt_alibi_tensor(heads, tokens)[:, 0]
    else:
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        bias = build_alibi_tensor(torch.ones(1, tokens), heads, torch.float32)[:, 0]
    return bias - bias[:, -1:]


BLOOM = {"hidden_size": 96, "n_layer": 1, "vocab_size": 64}
FALCON = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
MPT = {"d_model": 96, "n_layers": 1, "vocab_size": 64, "max_seq_len": 64}


@pytest.mark.parametrize(("model_type", "fields", "heads"), [
    ("bloom", BLOOM | {"n_head": 4}, 4),
    ("bloom", BLOOM | {"n_head": 6}, 6),
    ("mpt", MPT | {"n_heads": 4}, 4),
    ("mpt", MPT | {"n_heads": 6}, 6),
])  # fmt: skip
def test_slopes_are_those_that_transformers_adds(model_type, fields, heads):
    tokens = 30
    (spec,) = spec_of(model_type, **fields)
    distance = torch.arange(tokens - 1, -1, -1)
    ours = -torch.tensor(spec.alibi_slopes)[:, None] * distance
    torch.testing.assert_close(ours, bias_of(model_type, heads, tokens), rtol=1e-5, atol=1e-5)
    assert spec.scale == pytest.approx((96 // heads) ** -0.5)


@pytest.mark.parametrize(("length", "noted"), [(256, False), (600, True)])
def test_the_plan_says_where_transformers_rounds(length, noted):
    """FalconModel multiplies slopes and places in bfloat16, which is exact up to 256."""
    meta = build(CONFIG_MAPPING["falcon"](**FALCON, alibi=True, multi_query=False), torch.float32)
    plan = make_plan(meta, ServingSpec(max_model_len=length))
    assert [("bfloat16" in r.summary) for r in plan.rewrites if r.fuser == "attention"] == [noted]


def test_windows_of_a_module_of_its_own_mask():
    fields = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    specs = spec_of("gpt_neo", **fields, attention_types=[[["global", "local"], 2]], window_size=9)
    assert [spec.window for spec in specs] == [None, 9, None, 9]
    assert [spec.scale for spec in specs] == [1.0] * 4


def test_a_window_longer_than_the_context_is_none():
    fields = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
    specs = spec_of("gpt_neo", **fields, attention_types=[[["local"], 2]], window_size=100)
    assert [spec.window for spec in specs] == [None, None]


@pytest.mark.parametrize(("fields", "kv_heads"), [
    ({"multi_query": True}, 1),
    ({"multi_query": False, "num_kv_heads": 4}, 4),
    ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
])  # fmt: skip
def test_heads_that_share_keys_and_values(fields, kv_heads):
    (spec,) = spec_of("falcon", **FALCON, **fields)
    assert (spec.num_heads, spec.num_kv_heads, spec.alibi_slopes) == (4, kv_heads, None)


def test_the_layers_of_a_model_share_one_proof_and_keep_their_own_numbers():
    """A bias of one layer's own, the class and its attributes the same."""
    with init_empty_weights(include_buffers=False):
        base = Base([Baddbmm(), Baddbmm()])
    base.eval()
    base.others[0].slopes = base.others[0].slopes * 2
    with behind_interface(base, observe(base), ServingSpec(max_model_len=LENGTH)) as done:
        assert done.problems == {}
    first, second = done.numbers["site"].alibi_slopes, done.numbers["others.0"].alibi_slopes
    assert second == pytest.approx([2 * slope for slope in first], rel=1e-5)


def test_inspect_shows_what_was_cut():
    """From the method that held the attention, and from the text that Transformers has."""
    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    meta = build(CONFIG_MAPPING["openai-gpt"](**fields), torch.float32)
    (diff,) = forward_diffs(meta, make_plan(meta, ServingSpec(max_model_len=64)))
    assert (diff.cls, diff.sites) == ("Attention", ("h.0-1.attn",))
    assert "modeling_openai.py" in diff.place
    assert "-    w = torch.matmul(q, k)" in diff.text
    assert "+    outputs = [inline_attention(self, q, k.transpose(-1, -2), v)]" in diff.text


@pytest.mark.parametrize("heads", [4, 9])
def test_slopes_of_a_rounded_bias_are_those_of_the_model(heads):
    """Falcon rounds slopes to bfloat16, which holds powers of two and not those between, and what it makes of them."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    fields = {"hidden_size": 32 * heads, "num_attention_heads": heads, "num_hidden_layers": 1, "alibi": True}
    meta = build(CONFIG_MAPPING["falcon"](**fields, vocab_size=64), torch.float32)
    ((_, spec),) = make_plan(meta, ServingSpec(max_model_len=256)).attention
    of_one_token = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    ratios = torch.tensor(spec.alibi_slopes) / of_one_token
    assert torch.allclose(ratios, ratios[0].expand(heads), rtol=1e-6, atol=0)


def test_several_ranks_have_the_heads_of_all():
    """The code counts them; the ranks share out the KV cache, and the projections that they put together again."""
    meta = build(CONFIG_MAPPING["bloom"](**BLOOM, n_head=4), torch.float32)
    plan = make_plan(meta, ServingSpec(tp_size=2, max_model_len=64))
    assert {spec.gathered for _, spec in plan.attention} == {True}
    styles = {r.qualname.rpartition(".")[2]: r.layer.style for r in plan.rewrites if r.fuser == "linear"}
    assert "colwise" not in {styles["query_key_value"], styles["dense"]}
    assert "rowwise" not in {styles["query_key_value"], styles["dense"]}


def test_what_is_left_is_refused_by_name():
    fields = {"d_model": 64, "n_layer": 1, "n_head": 4, "d_head": 16, "d_inner": 64, "vocab_size": 64}
    _, refusals = draft_plan(build(CONFIG_MAPPING["xlnet"](**fields), torch.float32), ServingSpec(max_model_len=64))
    words = [str(refusal) for refusal in refusals]
    assert any("writes its attention out by itself" in text and "layer.0.rel_attn" in text for text in words)


def test_masks_are_made_only_where_the_model_cannot_go_without():
    for model_type, fields, masked in (("mpt", MPT | {"n_heads": 4}, True), ("bloom", BLOOM | {"n_head": 4}, False)):
        meta = build(CONFIG_MAPPING[model_type](**fields), torch.float32)
        assert make_plan(meta, ServingSpec(max_model_len=64)).masked is masked


def test_other_fusers_see_the_call():
    """Query, key and value of attention in a helper are merged as anybody's, and the texts of both methods are kept."""
    fields = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 64, "rotary_dim": 8, "n_positions": 64}
    plan = make_plan(build(CONFIG_MAPPING["gptj"](**fields), torch.float32), ServingSpec(max_model_len=64))
    assert plan.counts["qkv"] == 1
    assert "self.qkv_proj(hidden_states)" in plan.forwards["h.0.attn"]
    assert "inline_attention(self, query, key, value)" in plan.methods["h.0.attn"]
    assert "softmax" not in plan.methods["h.0.attn"]
