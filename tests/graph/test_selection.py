"""Keys that attention is told to attend to: how many of how many, by whom, and who else would miss the answer."""

import pytest
import torch
from torch import nn
from transformers import GlmMoeDsaConfig, LlamaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaIndexer

from tests.sites import SIZES
from tfbackend.errors import UnsupportedModelError
from tfbackend.fusers.selection import SelectionFuser
from tfbackend.graph.observe import observe
from tfbackend.graph.selection import Selection, find_selection
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec
from tfbackend.standinspec import AllKeysSpec
from tfbackend.weights import build_weight_map
from tfbackend.weights.outcomes import Dropped, Placement

BOUND = 16


def config(**fields):
    return GlmMoeDsaConfig(**{
        **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "index_topk": BOUND, "index_head_dim": 32, "index_n_heads": 2,
        "indexer_types": ["full", "full"], "mlp_layer_types": ["dense", "dense"], **fields,
    })  # fmt: skip


def built(**fields):
    return build(config(**fields), torch.float32)


def selection(change=None):
    base = built().base
    if change is not None:
        change(base)
    return find_selection(base, observe(base))


def test_the_bound_is_read_with_those_who_pick():
    makers = frozenset({"layers.0.self_attn.indexer", "layers.1.self_attn.indexer"})
    assert selection() == Selection(BOUND, makers)


def test_layers_that_are_handed_what_others_picked_have_its_bound():
    plan = make_plan(built(indexer_types=["full", "shared"]), ServingSpec(max_model_len=BOUND))
    assert [rewrite.qualname for rewrite in plan.rewrites if rewrite.fuser == "selection"] == [
        "layers.0.self_attn.indexer"
    ]
    assert {path: spec.max_context for path, spec in plan.attention} == {
        "layers.0.self_attn": BOUND,
        "layers.1.self_attn": BOUND,
    }
    assert plan.masked


def test_a_model_that_is_told_nothing_has_no_selection():
    base = build(LlamaConfig(**SIZES), torch.float32).base
    assert find_selection(base, observe(base)) is None


def test_one_token_too_many_is_refused_by_the_name_of_the_layer():
    meta = built()
    assert make_plan(meta, ServingSpec(max_model_len=BOUND)).max_context == BOUND
    with pytest.raises(
        UnsupportedModelError, match=rf"longer than {BOUND}.*layers\.0\.self_attn.*--max-model-len {BOUND}"
    ):
        make_plan(meta, ServingSpec(max_model_len=BOUND + 1))


# Near misses: each is a model that picks keys, and is not served.

original = GlmMoeDsaIndexer.forward


def picked(tokens, count):
    """[1, tokens, count]: the first keys, for every token."""
    return torch.arange(count, dtype=torch.int32).expand(1, tokens, count)


def always_half(self, hidden_states, *_, **__):
    tokens = hidden_states.shape[1]
    return torch.zeros(1, tokens, min(self.index_topk, tokens // 2), dtype=torch.int32, device=hidden_states.device)


def all_but_one(self, hidden_states, *_, **__):
    tokens = hidden_states.shape[1]
    return torch.zeros(1, tokens, min(self.index_topk, tokens - 1), dtype=torch.int32, device=hidden_states.device)


def all_but_one_of_many(self, hidden_states, *_, **__):
    tokens = hidden_states.shape[1]
    count = min(self.index_topk, tokens - (tokens > 12))
    return torch.zeros(1, tokens, count, dtype=torch.int32, device=hidden_states.device)


def all_always(self, hidden_states, *_, **__):
    tokens = hidden_states.shape[1]
    return torch.zeros(1, tokens, tokens, dtype=torch.int32, device=hidden_states.device)


def scores(self, *args, **kwargs):
    return original(self, *args, **kwargs).float()


def one_key_over_and_over(self, *args, **kwargs):
    """As many as there are tokens, and all of them the first."""
    return original(self, *args, **kwargs) * 0


def none_left_out_after_all(self, hidden_states, *args, **kwargs):
    """In eager attention all keys, whatever the bound."""
    tokens = hidden_states.shape[1]
    if self.config._attn_implementation == "eager":
        return picked(tokens, tokens)
    return original(self, hidden_states, *args, **kwargs)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (always_half, "of 7 keys 3 are picked, of 1048576 keys 16"),
        (all_but_one, "of 7 keys 6 are picked, of 1048576 keys 16"),
        (all_but_one_of_many, "of 16 keys 15 are picked, of 1048576 keys 16"),
        (all_always, "its layers pick 1048576 of 1048576 keys"),
        (scores, "they are no list of keys for each of 1048576 tokens"),
        (one_key_over_and_over, "hides something in a context of 16 tokens"),
        (none_left_out_after_all, "hides nothing in a context of 17 tokens"),
    ],
)
def test_another_way_to_pick_is_a_reason(monkeypatch, forward, reason):
    monkeypatch.setattr(GlmMoeDsaIndexer, "forward", forward)
    found = selection()
    assert isinstance(found, str)
    assert reason in found


