"""Gated delta rules told by their numbers, whatever they are called; near misses; where their weights go."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import WIDTH, decide
from tfbackend.deltaspec import APART, INTERLEAVED, PACKED, DeltaSpec
from tfbackend.graph.trial import apart
from tfbackend.inspection.document import document
from tfbackend.inspection.examine import Request, inspect_model
from tfbackend.inspection.layout import parameters
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import GATED_DELTA, NATIVES, ServingSpec
from tfbackend.weights import build_weight_map

KEY_HEADS, HEADS, KEY, VALUE, KERNEL = 2, 4, 8, 6, 3
KEYS, VALUES = KEY_HEADS * KEY, HEADS * VALUE
GPU = ServingSpec(natives=NATIVES, device="cuda", dtype=torch.bfloat16)
SPEC = DeltaSpec(WIDTH, KEY_HEADS, HEADS, KEY, VALUE, KERNEL, PACKED, eps=1e-5)


@pytest.fixture
def any_size(monkeypatch):
    """Small mixers are read as those of the size of vLLM's kernels are."""
    monkeypatch.setattr(DeltaSpec, "_kernel_problem", lambda spec, serving: "")


class Norm(nn.Module):
    def __init__(self, eps=1e-5, act=F.silu, first=False, size=VALUE):
        super().__init__()
        self.weight, self.tiny, self.act, self.first = nn.Parameter(torch.ones(size)), eps, act, first

    def forward(self, x, gate):
        x = x * self.act(gate) if self.first else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny) * self.weight
        return x if self.first else x * self.act(gate)


