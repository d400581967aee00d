"""Mixers told by their numbers to be what the engine has layers for, whatever they are called; near misses for each."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import WIDTH, decide
from tfbackend.fusers.base import WeightEntry
from tfbackend.graph.trial import apart
from tfbackend.inspection.layout import parameters
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import MAMBA2, NATIVES, SHORT_CONV, ServingSpec
from tfbackend.shortconvspec import ShortConvSpec
from tfbackend.ssdspec import SSDSpec
from tfbackend.weights import build_weight_map

HEADS, DIM, GROUPS, STATE, KERNEL = 6, 4, 2, 5, 3
INNER, SHARED = HEADS * DIM, GROUPS * STATE
NATIVE = ServingSpec(natives=NATIVES)


class Norm(nn.Module):
    def __init__(self, parts=1, eps=1e-5, gate_first=True):
        super().__init__()
        self.weight, self.parts, self.tiny, self.gate_first = nn.Parameter(torch.ones(INNER)), parts, eps, gate_first

    def forward(self, x, gate):
        x = x * F.silu(gate) if self.gate_first else x
        parts = x.unflatten(-1, (self.parts, -1))
        x = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.tiny)).flatten(-2) * self.weight
        return x if self.gate_first else x * F.silu(gate)


class Scan(nn.Module):
    """A Mamba-2 whose names say nothing: its three vectors come in another order than Transformers has them."""

    def __init__(
        self, norm=None, bias=False, act=F.silu, limit=(0.0, math.inf), says_limit=True, order="zxbcd", **more
    ):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(HEADS))
        self.into = nn.Linear(WIDTH, 2 * INNER + 2 * SHARED + HEADS, bias=bias)
        self.second, self.third = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HEADS))
        self.mix = nn.Conv1d(INNER + 2 * SHARED, INNER + 2 * SHARED, KERNEL, groups=INNER + 2 * SHARED)
        self.scale = None if norm is None else Norm(**norm)
        self.out = nn.Linear(INNER, WIDTH, bias=more.get("out_bias", False))
        self.act, self.order, self.factor = act, order, more.get("factor", 1.0)
        self.hidden_limit = [limit]
        if says_limit:
            self.bounds = limit
        if "buffer" in more:
            self.register_buffer("vector", more["buffer"], persistent=False)
        if more.get("extra"):
            self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, cache=None, mask=None):
        given = self.into(hidden_states * self.factor)
        given = given * self.vector if hasattr(self, "vector") else given
        z, mixed, dt = given.split([INNER, INNER + 2 * SHARED, HEADS], dim=-1)
        mixed, tokens = mixed.transpose(1, 2), mixed.shape[1]
        began = cache is not None and cache.has_previous_state(0)
        if cache is not None:
            mixed = cache.update_conv_state(mixed, 0, conv_kernel_size=KERNEL)
        mixed = self.act(self.mix(F.pad(mixed, (KERNEL - 1, 0))))[..., -tokens:].transpose(1, 2)
        x, b, c = mixed.split([INNER, SHARED, SHARED], dim=-1)
        x = x.unflatten(-1, (HEADS, DIM))
        b, c = (y.unflatten(-1, (GROUPS, STATE)).repeat_interleave(HEADS // GROUPS, dim=2) for y in (b, c))
        dt = F.softplus(dt + self.second).clamp(*self.hidden_limit[0])
        state = cache.layers[0].recurrent_states[0] if began else x.new_zeros(x.shape[0], HEADS, DIM, STATE)
        made = []
        for at in range(tokens):
            state = state * torch.exp(dt[:, at] * -self.third.exp())[..., None, None]
            state = state + (dt[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
            made.append((state @ c[:, at, ..., None])[..., 0] + self.first[:, None] * x[:, at])
        if cache is not None:
            cache.update_recurrent_state(state, 0)
        y = torch.stack(made, 1).flatten(-2)
        extra = self.extra(hidden_states) if hasattr(self, "extra") else 0
        return self.out(y * F.silu(z) if self.scale is None else self.scale(y, z)) + extra


SPEC = SSDSpec(WIDTH, HEADS, DIM, GROUPS, STATE, KERNEL, False, True, False, 0)
VECTOR = torch.cat(
    [torch.full((n,), v) for n, v in ((INNER, 2.0), (INNER, 0.5), (SHARED, 3.0), (SHARED, 1.5), (HEADS, 0.25))]
)
"""Factors of z, x, B, C and dt."""


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        ({}, {}),
        ({"norm": {}}, {"norm_groups": 1, "eps": 1e-5}),
        ({"norm": {"parts": GROUPS}}, {"norm_groups": GROUPS, "eps": 1e-5}),
        ({"bias": True, "out_bias": True}, {"in_bias": True, "out_bias": True}),
        ({"factor": 0.75, "bias": True}, {"in_scale": 0.75, "in_bias": True}),
        ({"buffer": VECTOR}, {"scales": (2.0, 0.5, 3.0, 1.5, 0.25)}),
        ({"limit": (0.001, math.inf)}, {"dt_limit": (0.001, math.inf)}),
        ({"limit": (0.0, 0.1)}, {"dt_limit": (0.0, 0.1)}),
    ],
)
def test_a_mamba_2_is_told_by_its_numbers(made, changes):
    rewrite = decide(lambda: Scan(**made), serving=NATIVE).rewrite(MAMBA2)
    assert dict(rewrite.children) == {"state": dataclasses.replace(SPEC, **changes)}
    places = {entry.target: entry.source for entry in rewrite.weights}
    assert (places["state.D"], places["state.dt_bias"], places["state.A"]) == ("first", "second", "third")
    assert set(rewrite.removes) == {"first", "second", "third", "into", "mix", "out"} | (
        {"scale"} if "norm" in made else set()
    )


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"act": F.gelu}, "its scan is not that of a Mamba-2"),
        ({"norm": {"gate_first": False}}, "its norm is not one of gated values"),
        ({"norm": {"parts": 3}}, "its norm is not one of gated values"),
        ({"norm": {"eps": 0.1}}, "its norm is not one of gated values"),
        ({"limit": (0.001, math.inf), "says_limit": False}, "limits its time step in a way that none"),
        ({"buffer": torch.linspace(1, 2, len(VECTOR))}, "channels of one part of its first projection differently"),
        ({"extra": True}, "it has extra.weight, extra.bias"),
    ],
)
def test_what_is_almost_one_runs_as_it_is_written(made, why):
    decision = decide(lambda: Scan(**made), serving=NATIVE)
    assert why in decision.reason(MAMBA2)
    assert decision.rewrite("state").fuser == "state"


def test_factors_in_buffers_are_of_each_layer():
    decision = decide(lambda: Scan(buffer=VECTOR), lambda: Scan(buffer=VECTOR / 2), serving=NATIVE)
    specs = [dict(decision.rewrite(MAMBA2, site).children)["state"] for site in ("site", "others.0")]
    assert [spec.scales for spec in specs] == [(2.0, 0.5, 3.0, 1.5, 0.25), (1.0, 0.25, 1.5, 0.75, 0.125)]


class Gated(nn.Module):
    """A gated short convolution."""

    def __init__(self, bias=False, conv_bias=False, act=None):
        super().__init__()
        self.wide, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.mix, self.act = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH, bias=conv_bias), act

    def forward(self, x, past=None):
        b, c, x = self.wide(x).transpose(1, 2).chunk(3, dim=1)
        x, tokens = b * x, x.shape[-1]
        x = x if past is None else past.update_conv_state(x, 0, conv_kernel_size=KERNEL)
        x = self.mix(F.pad(x, (KERNEL - 1, 0)))[..., -tokens:]
        return self.out((c * (x if self.act is None else self.act(x))).transpose(1, 2))


@pytest.mark.parametrize("bias", [False, True])
def test_a_short_convolution_is_told_by_its_numbers(bias):
    rewrite = decide(lambda: Gated(bias, bias), serving=NATIVE).rewrite(SHORT_CONV)
    assert dict(rewrite.children) == {"state": ShortConvSpec(WIDTH, KERNEL, bias)}
    assert set(rewrite.weights) == {
        WeightEntry("wide", "state.in_proj"),
        WeightEntry("mix", "state.conv"),
        WeightEntry("out", "state.out_proj"),
    }


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ((False, False, F.silu), "of the largest value from a short convolution"),
        ((False, True), "of its parts, mix alone have a bias"),
    ],
)
def test_what_is_almost_a_short_convolution_runs_as_it_is_written(made, why):
    decision = decide(lambda: Gated(*made), serving=NATIVE)
    assert why in decision.reason(SHORT_CONV)
    assert decision.rewrite("state").fuser == "state"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"natives": frozenset({SHORT_CONV})}, "the engine has no kernels for mamba2 on cpu in float32"),
        ({"natives": "an adapter"}, "an adapter"),
        ({"quantization": "fp8"}, "shards of its quantized projections"),
        ({"tp_size": 4}, "its 6 heads do not go into 4 ranks"),
        ({"tp_size": 3}, "its 2 groups do not go into 3 ranks"),
        ({"dtype": torch.bfloat16}, ""),
    ],
)
def test_where_the_engine_has_no_layer(changes, why):
    decision = decide(Scan, serving=dataclasses.replace(NATIVE, **changes))
    assert why in decision.reason(MAMBA2) if why else decision.rewrite(MAMBA2)


def test_nothing_is_said_where_no_layer_was_asked_for():
    assert decide(Scan, serving=ServingSpec()).reason(MAMBA2) == "silent"


def test_what_vllm_packs_on_a_cpu():
    serving = ServingSpec(dtype=torch.bfloat16)
    assert "convolutions over 4" in ShortConvSpec(WIDTH, 4, False).problem(serving)
    odd = dataclasses.replace(SPEC, kernel=4)
    assert f"each rank has {INNER + 2 * SHARED}" in odd.problem(serving)
    assert odd.problem(dataclasses.replace(serving, dtype=torch.float32)) == ""
    assert dataclasses.replace(odd, groups=1, conv_bias=False).problem(ServingSpec(tp_size=2)) != ""


def test_convolutions_over_more_tokens_than_kernels_take():
    wide, gpu = dataclasses.replace(SPEC, kernel=5), dataclasses.replace(NATIVE, device="cuda")
    assert wide.problem(NATIVE) == ""
    assert wide.problem(gpu) == "vLLM convolves 2 to 4 tokens, and it has 5"
    assert ShortConvSpec(WIDTH, 5, False).problem(gpu) == wide.problem(gpu)
    assert SPEC.problem(gpu) == ""


def tiny(model_type, **fields):
    common = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}
    return build(CONFIG_MAPPING[model_type](pad_token_id=0, **common, **fields), torch.float32)


MAMBA2_FIELDS = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 4, "expand": 2}


def test_weights_reach_the_layer():
    meta = tiny("mamba2", **MAMBA2_FIELDS)
    plan = make_plan(meta, NATIVE)
    places = build_weight_map(meta.model, plan)
    found = {
        name: places.resolve(f"backbone.layers.0.mixer.{name}") for name in ("A_log", "conv1d.weight", "norm.weight")
    }
    assert {name: place.target for name, place in found.items()} == {
        "A_log": "model.layers.0.mixer.state.A",
        "conv1d.weight": "model.layers.0.mixer.state.conv1d.weight",
        "norm.weight": "model.layers.0.mixer.state.norm.weight",
    }
    mixer = {target for target in places.targets if ".mixer." in target}
    assert mixer == {p.name for p in parameters(meta, plan, 1, torch.float32) if ".mixer." in p.name}


def test_bytes_and_parameters_of_a_rank():
    """Numbers by hand: 8 heads of 8x4 in 2 groups, a convolution over 4 of 64 + 2 * 8 channels."""
    meta = tiny("mamba2", **MAMBA2_FIELDS)
    plan = make_plan(meta, dataclasses.replace(NATIVE, tp_size=2))
    ((_, spec),) = plan.state
    assert spec.rank_bytes(1, 2) == 80 * 3 * 2 + 64 * 4 * 4
    assert spec.rank_bytes(2, 2) * 2 == spec.rank_bytes(1, 2)
    sizes = {
        p.name.removeprefix("model.layers.0.mixer.state."): p.rank_shape
        for p in parameters(meta, plan, 2, torch.float32)
    }
    assert sizes["in_proj.weight"] == ((2 * 64 + 2 * 8 + 8) // 2, 32)
    assert sizes["out_proj.weight"] == (32, 32)
    assert sizes["conv1d.weight"] == (40, 1, 4)
    assert (sizes["A"], sizes["norm.weight"]) == ((4,), (32,))


def test_one_group_is_on_every_rank():
    spec = dataclasses.replace(SPEC, groups=1)
    assert spec.rank_bytes(2, 4) == (INNER // 2 + 2 * STATE) * (KERNEL - 1) * 4 + INNER // 2 * STATE * 4


def test_a_wrong_place_of_a_weight_is_refuted():
    """The proof binds the reference by the weight entries, so two vectors that change places are seen."""
    module = Scan()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    places = {"in_proj": "into", "conv1d": "mix", "out_proj": "out", "A": "third", "D": "first", "dt_bias": "second"}
    x = torch.randn(1, 7, WIDTH)
    with torch.no_grad():
        assert apart(module(x), SPEC.reference().bind(module, places)(x)) < 1e-5
        swapped = places | {"A": "second", "dt_bias": "third"}
        assert apart(module(x), SPEC.reference().bind(module, swapped)(x)) > 1e-3
