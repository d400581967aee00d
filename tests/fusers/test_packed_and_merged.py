"""Packed projections, siblings of one input, and linears on their own."""

import pytest
import torch
from torch import nn

from tests.sites import DIM, HEADS, KV_HEADS, WIDTH, attend, decide, heads, lines
from tfbackend.layerspecs import LinearSpec, MergedLinearSpec, QKVSpec

Q, KV = HEADS * DIM, KV_HEADS * DIM


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, Q + 2 * KV, bias=True)
        self.out = nn.Linear(Q, WIDTH)

    def forward(self, x):
        qkv = self.qkv(x)
        q = qkv[..., :Q]
        k = qkv[..., Q : Q + KV]
        v = qkv[..., Q + KV :]
        return self.out(attend(self, heads(q), heads(k), heads(v)))


class SplitInThree(Packed):
    def forward(self, x):
        q, k, v = self.qkv(x).split((Q, KV, KV), dim=-1)
        return self.out(attend(self, heads(q), heads(k), heads(v)))


class KeysFirst(Packed):
    def forward(self, x):
        k, q, v = self.qkv(x).split((KV, Q, KV), dim=-1)
        return self.out(attend(self, heads(q), heads(k), heads(v)))


class Interleaved(Packed):
    """Each KV group holds its queries, its key and its value, as in Falcon and GPT-NeoX."""

    def forward(self, x):
        groups = self.qkv(x).view(1, x.shape[1], KV_HEADS, HEADS // KV_HEADS + 2, DIM)
        q = groups[..., :-2, :].reshape(1, x.shape[1], HEADS, DIM).transpose(1, 2)
        k, v = groups[..., -2, :].transpose(1, 2), groups[..., -1, :].transpose(1, 2)
        return self.out(attend(self, q, k, v))


class Unused(Packed):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, Q + 2 * KV + 1)

    def forward(self, x):
        q, k, v, _ = self.qkv(x).split((Q, KV, KV, 1), dim=-1)
        return self.out(attend(self, heads(q), heads(k), heads(v)))


def test_blocks_in_order_are_a_qkv_projection():
    for build in (Packed, SplitInThree):
        rewrite = decide(build).rewrite("packed_qkv")
        assert dict(rewrite.children) == {"qkv": QKVSpec(WIDTH, DIM, DIM, HEADS, KV_HEADS, bias=True)}
        assert [(w.source, w.target, w.shard) for w in rewrite.weights] == [("qkv", "qkv", None)]
        assert rewrite.edits == (), "on one rank the bounds of the slices are right as they stand"


def test_on_ranks_the_slices_count_the_rows_of_a_rank():
    plan = decide(Packed, tp_size=2)
    assert lines(plan.text()) == [
        "qkv = (tfb_qkv := self.qkv(x).split(self.qkv_sizes, dim=-1))",
        "q = tfb_qkv[0]",
        "k = tfb_qkv[1]",
        "v = tfb_qkv[2]",
        "return self.out(attend(self, heads(q), heads(k), heads(v)))",
    ]
    assert plan.rewrite("linear", "site.out").layer.style == "rowwise"
    assert lines(decide(SplitInThree, tp_size=2).text()) == [
        "q, k, v = self.qkv(x).split(self.qkv_sizes, dim=-1)",
        "return self.out(attend(self, heads(q), heads(k), heads(v)))",
    ]


class SplitLater(Packed):
    def forward(self, x):
        qkv = self.qkv(x)
        first, second, third = qkv.split((Q, KV, KV), dim=-1)
        return self.out(attend(self, heads(first), heads(second), heads(third)))


class SplitByFunction(Packed):
    def forward(self, x):
        q, k, v = torch.split(self.qkv(x), (Q, KV, KV), dim=-1)
        return self.out(attend(self, heads(q), heads(k), heads(v)))


