"""Plans of attention that is given a bias for each query and key, where a table for each token says the same."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import InklingTextConfig
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

from tests.sites import SIZES
from tfbackend import distances
from tfbackend.errors import UnsupportedModelError
from tfbackend.fusers.attention import call_problem, spec_of
from tfbackend.graph.interface import attention_interface
from tfbackend.graph.masks import MaskWindow
from tfbackend.graph.observe import TOKENS, AttentionCall, TableSize, Unread
from tfbackend.layerspecs import AttentionSpec
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec

FIELDS = SIZES | {
    "head_dim": 16,
    "swa_head_dim": 32,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "sliding_window_size": 5,
    "rel_extent": 11,
    "d_rel": 6,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "dense"],
    "log_scaling_n_floor": 4,
    "log_scaling_alpha": 0.7,
}
SLIDING = AttentionSpec(2, 1, 32, 32, 1 / 32, window=5, distance_bias="position_bias", extent=5)
WHOLE = AttentionSpec(4, 2, 16, 16, 1 / 16, distance_bias="position_bias", extent=11)
MAKERS = {f"layers.{n}.self_attn.rel_logits_proj" for n in (0, 1)}


def plan_of(serving=None, **fields):
    return make_plan(build(InklingTextConfig(**FIELDS | fields), torch.float32), serving or ServingSpec())


def test_the_bias_becomes_a_table():
    plan = plan_of()
    assert dict(plan.attention) == {"layers.0.self_attn": SLIDING, "layers.1.self_attn": WHOLE}
    for path, extent in zip(sorted(MAKERS), (5, 11), strict=True):
        first = plan.forwards[path].split("\n", 1)[1]
        assert f"query_positions, key_positions = tfb_latest_place(query_positions, {extent})" in first
    for rewrite in plan.rewrites:
        if rewrite.fuser == "attention":
            assert ("tfb_distances", "position_bias") in rewrite.attributes
    assert plan.counts["qkv"] == 2


def test_queries_and_biases_are_scaled_by_the_positions_of_the_engine():
    plan = plan_of()
    assert set(plan.numbered) == {"layers.0.self_attn", "layers.1.self_attn"}
    assert "tfb_token_positions(self, torch.arange(q_length" in plan.forwards["layers.1.self_attn"]


def test_in_short_contexts_the_table_is_as_short():
    extents = [spec.extent for _, spec in plan_of(ServingSpec(max_model_len=14), rel_extent=300).attention]
    assert extents == [5, 14]


def test_layers_that_are_alike_are_tried_out_once(monkeypatch):
    tried, find = [], distances.find_table
    monkeypatch.setattr(distances, "find_table", lambda module, *args: (tried.append(module), find(module, *args))[1])
    types = ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding"]
    fields = FIELDS | {"num_hidden_layers": 4, "layer_types": types, "mlp_layer_types": ["dense"] * 4}
    meta = build(InklingTextConfig(**fields), torch.float32)
    assert len(list(make_plan(meta, ServingSpec()).attention)) == 4
    # The number of layer 2 is among its sizes, too.
    makers = [meta.base.get_submodule(f"layers.{number}.self_attn.rel_logits_proj") for number in (0, 1, 2)]
    assert tried == makers


def test_ranks_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"bias by distance.*--tensor-parallel-size 1"):
        plan_of(ServingSpec(tp_size=2))


class Given(nn.Module):
    """Stands for the layer: notes what it is given."""

    def forward(self, query, key, value, **biases):
        self.biases = biases
        return query


def test_the_layer_is_given_a_table_for_each_token():
    module = nn.Module()
    module.attn, module.tfb_distances = Given(), "wherever"
    q, table = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 3, 6)
    attention_interface(module, q, q, q, None, wherever=table, scaling=0.3)
    assert {*module.attn.biases} == {"distance_bias"}
    assert torch.equal(module.attn.biases["distance_bias"], table[0].transpose(0, 1))


def call(**keywords):
    shape = torch.Size((1, 4, TOKENS, 8))
    return AttentionCall(shape, shape, shape, MaskWindow(3), "", keywords)


def test_a_table_is_for_the_tokens_and_heads_that_attend():
    assert call_problem(call(bias=TableSize(4, TOKENS, 6))) == call_problem(call(bias=TableSize(1, TOKENS, 6))) == ""
    assert spec_of(call(bias=TableSize(4, TOKENS, 6))).distance_bias == "bias"
    assert "for 2 heads" in call_problem(call(bias=TableSize(2, TOKENS, 6)))
    assert f"and {TOKENS + 1} tokens" in call_problem(call(bias=TableSize(4, TOKENS + 1, 6)))
    assert call_problem(call(bias=Unread("it is none"))) == "the keyword bias would be dropped: it is none"


def test_no_layer_has_tables_and_chunks():
    chunked = replace(call(bias=TableSize(4, TOKENS, 6)), mask=MaskWindow(chunk=3))
    assert call_problem(chunked) == "hides what is not of a token's chunk of 3, with a bias by distance"


# Near misses: other things that become of the bias.

original = InklingRelativeLogits.forward


def by_place(self, relative_states, query_positions, key_positions):
    bias = original(self, relative_states, query_positions, key_positions)
    return bias * (1 + query_positions[:, None] / 7)


def test_a_bias_by_place_is_refused(monkeypatch):
    monkeypatch.setattr(InklingRelativeLogits, "forward", by_place)
    with pytest.raises(UnsupportedModelError, match=r"position_bias would be dropped: .*more than the query token"):
        plan_of()


def hooked(config):
    meta = build(config, torch.float32)
    for path in MAKERS:
        meta.base.get_submodule(path).register_forward_hook(lambda module, args, output: output * 2)
    return meta


def test_hooks_are_refused():
    with pytest.raises(UnsupportedModelError, match="position_bias would be dropped: no module of its own"):
        make_plan(hooked(InklingTextConfig(**FIELDS)), ServingSpec())


eager = modeling_inkling.eager_attention_forward


def before_the_scale(module, query, key, value, mask, scaling, position_bias=None, **kwargs):
    return eager(module, query, key, value, mask, scaling, position_bias=position_bias * scaling, **kwargs)


def of_another_sign(module, query, key, value, mask, scaling, position_bias=None, **kwargs):
    return eager(module, query, key, value, mask, scaling, position_bias=-position_bias, **kwargs)


def unread(module, query, key, value, mask, scaling, position_bias=None, **kwargs):
    return eager(module, query, key, value, mask, scaling, **kwargs)


def only_near(module, query, key, value, mask, scaling, position_bias=None, **kwargs):
    """Of less than a few tokens, as a bias by distance; no run of few tokens shows it."""
    at = torch.arange(position_bias.shape[-1])
    near = (at[:, None] - at[None, :]) < 9
    return eager(module, query, key, value, mask, scaling, position_bias=position_bias * near, **kwargs)


@pytest.mark.parametrize("attend", [before_the_scale, of_another_sign, unread, only_near])
def test_what_attention_makes_of_it_is_compared(monkeypatch, attend):
    monkeypatch.setattr(modeling_inkling, "eager_attention_forward", attend)
    with pytest.raises(UnsupportedModelError, match=r"position_bias would be dropped: .*outputs differ by"):
        plan_of()


def test_the_model_is_as_it_was_afterwards():
    meta = build(InklingTextConfig(**FIELDS), torch.float32)
    make_plan(meta, ServingSpec())
    assert {type(meta.base.get_submodule(path)) for path in MAKERS} == {InklingRelativeLogits}
