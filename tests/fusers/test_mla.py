"""Latent attention is told from what its code does with numbers, however it is written; a near miss for every hit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config

from tests.sites import HEADS, WIDTH, attend, decide, lines
from tfbackend.inspection.memory import BLOCK, make_cache
from tfbackend.layerspecs import AttentionSpec, LinearSpec, QKVSpec
from tfbackend.meta import build
from tfbackend.mlaspec import MLASpec, sizes_named
from tfbackend.plan import draft_plan, make_plan
from tfbackend.serving import MLASizes, ServingSpec
from tfbackend.weights import build_weight_map

LATENT, ROPE, NOPE, VALUE = 16, 4, 8, 6
SIZES = MLASizes(LATENT, ROPE, NOPE, VALUE)
SCALE = 0.3


class Written(nn.Module):
    """Keys are written into an empty tensor, in a method of its own."""

    def __init__(self, bias=False, low_rank=8):
        super().__init__()
        self.q_down = nn.Linear(WIDTH, low_rank) if low_rank else nn.Identity()
        self.q = nn.Linear(low_rank or WIDTH, HEADS * (NOPE + ROPE))
        self.down, self.up = nn.Linear(WIDTH, LATENT + ROPE), nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=bias)
        self.norm = nn.LayerNorm(LATENT)
        self.out = nn.Linear(HEADS * VALUE, WIDTH)

    def query(self, x):
        return self.q(self.q_down(x)).view(1, x.shape[1], -1, NOPE + ROPE).transpose(1, 2)

    def heads(self, latent, shared):
        both = self.up(latent).view(1, latent.shape[2], -1, NOPE + VALUE).transpose(1, 2)
        own, value = both.split([NOPE, VALUE], dim=-1)
        key = both.new_empty(*both.shape[:-1], NOPE + ROPE)
        key[..., :NOPE].copy_(own)
        key[..., NOPE:].copy_(shared.expand(-1, own.shape[1], -1, -1))
        return key, value

    def attend(self, q, k, v, **keywords):
        return attend(self, q, k, v, scaling=SCALE, **keywords)

    def forward(self, x):
        latent, shared = self.down(x).split([LATENT, ROPE], dim=-1)
        latent, shared = self.norm(latent)[:, None], torch.sin(shared)[:, None]
        key, value = self.heads(latent, shared)
        return self.out(attend(self, self.query(x), key, value, scaling=0.3))


class Joined(Written):
    """In one function; nobody keeps the normed latents, and the result is gated."""

    def forward(self, x):
        latent, shared = self.down(x).split([LATENT, ROPE], dim=-1)
        shared = shared.view(1, 1, -1, ROPE)
        both = self.up(self.norm(latent)).view(1, x.shape[1], -1, NOPE + VALUE).transpose(1, 2)
        own, value = torch.split(both, [NOPE, VALUE], dim=-1)
        key = torch.cat((own, shared.expand(-1, own.shape[1], -1, -1)), dim=-1)
        query = self.query(x)
        return self.out(attend(self, query, key, value, scaling=0.3)) * torch.sigmoid(x)


class Flat(Written):
    """Latents and shared part without a dimension for heads."""

    def forward(self, x):
        latent, shared = self.down(x).split([LATENT, ROPE], dim=-1)
        latent = self.norm(latent)
        both = self.up(latent).unflatten(-1, (-1, NOPE + VALUE)).permute(0, 2, 1, 3)
        key = torch.cat((both[..., :NOPE], shared[:, None].expand(-1, both.shape[1], -1, -1)), dim=-1)
        return self.out(attend(self, self.query(x), key, both[..., NOPE:], scaling=0.3))


@pytest.mark.parametrize("cls", [Written, Joined, Flat])
@pytest.mark.parametrize("low_rank", [8, None])
def test_however_it_is_written(cls, low_rank):
    plan = decide(lambda: cls(low_rank=low_rank), mla=SIZES)
    rewrite = plan.rewrite("mla")
    assert dict(rewrite.children) == {"attn": MLASpec(HEADS, SIZES, SCALE, "up")}
    assert rewrite.removes == ("up",)
    assert [(entry.source, entry.target) for entry in rewrite.weights] == [("up", "attn.kv_b_proj")]
    assert not [r for r in plan.rewrites if r.fuser == "attention" or r.qualname.endswith(".up")]
    assert not [miss for miss in plan.misses if miss.fuser in ("mla", "attention", "qkv")]
    assert "self.up" not in plan.text() and not plan.unproven


def test_what_is_cached_is_handed_over():
    text = decide(Written, mla=SIZES).text()
    assert "attend(self, self.query(x), shared, latent, scaling=0.3)" in text
    assert "self.heads" not in text


def test_latents_that_nobody_keeps_get_a_name():
    found = lines(decide(Joined, mla=SIZES).text())
    assert "tfb_latent = self.norm(latent)" in found
    assert f"attend(self, query, shared, tfb_latent.reshape(1, 1, -1, {LATENT}), scaling=0.3)" in " ".join(found)


def test_two_ranks_share_out_the_heads():
    plan = decide(Written, mla=SIZES, tp_size=2)
    assert plan.rewrite("mla").styles == (("q", "colwise"), ("out", "rowwise"))
    styles = {r.qualname: r.layer.style for r in plan.rewrites if isinstance(r.layer, LinearSpec)}
    assert styles["site.q"] == "colwise" and styles["site.out"] == "rowwise"
    assert styles["site.q_down"] == styles["site.down"] == "replicated"


# ---- near misses ----


class Near(Written):
    """`change` says what is done otherwise; the rest is as in Written."""

    def __init__(self, change):
        super().__init__(bias=change == "bias")
        self.change = change
        self.inner = nn.LayerNorm(NOPE)
        self.gain = nn.Parameter(torch.ones(VALUE))
        self.each = nn.Linear(WIDTH, HEADS * ROPE)

    def forward(self, x):
        change = self.change
        latent, shared = self.down(x).split([LATENT, ROPE], dim=-1)
        latent, shared = self.norm(latent)[:, None], shared[:, None]
        both = self.up(latent).view(1, x.shape[1], HEADS, NOPE + VALUE).transpose(1, 2)
        own, value = both[..., :NOPE], both[..., NOPE:]
        if change == "values first":
            own, value = both[..., VALUE:], both[..., :VALUE]
        if change == "heads turned round":
            own = own.flip(1)
        if change == "earlier token":
            own = own.roll(1, 2)
        if change == "scaled keys":
            own = own * 2.0
        if change == "normed keys":
            own = self.inner(own)
        if change == "weighted values":
            value = value * self.gain
        if change == "cubed values":
            value = value**3
        if change == "part of each head":
            shared = self.each(x).view(1, x.shape[1], HEADS, ROPE).transpose(1, 2)
        parts = (own, shared.expand(-1, HEADS, -1, -1))
        key = torch.cat(parts[::-1] if change == "shared first" else parts, dim=-1)
        if change == "scaled in place":
            key.mul_(0.5)
        if change == "used twice":
            value = value + 0.0 * self.up(latent).sum()
        query = self.query(x)
        if change == "soft cap":
            return self.out(attend(self, query, key, value, scaling=0.3, softcap=5.0))
        output = self.out(attend(self, query, key, value, scaling=0.3))
        return output + value.mean() if change == "values used again" else output


NEAR = {
    "bias": "up has a bias, which a kernel over latents does not add",
    "values first": "its keys are not what the linear gives each head, with the shared part behind",
    "heads turned round": "its keys are not",
    "earlier token": "its keys are not",
    "scaled keys": "its keys are not",
    "normed keys": "inner works on its keys or values",
    "weighted values": "its keys or values also take gain of shape (6,)",
    "cubed values": "its values are not the rest",
    "part of each head": "its keys or values also take expand of shape (1, 4, 7, 4)",
    "shared first": "its keys are not",
    "scaled in place": "its keys are not",
    "used twice": "up is called 2 times",
    "soft cap": "it has a soft cap of 5.0",
}


def test_the_way_that_the_near_misses_are_written_is_served():
    assert decide(lambda: Near("nothing"), mla=SIZES).rewrite("mla")


@pytest.mark.parametrize("change", NEAR)
def test_near_misses_cache_whole_keys_and_values(change):
    plan = decide(lambda: Near(change), mla=SIZES)
    said = plan.reason("mla")
    assert "keys and values are cached whole: " in said and NEAR[change] in said
    spec = dict(plan.rewrite("attention").children)["attn"]
    assert (spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (HEADS, NOPE + ROPE, VALUE)


def test_values_that_are_used_again_are_found_by_the_proof():
    plan = decide(lambda: Near("values used again"), mla=SIZES)
    assert "its proof failed" in plan.reason("mla")
    assert plan.rewrite("attention")


@pytest.mark.parametrize(
    ("mla", "said"),
    [
        (MLASizes(LATENT, ROPE, NOPE, VALUE + 1), "latent 16, rope 4, nope 8, value 6, and the engine has kernels for"),
        ("VLLM_MLA_DISABLE is set", "keys and values are cached whole: VLLM_MLA_DISABLE is set"),
    ],
)
def test_an_engine_without_kernels_for_it_caches_whole_keys_and_values(mla, said):
    plan = decide(Written, mla=mla)
    assert said in plan.reason("mla")
    assert isinstance(dict(plan.rewrite("attention").children)["attn"], AttentionSpec)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * NOPE) for _ in "qkv")
        self.out = nn.Linear(HEADS * NOPE, WIDTH)

    def forward(self, x):
        q, k, v = (lin(x).view(1, x.shape[1], -1, NOPE).transpose(1, 2) for lin in (self.q, self.k, self.v))
        return self.out(attend(self, q, k, v))


def test_a_cache_has_pages_of_one_kind():
    plan = decide(Written, Plain, mla=SIZES)
    assert plan.reason("mla") == "keys and values are cached whole, as in others.0, which cannot do without"
    assert plan.rewrite("attention") and plan.rewrite("attention", "others.0")


def test_ordinary_attention_is_no_near_miss():
    plan = decide(Plain, mla=SIZES)
    assert plan.reason("mla") == "silent"


# ---- a real class ----

DEEPSEEK = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "fields", [{"q_lora_rank": 16}, {"q_lora_rank": None}, {"q_lora_rank": 16, "rope_interleave": False}]
)
def test_deepseek_on_one_rank_and_two(fields):
    config = DeepseekV3Config(**DEEPSEEK, **fields)
    meta, sizes = build(config, torch.float32), sizes_named(config)
    assert sizes == MLASizes(32, 16, 24, 8)
    for ranks in (1, 2):
        plan = make_plan(meta, ServingSpec(mla=sizes, tp_size=ranks))
        assert [spec for _, spec in plan.attention] == [MLASpec(4, sizes, 40**-0.5, "kv_b_proj")] * 2
        assert not [s for r in plan.rewrites for _, s in r.children if isinstance(s, QKVSpec)]
    weights = build_weight_map(meta.model, plan)
    placed = weights.resolve("model.layers.1.self_attn.kv_b_proj.weight")
    assert placed.target == "model.layers.1.self_attn.attn.kv_b_proj.weight"


def test_yarn_scales_the_scores():
    """Transformers multiplies by (0.1 * ln 8 + 1) squared, as DeepSeek-V3 was trained."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
            "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    config = DeepseekV3Config(**DEEPSEEK, q_lora_rank=16, rope_parameters=rope, max_position_embeddings=256)
    plan = make_plan(build(config, torch.float32), ServingSpec(mla=sizes_named(config)))
    assert next(plan.attention)[1].scale == pytest.approx(40**-0.5 * (0.1 * 2.0794415 + 1) ** 2)


def test_a_config_that_names_no_widths():
    assert sizes_named(object()) == "its config has no kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim"
    config = SimpleNamespace(**(DEEPSEEK | {"kv_lora_rank": None, "v_head_dim": 0}))
    assert sizes_named(config) == "its config has no kv_lora_rank, v_head_dim"


def test_a_token_costs_its_latent_once_on_each_rank():
    spec = MLASpec(4, MLASizes(512, 64, 128, 128), 0.1, "kv_b_proj")
    for ranks in (1, 2, 4):
        assert make_cache([spec] * 3, ranks, 2).block_bytes == BLOCK * 3 * (512 + 64) * 2
    plan, _ = draft_plan(build(DeepseekV3Config(**DEEPSEEK), torch.float32), ServingSpec())
    assert make_cache([spec for _, spec in plan.attention], 1, 2).bytes_per_token == 2 * 2 * 4 * 40 * 2