class SplitInFour(Packed):
    def forward(self, x):
        q, r, k, v = self.qkv(x).split((Q // 2, Q // 2, KV, KV), dim=-1)
        return self.out(attend(self, heads(torch.cat((q, r), -1)), heads(k), heads(v)))


class UsedElsewhere(Packed):
    """The branch that is not traced would split the rows of a rank by the sizes of all."""

    def forward(self, x):
        if x.shape[0] == 2:
            q, k, v = self.qkv(x[:1]).split((Q, KV, KV), dim=-1)
        else:
            q, k, v = self.qkv(x).split((Q, KV, KV), dim=-1)
        return self.out(attend(self, heads(q), heads(k), heads(v)))


def test_on_ranks_a_split_in_three_has_the_sizes_of_a_rank():
    assert lines(decide(SplitLater, tp_size=2).text())[:2] == [
        "qkv = self.qkv(x)",
        "first, second, third = qkv.split(self.qkv_sizes, dim=-1)",
    ]
    assert decide(SplitByFunction, tp_size=2).reason("packed_qkv") == "qkv is not taken apart by a method"
    assert decide(SplitInFour, tp_size=2).reason("packed_qkv") != "silent"


def test_on_ranks_a_use_that_was_not_traced_cannot_run():
    assert lines(decide(UsedElsewhere, tp_size=2).text())[1::2][:2] == [
        "q, k, v = self.not_traced_qkv(x[:1]).split((Q, KV, KV), dim=-1)",
        "q, k, v = self.qkv(x).split(self.qkv_sizes, dim=-1)",
    ]


@pytest.mark.parametrize("build", [KeysFirst, Interleaved])
def test_other_layouts_stay_one_linear(build):
    plan = decide(build)
    assert plan.reason("packed_qkv") == "q is not one block of rows of qkv, in order of heads"
    assert plan.rewrite("linear", "site.qkv")


def test_rows_left_over_are_a_miss():
    assert decide(Unused).reason("packed_qkv") == f"qkv has {Q + 2 * KV + 1} rows, q, k and v take {Q + 2 * KV}"


class Siblings(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.a = nn.Linear(WIDTH, 16, bias=False)
        self.b = nn.Linear(WIDTH, 24, bias=bias)

    def forward(self, x):
        return torch.cat((self.a(x), self.b(x).tanh()), dim=-1)


class Alone(Siblings):
    def forward(self, x):
        return self.a(x)


class Quiet(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


def test_siblings_of_one_input_are_merged():
    plan = decide(Siblings)
    assert dict(plan.rewrite("merged_column").children) == {"a_b": MergedLinearSpec(WIDTH, (16, 24), bias=False)}
    assert lines(plan.text()) == [
        "return torch.cat(((tfb_a_b := self.a_b(x).split(self.a_b_sizes, dim=-1))[0], tfb_a_b[1].tanh()), dim=-1)"
    ]
    assert decide(lambda: Siblings(bias=True)).reason("merged_column").startswith("some of the linears have a bias")


def test_ranks_merge_only_what_the_model_shards_by_columns_at_that_path():
    """Two sites of one kind, of which the model's own plan shards one."""
    plan = decide(Siblings, Siblings, tp_size=2, tp_plan={"site.a": "colwise", "site.b": "colwise"})
    assert plan.rewrite("merged_column", "site")
    assert plan.reason("merged_column", "others.0") == "a, b are not all sharded by columns"
    assert plan.rewrite("linear", "others.0.a").layer.style == "replicated"


def test_every_plain_linear_is_served():
    plan = decide(lambda: nn.Linear(WIDTH, 5))
    assert plan.rewrite("linear").layer == LinearSpec(WIDTH, 5, bias=True)


def test_linear_with_a_forward_of_its_own_is_not():
    assert decide(lambda: Quiet(WIDTH, 5)).reason("linear") == "Quiet changes what nn.Linear does"


def test_linear_that_is_never_called_may_be_read_otherwise():
    assert decide(Alone).reason("linear", "site.b").startswith("is not called")


def test_a_proof_that_fails_gives_back_what_was_claimed():
    """On ranks a product's consumer is sharded by rows; without the product it must not be."""

    class NeedsGate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
            self.act = nn.SiLU()

        def helper(self):
            return self.gate.in_features

        def forward(self, x):
            y = self.act(self.gate(x)) * self.up(x)
            assert self.helper() == WIDTH
            return self.down(y)

    plan = decide(NeedsGate, tp_size=2)
    assert plan.reason("glu").startswith("not used, its proof failed: AttributeError")
    assert plan.rewrite("linear", "site.gate").layer.style == "replicated"
    assert plan.rewrite("linear", "site.down").layer.style == "replicated"