class Rule(nn.Module):
    """A gated delta rule whose names say nothing: its linears and vectors come in another order than elsewhere."""

    def __init__(self, layout=PACKED, *, beta=1.0, length=1e-6, act=F.silu, norm=None, **more):
        super().__init__()
        self.layout, self.beta, self.length, self.act, self.more = layout, beta, length, act, more
        self.sizes = (KEYS, KEYS, VALUES) if "square" not in more else (VALUES,) * 3
        self.key = KEY if "square" not in more else VALUE * HEADS // KEY_HEADS
        self.out = nn.Linear(VALUES, WIDTH, bias=False)
        wide = {"z": VALUES, "b": HEADS, "a": HEADS} | dict(zip("qkv", self.sizes, strict=True))
        parts = {INTERLEAVED: ("ba", "qkvz"), PACKED: ("a", "z", "qkv", "b"), APART: ("z", "a", "v", "k", "q", "b")}
        self.order = parts[layout]
        for number, part in enumerate(self.order):
            width = sum(wide[letter] for letter in part)
            self.add_module(f"linear{number}", nn.Linear(WIDTH, width, bias=more.get("bias", False)))
        self.first, self.second = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HEADS))
        self.mix = nn.Conv1d(sum(self.sizes), sum(self.sizes), KERNEL, groups=sum(self.sizes), bias=False)
        self.scale = Norm(**(norm or {}))

    def _given(self, x):
        found, own = {}, {"z": VALUES, "b": HEADS, "a": HEADS} | dict(zip("qkv", self.sizes, strict=True))
        blocks = KEY_HEADS if self.layout == INTERLEAVED else 1
        for number, part in enumerate(self.order):
            given = getattr(self, f"linear{number}")(x).unflatten(-1, (blocks, -1))
            pieces = given.split([own[letter] // blocks for letter in part], dim=-1)
            found |= {letter: piece.flatten(-2) for letter, piece in zip(part, pieces, strict=True)}
        return found

    def forward(self, hidden_states, past=None, mask=None):
        given, tokens = self._given(hidden_states), hidden_states.shape[1]
        mixed = torch.cat([given[name] for name in "qkv"], -1).transpose(1, 2)
        began = past is not None and past.has_previous_state(0)
        if past is not None:
            mixed = past.update_conv_state(mixed, 0, conv_kernel_size=KERNEL)
        mixed = self.act(self.mix(F.pad(mixed, (KERNEL - 1, 0))))[..., -tokens:].transpose(1, 2)
        q, k, v = mixed.split(self.sizes, dim=-1)
        q, k = (x.unflatten(-1, (-1, self.key)).repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.length) for x in (q, k))
        v, z = (x.unflatten(-1, (HEADS, VALUE)) for x in (v, given["z"]))
        kept = torch.exp(-self.second.exp() * F.softplus(given["a"] + self.first))
        strength = self.beta * given["b"].sigmoid()
        state = past.layers[0].recurrent_states[0] if began else v.new_zeros(len(v), HEADS, self.key, VALUE)
        if began and "forgetful" in self.more:
            state = state / 2
        made = []
        for at in range(tokens):
            state = state * kept[:, at, :, None, None]
            new = strength[:, at, :, None] * (v[:, at] - torch.einsum("nhkv,nhk->nhv", state, k[:, at]))
            state = state + torch.einsum("nhk,nhv->nhkv", k[:, at], new)
            made.append(torch.einsum("nhkv,nhk->nhv", state, q[:, at]) * self.key**-0.5)
        if past is not None:
            past.update_recurrent_state(state, 0)
        return self.out(self.scale(torch.stack(made, 1), z).flatten(-2))


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        ({}, {}),
        ({"layout": INTERLEAVED}, {"layout": INTERLEAVED}),
        ({"layout": APART}, {"layout": APART}),
        ({"layout": APART, "square": True}, {"layout": APART, "key_dim": VALUE * HEADS // KEY_HEADS}),
        ({"norm": {"act": torch.sigmoid}}, {"gate": "sigmoid"}),
        ({"norm": {"eps": 1e-3}}, {"eps": 1e-3}),
    ],
)
def test_a_gated_delta_rule_is_told_by_its_numbers(any_size, made, changes):
    rewrite = decide(lambda: Rule(**made), serving=GPU).rewrite(GATED_DELTA)
    assert dict(rewrite.children) == {"state": dataclasses.replace(SPEC, **changes)}
    module = Rule(**made)
    given = dict(zip(module.order, (f"linear{number}" for number in range(6)), strict=False))
    wanted = {("first", "state.dt_bias", None), ("second", "state.A_log", None), ("mix", "state.conv1d", None)}
    wanted |= {("scale", "state.norm", None), ("out", "state.out_proj", None)}
    for target, letters in (("state.in_proj_qkvz", "qkvz"), ("state.in_proj_ba", "ba")):
        parts = sorted((part for part in given if part[0] in letters), key=lambda part: letters.index(part[0]))
        numbers = range(len(parts)) if len(parts) > 1 else [None]
        wanted |= {(given[part], target, number) for part, number in zip(parts, numbers, strict=True)}
    assert {(entry.source, entry.target, entry.shard) for entry in rewrite.weights} == wanted
    assert set(rewrite.removes) == {entry.source for entry in rewrite.weights}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"act": F.gelu}, "what it norms is not what a gated delta rule gives"),
        ({"beta": 1.5}, "what it norms is not what a gated delta rule gives"),
        ({"length": 1e-4}, "what it norms is not what a gated delta rule gives"),
        ({"length": 1e-12}, "of the largest value from a gated delta rule"),
        ({"norm": {"first": True}}, "its norm is not one of each head's values"),
        ({"norm": {"act": torch.tanh}}, "its norm is not one of each head's values"),
        ({"norm": {"eps": 0.5}}, "its norm is not one of each head's values"),
        ({"forgetful": True}, "it decodes tokens otherwise"),
        ({"bias": True}, "have a bias, which vLLM's layer has not"),
        ({"beta": 2.0}, "writes with a strength up to 1, and it with one up to 2"),
    ],
)
def test_what_is_almost_one_runs_as_it_is_written(any_size, made, why):
    decision = decide(lambda: Rule(**made), serving=GPU)
    assert why in decision.reason(GATED_DELTA)
    if "forgetful" not in made:
        assert decision.rewrite("state").fuser == "state"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cpu"}, "vLLM's kernels for a CPU take bfloat16 alone"),
        ({"dtype": torch.float32}, "vLLM's kernels for GPUs take no float32"),
        ({}, "are for states of 128x128, and its are 8x6"),
        ({"tp_size": 4}, "its 2 key heads do not go into 4 ranks"),
        ({"natives": NATIVES - {GATED_DELTA}}, "the engine has no kernels for gated_delta on cuda in bfloat16"),
        ({"quantization": "fp8"}, "shards of its quantized projections"),
    ],
)
def test_where_the_engine_has_no_layer(changes, why):
    decision = decide(Rule, serving=dataclasses.replace(GPU, **changes))
    assert why in decision.reason(GATED_DELTA)
    assert decision.rewrite("state").fuser == "state"


def test_what_the_kernels_take():
    wide = dataclasses.replace(SPEC, key_dim=128, value_dim=128)
    assert wide.problem(GPU) == ""
    assert "convolves 2 to 4 tokens, and it has 5" in dataclasses.replace(wide, kernel=5).problem(GPU)
    assert "its 4 heads" in dataclasses.replace(wide, key_heads=6).problem(dataclasses.replace(GPU, tp_size=3))


def test_a_wrong_place_of_a_weight_is_refuted():
    """The proof binds the reference by the weight entries, so two projections that change places are seen."""
    module = Rule()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    places = {"in_proj_qkvz.0": "linear2", "in_proj_qkvz.1": "linear1", "in_proj_ba.0": "linear3"}
    places |= {"in_proj_ba.1": "linear0", "conv1d": "mix", "norm": "scale", "out_proj": "out"}
    places |= {"A_log": "second", "dt_bias": "first"}
    x = torch.randn(1, 7, WIDTH)
    with torch.no_grad():
        assert apart(module(x), SPEC.reference().bind(module, places)(x)) < 1e-5
        swapped = places | {"in_proj_ba.0": "linear0", "in_proj_ba.1": "linear3"}
        assert apart(module(x), SPEC.reference().bind(module, swapped)(x)) > 1e-3