def test_the_reason_is_told_to_the_user(monkeypatch):
    monkeypatch.setattr(GlmMoeDsaIndexer, "forward", all_but_one)
    with pytest.raises(UnsupportedModelError, match="the keyword indices would be dropped: of 7 keys 6 are picked"):
        make_plan(built(), ServingSpec(max_model_len=BOUND))


def test_layers_that_pick_differently_are_a_reason():
    def change(base):
        base.layers[1].self_attn.indexer.index_topk = 9

    assert selection(change) == "its layers pick 9 or 16 of 1048576 keys"


class Curious(GlmMoeDsaAttention):
    def forward(self, *args, **kwargs):
        out, weights, indices = super().forward(*args, **kwargs)
        return out + indices.float().mean(), weights, indices


def test_what_is_picked_must_be_of_no_other_use():
    def change(base):
        for layer in base.layers:
            layer.self_attn.__class__ = Curious

    assert "float is computed from them besides" in selection(change)


class Direct(GlmMoeDsaAttention):
    """Picks by itself."""

    def forward(self, *args, **kwargs):
        pick, self.indexer = self.indexer, nn.Identity()
        try:
            vars(self.indexer)["forward"] = lambda *a, **k: type(pick).forward(pick, *a, **k)
            return super().forward(*args, **kwargs)
        finally:
            self.indexer = pick


def test_somebody_must_pick():
    def change(base):
        for layer in base.layers:
            layer.self_attn.__class__ = Direct

    assert selection(change) == "no module inside attention makes them"


def test_those_who_pick_go_and_their_weights_are_not_read():
    meta = built()
    plan = make_plan(meta, ServingSpec(max_model_len=BOUND))
    (rewrite, _) = (r for r in plan.rewrites if r.fuser == SelectionFuser.name)
    assert isinstance(rewrite.layer, AllKeysSpec)
    assert {"", "wq_b", "wk", "k_norm", "weights_proj"} <= rewrite.claims
    places = build_weight_map(meta.model, plan, quantized=True)
    stem = "model.layers.0.self_attn"
    for name in ("wq_b.weight", "k_norm.bias", "wq_b.weight_scale_inv"):
        outcome = places.resolve(f"{stem}.indexer.{name}")
        assert isinstance(outcome, Dropped)
        assert outcome.rule == "unread"
    assert isinstance(places.resolve(f"{stem}.q_a_proj.weight"), Placement)
    assert not any("indexer" in target for target in places.targets)
    ledger = places.new_ledger()
    states = {name: torch.zeros(p.shape) for name, p in meta.model.state_dict().items()}
    with_indexer = sum(1 for name in states if ".indexer." in name)
    placed = [placement for placement, _ in places.stream(states.items(), ledger)]
    assert len(placed) == len(states) - with_indexer
    assert len(ledger.as_dict()["dropped"]["unread"]["tensors"]) == with_indexer == 10
