"""Counts of rows an expert that a model reads as a list: what keeps them in tensors, and what is left as it is."""

import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from transformers import JetMoeConfig

from tests.sites import SIZES, WIDTH
from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.observe import observe
from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.grouping import counts_kept, read_grouped
from tfbackend.meta import build
from tfbackend.plan import draft_plan, make_plan
from tfbackend.serving import ServingSpec

EXPERTS, INNER = 6, 48


class Stack(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, out, width))

    def forward(self, x, sizes):
        return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), self.weight, strict=True)])


class Turned(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.w = nn.Parameter(torch.empty(EXPERTS, width, out))

    def forward(self, x, sizes):
        results, at = [], 0
        for expert, size in enumerate(sizes):
            results.append(x[at : at + size] @ self.w[expert])
            at += size
        return torch.cat(results)


class Backwards(Stack):
    def forward(self, x, sizes):
        return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), self.weight.flip(0), strict=True)])


class LeavesEmptyOut(Stack):
    """Takes the matrices of the groups that have rows, in order, and not each group's own."""

    def forward(self, x, sizes):
        full = [size for size in sizes if size]
        return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(full), self.weight, strict=False)])


class Halved(Stack):
    def forward(self, x, sizes):
        return super().forward(x, sizes) * 0.5


class WithBias(Stack):
    def __init__(self, width, out):
        super().__init__(width, out)
        self.bias = nn.Parameter(torch.empty(EXPERTS, out))


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x):
        weights, ids = self.layer(x).softmax(-1).topk(2, dim=-1)
        counts = F.one_hot(ids.flatten(), EXPERTS).sum(0)
        order = ids.flatten().sort().indices
        return order, order // 2, weights.flatten()[order], self.told(counts)

    def told(self, counts):
        return counts


class ListRouter(Router):
    def forward(self, x):
        weights, ids = self.layer(x).softmax(-1).topk(2, dim=-1)
        counts = F.one_hot(ids.flatten(), EXPERTS).sum(0)
        order = ids.flatten().sort().indices
        return order, order // 2, weights.flatten()[order], counts.tolist()


class CountsOnTheWay(ListRouter):
    """What it does with the list needs a list."""

    def forward(self, x):
        order, rows, weights, counts = super(ListRouter, self).forward(x)
        sizes = [size + 1 for size in counts.tolist()]
        return order, rows, weights, [size - 1 for size in sizes]


class Block(nn.Module):
    def __init__(self, router=ListRouter, stack=Stack):
        super().__init__()
        self.router, self.first, self.second = router(), stack(WIDTH, INNER), stack(INNER, WIDTH)

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        _, rows, weights, sizes = self.router(flat)
        out = self.second(F.silu(self.first(flat[rows], sizes)), sizes)
        return torch.zeros_like(flat).index_add(0, rows, out * weights[:, None]).view(x.shape)


class Base(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.block = nn.Embedding(50, WIDTH), block

    def forward(self, input_ids, position_ids=None, use_cache=False):
        return self.block(self.embed(input_ids))


def kept(tmp_path, **parts):
    """(paths edited, problem of a run then)."""
    with init_empty_weights():
        base = Base(Block(**parts)).eval()
    seen = observe(base)
    assert seen.reads_values, seen.problem
    classes = [type(module) for module in base.modules()]
    with counts_kept(base, seen, tmp_path) as done:
        problem = observe(base).problem
    assert [type(module) for module in base.modules()] == classes
    return done.forwards, problem


def test_a_list_of_counts_stays_a_tensor(tmp_path):
    forwards, problem = kept(tmp_path)
    assert list(forwards) == ["block.router"]
    assert "weights.flatten()[order], counts\n" in forwards["block.router"]
    assert not problem


@pytest.mark.parametrize("cls", [Backwards, LeavesEmptyOut, Halved, WithBias])
def test_stacks_that_do_something_else_are_left(cls, tmp_path):
    with init_empty_weights():
        assert read_grouped(cls(WIDTH, INNER)) is None
    assert kept(tmp_path, stack=cls)[1]


def test_a_list_that_is_more_than_handed_on_is_left(tmp_path):
    forwards, problem = kept(tmp_path, router=CountsOnTheWay)
    assert not forwards
    assert problem


def test_both_orientations_are_read():
    with init_empty_weights():
        assert read_grouped(Stack(WIDTH, INNER)) == GroupedLinearSpec(EXPERTS, WIDTH, INNER)
        assert read_grouped(Turned(WIDTH, INNER)) == GroupedLinearSpec(EXPERTS, WIDTH, INNER, transposed=True)
        assert read_grouped(Turned(WIDTH, WIDTH)) == GroupedLinearSpec(EXPERTS, WIDTH, WIDTH, transposed=True)
        assert read_grouped(Stack(WIDTH, WIDTH)) == GroupedLinearSpec(EXPERTS, WIDTH, WIDTH)


def test_a_block_computes_the_same(tmp_path):
    block = Block(stack=Turned).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    base = Base(block).eval()
    ids = torch.arange(7)[None]
    with torch.no_grad():
        wanted = base(ids)
    with torch.device("meta"):
        shape = Base(Block(stack=Turned)).eval()
    with counts_kept(shape, observe(shape), tmp_path):
        for module, other in zip(base.modules(), shape.modules(), strict=True):
            module.__class__ = type(other)
        with torch.no_grad():
            torch.testing.assert_close(base(ids), wanted)


def jetmoe():
    sizes = {**SIZES, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes.pop("num_attention_heads")
    return build(JetMoeConfig(**sizes), torch.float32)


def test_a_model_of_transformers():
    plan = make_plan(jetmoe(), ServingSpec(compiled=True))
    assert plan.counts["grouped_linear"] == 8, "four in each layer, those of attention among them"
    edited = [path for path, text in plan.forwards.items() if "expert_size = expert_size\n" in text]
    assert edited == [f"layers.{n}.{part}.router" for n in (0, 1) for part in ("mlp", "self_attention.experts")]


def test_quantized_stacks_are_refused_by_name():
    _, refusals = draft_plan(jetmoe(), ServingSpec(quantization="fp8"))
    told = [str(r) for r in refusals if "through the experts" in str(r)]
    assert len(told) == 8
    assert "layers.0.self_attention.experts.input_linear: grouped_linear: quantized" in told[0]


def test_a_model_whose_stacks_are_not_understood_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("tfbackend.grouping._multiplies", lambda *_: False)
    with pytest.raises(UnsupportedModelError, match=r"JetMoeModel.*split"):
        draft_plan(jetmoe(), ServingSpec())
