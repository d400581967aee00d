"""Gated linear units: what becomes one projection and one activation-and-multiply, and what is left alone."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from tests.sites import WIDTH, decide, lines
from tfbackend.layerspecs import ActMulSpec, MergedLinearSpec

INNER = 48


class GLU(nn.Module):
    def __init__(self, bias=(False, False), act="silu"):
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=bias[0])
        self.up = nn.Linear(WIDTH, INNER, bias=bias[1])
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.act = ACT2FN[act]

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class UpFirst(GLU):
    def forward(self, x):
        return self.down(self.up(x) * self.act(self.gate(x)))


class Apart(GLU):
    def forward(self, x):
        up = self.up(x)
        gate = self.act(self.gate(x))
        return self.down(gate * up)


class Packed(GLU):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * INNER, bias=True)
        del self.up

    def forward(self, x):
        gate, up = self.gate(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class PackedSecondHalf(Packed):
    def forward(self, x):
        up, gate = self.gate(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


class SelfNamedMe(GLU):
    def forward(me, x):
        return me.down(me.act(me.gate(x)) * me.up(x))


class PositionalOnly(GLU):
    def forward(self, /, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class UnicodeBefore(GLU):
    def forward(self, x):
        y = ("überlänge →", self.act(self.gate(x)) * self.up(x))[1]
        return self.down(y)


class LocalTaken(GLU):
    def forward(self, x):
        tfb_gate_up_proj = x
        gate = self.act(self.gate(x))
        return self.down(gate * self.up(x)) + tfb_gate_up_proj


class TwoInputs(GLU):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x + 1))


class GateTwice(GLU):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)) + self.gate(x).sum(-1, keepdim=True)


class GateUsedAgain(GLU):
    def forward(self, x):
        gate = self.gate(x)
        return self.down(self.act(gate) * self.up(x) + gate)


class UntracedBranch(GLU):
    def forward(self, x):
        if self.training:
            return self.gate(x)
        return self.down(self.act(self.gate(x)) * self.up(x))


class WrittenBetween(GLU):
    def forward(self, x):
        gate = self.act(self.gate(x))
        x[:, 0].mul_(2)
        return self.down(gate * self.up(x))


class WrittenItself(GLU):
    def forward(self, x):
        gate = self.act(self.gate(x))
        x += 1
        return self.down(gate * self.up(x))


class Clamped(GLU):
    def forward(self, x):
        return self.down(self.act(self.gate(x).clamp(max=0.1)) * self.up(x))


class Summed(GLU):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) + self.up(x))


class InLoop(GLU):
    def forward(self, x):
        for _ in range(1):
            y = self.act(self.gate(x)) * self.up(x)
        return self.down(y)


class InLambda(GLU):
    def forward(self, x):
        gate = lambda: self.gate(x)  # noqa: E731
        return self.down(self.act(gate()) * self.up(x))


class FunctionAct(GLU):
    def __init__(self, function):
        super().__init__()
        self.act = None
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.gate(x)) * self.up(x))


class Closure(GLU):
    def forward(self, x):
        return super().forward(x)


def _doubled(forward):
    @functools.wraps(forward)
    def wrapped(self, x):
        return 2 * forward(self, x)

    return wrapped


class Decorated(GLU):
    @_doubled
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_two_linears_become_one_and_the_product_one_call():
    plan = decide(GLU)
    rewrite = plan.rewrite("glu")
    assert lines(plan.text()) == ["return self.down(self.act_and_mul(self.gate_up_proj(x)))"]
    assert dict(rewrite.children) == {
        "gate_up_proj": MergedLinearSpec(WIDTH, (INNER, INNER), bias=False),
        "act_and_mul": ActMulSpec("silu"),
    }
    assert set(rewrite.removes) == {"gate", "up"}
    assert [(w.source, w.target, w.shard) for w in rewrite.weights] == [
        ("gate", "gate_up_proj", 0),
        ("up", "gate_up_proj", 1),
    ]
    assert not plan.unproven


def test_gate_comes_first_in_the_weight_wherever_it_stands():
    rewrite = decide(UpFirst).rewrite("glu")
    assert [(w.source, w.shard) for w in rewrite.weights] == [("gate", 0), ("up", 1)]


def test_calls_before_the_product_become_halves_of_one_call():
    text = lines(decide(Apart).text())
    assert text == [
        "up = (tfb_gate_up_proj := self.gate_up_proj(x)).chunk(2, dim=-1)[1]",
        "gate = self.act(tfb_gate_up_proj.chunk(2, dim=-1)[0])",
        "return self.down(self.act_and_mul(tfb_gate_up_proj))",
    ]


def test_packed_gate_keeps_its_linear():
    plan = decide(Packed)
    rewrite = plan.rewrite("glu")
    assert [(w.source, w.target, w.shard) for w in rewrite.weights] == [("gate", "gate", None)]
    assert dict(rewrite.children)["gate"] == MergedLinearSpec(WIDTH, (INNER, INNER), bias=True)
    assert lines(plan.text())[-1] == "return self.down(self.act_and_mul(tfb_gate))"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_activation_is_known_by_its_values(spelling, name):
    rewrite = decide(lambda: GLU(act=spelling)).rewrite("glu")
    assert dict(rewrite.children)["act_and_mul"] == ActMulSpec(name)


def test_clipped_gelu_is_not_gelu():
    """ "gelu_10" is GELU on [-10, 10] and constant outside."""
    plan = decide(lambda: GLU(act="gelu_10"))
    plan.reason("glu")
    assert plan.rewrite("merged_column")


@pytest.mark.parametrize("act", ["relu", "relu2", "sigmoid", "quick_gelu"])
def test_activation_without_a_kernel_is_named(act):
    assert decide(lambda: GLU(act=act)).reason("glu") == f"vLLM has no {act}-and-multiply"


def test_function_held_as_an_attribute_is_read_at_each_site():
    """Two sites of one class that differ in nothing but a function must not share an answer."""
    plan = decide(lambda: FunctionAct(F.silu), lambda: FunctionAct(F.gelu), lambda: FunctionAct(torch.tanh))
    assert dict(plan.rewrite("glu").children)["act_and_mul"] == ActMulSpec("silu")
    assert dict(plan.rewrite("glu", "others.0").children)["act_and_mul"] == ActMulSpec("gelu")
    assert plan.reason("glu", "others.1") == "silent"


def test_activation_modules_of_one_class_are_told_apart():
    class Own(GLU):
        def __init__(self, approximate):
            super().__init__()
            self.act = nn.GELU(approximate=approximate)

    plan = decide(lambda: Own("none"), lambda: Own("tanh"))
    assert dict(plan.rewrite("glu").children)["act_and_mul"] == ActMulSpec("gelu")
    assert dict(plan.rewrite("glu", "others.0").children)["act_and_mul"] == ActMulSpec("gelu_tanh")


def test_module_may_be_called_otherwise_than_self():
    assert lines(decide(SelfNamedMe).text()) == ["return me.down(me.act_and_mul(me.gate_up_proj(x)))"]
    assert lines(decide(PositionalOnly).text()) == ["return self.down(self.act_and_mul(self.gate_up_proj(x)))"]


def test_columns_count_bytes_before_the_span():
    text = lines(decide(UnicodeBefore).text())
    assert text[0] == 'y = ("überlänge →", self.act_and_mul(self.gate_up_proj(x)))[1]'


def test_local_name_that_is_taken_is_avoided():
    text = decide(Apart).text(), decide(LocalTaken).reason("glu")
    assert "tfb_gate_up_proj" in text[0]
    assert text[1] == "one of the two linears is called inside the product and one before it"


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: GLU(bias=(True, False)), "some of the linears have a bias and some have none"),
        (TwoInputs, "gate, up do not share one input"),
        (GateTwice, "gate is called 2 times"),
        (GateUsedAgain, "gate or up is used for more than the product"),
        (UntracedBranch, "gate is used at 2 places of the source, one of them was traced"),
        (WrittenBetween, "mul_ writes in place between the calls"),
        (WrittenItself, "gate, up do not share one input"),
        (PackedSecondHalf, "the second half of the packed linear is activated, vLLM's kernels activate the first"),
        (InLoop, "gate is called inside a For"),
        (InLambda, "gate is not called as self.gate(...)"),
        (Closure, "Closure.forward closes over __class__"),
        (Clamped, "silent"),
        (Summed, "silent"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_near_misses_say_why(build, reason):
    assert decide(build).reason("glu") == reason


def test_bias_of_both_is_merged():
    plan = decide(lambda: GLU(bias=(True, True)))
    assert dict(plan.rewrite("glu").children)["gate_up_proj"].bias


def test_decorator_that_changes_the_result_fails_the_proof():
    """A generated forward has no decorators, so one that matters must not be lost."""
    assert decide(Decorated).reason("glu").startswith("not used, its proof failed: outputs differ by ")


def test_forward_replaced_on_the_instance_is_left_alone():
    def build():
        module = GLU()
        module.forward = lambda x: x
        return module

    plan = decide(build)
    assert plan.reason("glu") == "silent"
    assert all(r.qualname != "site" for r in plan.rewrites)


def test_hooked_linear_is_not_merged():
    def build():
        module = GLU()
        module.gate.register_forward_hook(lambda module, args, output: output + 1)
        return module

    plan = decide(build)
    plan.reason("glu")
    assert "it has forward hooks" in plan.reason("linear", "site.gate")
    assert plan.rewrite("linear", "site.up")


def test_ranks_share_the_product_only_where_one_linear_takes_it():
    plan = decide(GLU, tp_size=2)
    assert plan.rewrite("glu").styles == (("down", "rowwise"),)
    assert plan.rewrite("linear", "site.down").layer.style == "rowwise"

    class Normed(GLU):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(INNER)

        def forward(self, x):
            return self.down(self.norm(self.act(self.gate(x)) * self.up(x)))

    assert decide(Normed, tp_size=2).reason("glu") == "no one linear takes the product"
