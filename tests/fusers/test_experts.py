"""Experts behind the experts interface: what is read off them, what is proven, and what is left alone."""

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GraniteMoeConfig, MixtralConfig
from transformers.integrations.moe import use_experts_implementation

from tests.sites import SIZES, WIDTH, decide
from tfbackend.expertspec import ExpertsSpec
from tfbackend.meta import INTERFACE_NAME, build, register_interfaces
from tfbackend.moespec import MoESpec
from tfbackend.plan import draft_plan, make_plan
from tfbackend.serving import ServingSpec

EXPERTS, INNER = 6, 48


class Config:
    _experts_implementation = INTERFACE_NAME


class Experts(nn.Module):
    """A copy of no model's: one product in, a gate, one product out, expert by expert."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token, slot in torch.cartesian_prod(*map(torch.arange, top_k_index.shape)).tolist():
            expert = top_k_index[token, slot]
            gate_up = self.gate_up_proj[expert] @ hidden_states[token]
            out[token] += (
                self.factor() * top_k_weights[token, slot] * (self.down_proj[expert] @ self._apply_gate(gate_up))
            )
        return out

    def factor(self):
        return 1.0


class Doubled(Experts):
    def factor(self):
        return 2.0


class OddGate(Experts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.tanh(gate) * up


class Bounded(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.bound = 3.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=self.bound)) * up.clamp(-self.bound, self.bound)


class Ungated(Experts):
    def __init__(self, config):
        super().__init__(config)
        del self.gate_up_proj
        self.up_proj = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.act_fn = nn.ReLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token, slot in torch.cartesian_prod(*map(torch.arange, top_k_index.shape)).tolist():
            expert = top_k_index[token, slot]
            inner = self.act_fn(self.up_proj[expert] @ hidden_states[token])
            out[token] += top_k_weights[token, slot] * (self.down_proj[expert] @ inner)
        return out


class WithScale(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.empty(EXPERTS))


class Block(nn.Module):
    def __init__(self, experts, top_k=2, swapped=False):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.top_k, self.swapped = experts, top_k, swapped

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, ids = self.router(flat).softmax(-1).topk(self.top_k, dim=-1)
        weights = weights.sqrt()  # which is no rule of any router that would move as well
        if self.swapped:
            return self.experts(flat, top_k_weights=weights, top_k_index=ids).view(x.shape)
        return self.experts(flat, ids, weights).view(x.shape)


def made(cls, **switches):
    register_interfaces()

    class Own(cls):
        pass

    return use_experts_implementation(Own, **switches)(Config())


def answer(cls, quantization=None, **switches):
    return decide(lambda: Block(made(cls, **switches)), quantization=quantization)


def test_what_is_read_off_a_module():
    rewrite = answer(Experts).rewrite("experts", "site.experts")
    assert dict(rewrite.children) == {"routed": ExpertsSpec(EXPERTS, 2, WIDTH, INNER)}
    assert {entry.source for entry in rewrite.weights} == {"gate_up_proj", "down_proj"} == set(rewrite.removes)


def test_a_limit_is_found_whatever_it_is_called_and_has_no_kernel():
    spec = dict(answer(Bounded).rewrite("experts", "site.experts").children)["routed"]
    assert spec == ExpertsSpec(EXPERTS, 2, WIDTH, INNER, limit=3.0, kernel=False)
    assert "no kernel" in str(spec)


def test_experts_without_a_gate_run_in_plain_torch():
    spec = dict(answer(Ungated, has_gate=False).rewrite("experts", "site.experts").children)["routed"]
    assert spec == ExpertsSpec(EXPERTS, 2, WIDTH, INNER, activation="relu", gated=False, kernel=False)


@pytest.mark.parametrize(
    ("cls", "switches", "reason"),
    [
        (Doubled, {}, "proof failed: outputs differ"),
        (OddGate, {}, "none of the rules"),
        (WithScale, {}, "has the parameters"),
        (Experts, {"has_bias": True}, "has the parameters"),
        (Experts, {"is_transposed": True}, "do not follow each other"),
    ],
)
def test_what_cannot_be_served_rightly_is_left_alone(cls, switches, reason):
    assert reason in answer(cls, **switches).reason("experts", "site.experts")


def test_arguments_given_in_another_order_are_seen():
    decision = decide(lambda: Block(made(Experts), swapped=True))
    assert "is called with" in decision.reason("experts", "site.experts")


def test_quantized_experts_are_refused():
    reason = answer(Experts, "fp8").reason("experts", "site.experts")
    assert "quantized" in reason


def tiny(cls, **more):
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, **more}
    return build(cls(**sizes), torch.float32)


def specs(meta, **serving):
    plan = make_plan(meta, ServingSpec(**serving))
    found = {spec for r in plan.rewrites for _, spec in r.children if isinstance(spec, (ExpertsSpec, MoESpec))}
    return {spec.experts if isinstance(spec, MoESpec) else spec for spec in found}


def test_models_of_transformers():
    assert specs(tiny(MixtralConfig)) == {ExpertsSpec(4, 2, 64, 96)}
    assert specs(tiny(GraniteMoeConfig)) == {ExpertsSpec(4, 2, 64, 96)}
    oai = ExpertsSpec(4, 2, 64, 96, "swigluoai", True, True, True, True, 1.702, 7.0)
    assert specs(tiny(GptOssConfig, head_dim=16)) == {oai}


def test_a_hidden_size_that_the_cpu_kernel_refuses():
    narrow = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 12}
    assert {s.kernel for s in specs(tiny(MixtralConfig, **narrow))} == {False}
    assert {s.kernel for s in specs(tiny(MixtralConfig, **narrow), device="cuda")} == {True}


@pytest.mark.parametrize("serving", [{"compiled": True}, {"tp_size": 2}, {"quantization": "fp8"}], ids=str)
def test_a_model_whose_experts_stay_is_refused_where_they_cannot_run(serving, monkeypatch):
    monkeypatch.setattr("tfbackend.fusers.experts._rule", lambda *_: "no rule")
    meta = tiny(MixtralConfig)
    assert not [r for r in draft_plan(meta, ServingSpec())[1] if "experts" in str(r)]
    assert [r for r in draft_plan(meta, ServingSpec(**serving))[1] if "experts of a layer" in str(r)]


@pytest.mark.parametrize("count", [4, 90, 128, 256])
@pytest.mark.parametrize("cls", [MixtralConfig, GptOssConfig])
def test_experts_of_every_size_are_proven(cls, count):
    """Large ones on a narrow stand-in, which must stay one whole."""
    found = specs(tiny(cls, head_dim=16, num_local_experts=count))
    assert {(spec.num_experts, spec.intermediate) for spec in found} == {(count, 96)}