SIZES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "hidden_size": 32}
SIZES |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"] * 2}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SIZES |= {"vocab_size": 64, "intermediate_size": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SPLIT = {"in_proj_qkv": ("in_proj_qkvz", 0), "in_proj_z": ("in_proj_qkvz", 1)}
SPLIT |= {"in_proj_b": ("in_proj_ba", 0), "in_proj_a": ("in_proj_ba", 1)}
WHOLE = {"in_proj_qkvz": ("in_proj_qkvz", None), "in_proj_ba": ("in_proj_ba", None)}
SIX = {name: ("in_proj_qkvz", number) for number, name in enumerate(("q_proj", "k_proj", "v_proj", "g_proj"))}
SIX |= {"b_proj": ("in_proj_ba", 0), "a_proj": ("in_proj_ba", 1)}


@pytest.mark.parametrize(
    ("model_type", "given"), [("qwen3_next", WHOLE), ("qwen3_5_text", SPLIT), ("qwen3_5_moe_text", SPLIT)]
)
def test_weights_reach_the_layer(model_type, given):
    meta = build(CONFIG_MAPPING[model_type](**SIZES), torch.bfloat16)
    plan = make_plan(meta, dataclasses.replace(GPU, tp_size=2))
    places = build_weight_map(meta.model, plan)
    for name, (target, shard) in given.items():
        found = places.resolve(f"model.layers.1.linear_attn.{name}.weight")
        assert (found.target, found.shard) == (f"model.layers.1.linear_attn.state.{target}.weight", shard)
    mixer = {target for target in places.targets if ".linear_attn." in target}
    assert mixer == {p.name for p in parameters(meta, plan, 1, torch.bfloat16) if ".linear_attn." in p.name}


def test_six_projections_reach_the_layer():
    config = CONFIG_MAPPING["olmo_hybrid"](**SIZES | {"layer_types": ["linear_attention", "full_attention"]})
    meta = build(config, torch.bfloat16)
    reason = next(m.reason for m in make_plan(meta, GPU).misses if m.fuser == GATED_DELTA)
    assert "strength up to 1, and it with one up to 2" in reason
    config.linear_allow_neg_eigval = False
    meta = build(config, torch.bfloat16)
    places = build_weight_map(meta.model, make_plan(meta, GPU))
    for name, (target, shard) in SIX.items():
        found = places.resolve(f"model.layers.0.linear_attn.{name}.weight")
        assert (found.target, found.shard) == (f"model.layers.0.linear_attn.state.{target}.weight", shard)


def test_bytes_and_parameters_of_a_rank():
    """Numbers by hand: 4 heads of 128x128 in float32, a convolution over 4 of 2 * 256 + 512 channels."""
    meta = build(CONFIG_MAPPING["qwen3_5_text"](**SIZES), torch.bfloat16)
    plan = make_plan(meta, dataclasses.replace(GPU, tp_size=2))
    spec = dict(plan.state)["layers.0.linear_attn"]
    assert spec.rank_bytes(1, 2) == 1024 * 3 * 2 + 4 * 128 * 128 * 4
    assert spec.rank_bytes(2, 2) * 2 == spec.rank_bytes(1, 2)
    prefix = "model.layers.0.linear_attn.state."
    found = {p.name.removeprefix(prefix): p.rank_shape for p in parameters(meta, plan, 2, torch.bfloat16)}
    assert found["in_proj_qkvz.weight"] == ((1024 + 512) // 2, 32)
    assert found["in_proj_ba.weight"] == (4, 32)
    assert found["conv1d.weight"] == (512, 1, 4)
    assert found["out_proj.weight"] == (32, 256)
    assert (found["A_log"], found["dt_bias"], found["norm.weight"]) == ((2,), (2,), (128,))


def test_inspect_counts_the_state(tmp_path):
    """Three of four layers of Qwen3-Next-80B-A3B: 16 key heads and 32 heads of 128."""
    fields = {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}
    config = CONFIG_MAPPING["qwen3_next"](**fields, architectures=["Qwen3NextForCausalLM"], dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    found = inspect_model(Request(str(tmp_path), tp=2))
    whole = 3 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4)
    assert document(found)["memory"]["state_bytes_per_request"] == whole // 2
    summaries = {r.summary for r in found.plan.rewrites if r.fuser == GATED_DELTA}
    assert summaries == {
        "gated delta rule, 32 heads of 128x128, 16 key heads, convolution over 4, projections interleaved"
    }
