"""Blocks that a model repeats, each with parts that it does not call: one tensor fills what has to look alike."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import OneSite
from tfbackend.fusers.base import Miss, Rewrite, WeightEntry
from tfbackend.graph.observe import observe
from tfbackend.layerspecs import COLWISE, LinearSpec, MergedLinearSpec
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec
from tfbackend.tied import laid_out_alike
from tfbackend.weights import build_weight_map

WIDTH = 32


class Block(nn.Module):
    """Two pairs of linears, of which it calls one; `reads` has it read the weight of the other."""

    def __init__(self, own, *, reads=False):
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH, bias=False) for n in "ab"}) for _ in "01")
        self.own, self.reads = own, reads

    def forward(self, x):
        pair, other = self.pairs[self.own], self.pairs[1 - self.own]
        x = pair["a"](x) * pair["b"](x)
        return F.linear(x, other["a"].weight) if self.reads else x


def decide(rewrites, *, reads=False):
    with torch.device("meta"):
        base = OneSite([Block(0, reads=reads), Block(1, reads=reads)]).eval()
    names = [f"pairs.{number}.{name}.weight" for number in "01" for name in "ab"]
    base.all_tied_weights_keys = {f"others.0.{name}": f"site.{name}" for name in names}
    meta = SimpleNamespace(base=base, base_path="", model=base)
    misses = [Miss("linear", "others.0.pairs.0.a", "is not called")]
    found, left = laid_out_alike(meta, observe(base), rewrites, misses)
    assert found[: len(rewrites)] == rewrites
    assert all(isinstance(parameter, nn.Parameter) for parameter in base.parameters())
    return found[len(rewrites) :], left


LINEAR = LinearSpec(WIDTH, WIDTH, False, COLWISE)


def whole(path):
    return Rewrite(path, "linear", "a linear", layer=LINEAR)


def merged(path):
    spec = MergedLinearSpec(WIDTH, (WIDTH, WIDTH), False, COLWISE)
    weights = (WeightEntry("a", "ab", 0), WeightEntry("b", "ab", 1))
    return Rewrite(path, "merged_column", "two", children=(("ab", spec),), removes=("a", "b"), weights=weights)


@pytest.mark.parametrize(
    ("path", "place"),
    [("site.pairs.0.a", "others.0.pairs.0.a"), ("others.0.pairs.1.b", "site.pairs.1.b")],
)
def test_what_is_not_called_is_laid_out_as_what_is(path, place):
    added, left = decide([whole(path)])
    assert [(rewrite.qualname, rewrite.fuser, rewrite.layer) for rewrite in added] == [(place, "linear", LINEAR)]
    assert len(left) == (place != "others.0.pairs.0.a")


def test_what_is_merged_stays_together():
    (added,), left = decide([merged("site.pairs.0")])
    assert (added.qualname, added.removes, added.weights) == ("others.0.pairs.0", ("a", "b"), merged("").weights)
    assert left == []


def test_what_is_read_in_some_other_way_is_left_as_it_is():
    added, left = decide([whole("site.pairs.0.a")], reads=True)
    assert added == []
    assert len(left) == 1


def test_a_module_that_is_called_decides_for_itself():
    added, _ = decide([whole("site.pairs.0.a"), whole("others.0.pairs.1.a")])
    assert {rewrite.qualname for rewrite in added} == {"others.0.pairs.0.a", "site.pairs.1.a"}


def test_adapters_of_a_block_for_several_layers():
    """Zamba2: two layers of one block, each with an adapter of its own, and a place for that of the other."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 16, "adapter_rank": 8}
    sizes |= {"vocab_size": 64, "mamba_expand": 2, "n_mamba_heads": 4, "mamba_ngroups": 1, "num_mem_blocks": 1}
    meta = build(CONFIG_MAPPING["zamba2"](**sizes, intermediate_size=48), torch.float32)
    plan = make_plan(meta, ServingSpec(tp_size=2))
    specs = {rewrite.qualname: rewrite.layer for rewrite in plan.rewrites if "adapter_list" in rewrite.qualname}
    places = [f"shared_transformer.feed_forward.gate_up_proj_adapter_list.{n}.{m}" for n in (0, 1) for m in (0, 1)]
    assert [specs[f"layers.1.{place}"] for place in places] == [specs[f"layers.3.{place}"] for place in places]
    assert {specs[f"layers.1.{place}"].style for place in places} == {"colwise", "rowwise"}
    shared = dict(build_weight_map(meta.model, plan).shared)
    for place in places:
        assert shared[f"model.layers.3.{place}.weight"] == f"model.layers.1.{place}.weight"
