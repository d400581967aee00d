"""Plans as a whole: conflicts, refusals, ranks, pipeline stages and what a plan says of itself."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, LlamaConfig

from tests.fusers.test_glu import GLU
from tests.fusers.test_qkv import Attention, WithKeywords
from tests.sites import SIZES, decide
from tfbackend.errors import PlanConflictError, UnsupportedModelError
from tfbackend.fusers import FUSERS
from tfbackend.fusers.base import Miss, Rewrite
from tfbackend.layerspecs import AttentionSpec, QKVSpec
from tfbackend.meta import build
from tfbackend.plan import Plan, draft_plan, make_plan
from tfbackend.serving import ServingSpec
from tfbackend.styles import tensor_parallel_styles


def llama(**fields):
    return build(LlamaConfig(**{**SIZES, **fields}), torch.float32)


def plan_with(*rewrites, misses=()):
    return Plan("X", rewrites, misses, None, "", "embed", None, False)


def claiming(fuser, site, *claims):
    return Rewrite(site, fuser, "", claims=frozenset(claims))


def test_two_rewrites_of_one_site_raise_and_name_both():
    with pytest.raises(PlanConflictError, match=r"attn\.q_proj.*one and two"):
        plan_with(claiming("one", "attn", "q_proj"), claiming("two", "attn", "q_proj", "k_proj"))


def test_a_child_and_the_site_itself_conflict():
    with pytest.raises(PlanConflictError, match="one and two"):
        plan_with(claiming("one", "attn", "q_proj"), claiming("two", "attn.q_proj", ""))
    plan_with(claiming("one", "attn", "q_proj"), claiming("two", "attn", "k_proj"), claiming("one", "other", "q_proj"))


def test_names_of_fusers_are_unique_and_linear_comes_last():
    names = [fuser.name for fuser in FUSERS]
    assert len(set(names)) == len(names)
    assert names[-1] == "linear", "it takes every linear that is left"


def test_planning_changes_nothing():
    meta = llama()
    before = [(name, type(module)) for name, module in meta.model.named_modules()]
    state = {name: (tensor.shape, tensor.device) for name, tensor in meta.model.state_dict().items()}
    make_plan(meta, ServingSpec())
    assert [(name, type(module)) for name, module in meta.model.named_modules()] == before
    assert {name: (tensor.shape, tensor.device) for name, tensor in meta.model.state_dict().items()} == state


def test_plan_is_the_same_each_time():
    assert make_plan(llama(), ServingSpec()) == make_plan(llama(), ServingSpec())


def test_every_linear_of_the_base_model_is_accounted_for():
    """Replaced itself, merged into another, or named in a Miss."""
    for model_type in ("llama", "phi", "olmo2", "gpt_neox", "cohere"):
        fields = {
            key: value for key, value in SIZES.items() if (model_type, key) != ("gpt_neox", "num_key_value_heads")
        }
        meta = build(CONFIG_MAPPING[model_type](**fields), torch.float32)
        plan, _ = draft_plan(meta, ServingSpec())
        gone = {f"{r.qualname}.{child}" for r in plan.rewrites for child in r.removes}
        replaced = {r.qualname for r in plan.rewrites if r.layer is not None}
        linears = {name for name, module in meta.base.named_modules() if isinstance(module, nn.Linear)}
        assert linears == (gone | replaced) & linears
        assert not gone & replaced


def test_summary_counts():
    plan = plan_with(claiming("qkv", "a"), claiming("qkv", "b"), claiming("glu", "c"), misses=(Miss("x", "d", "no"),))
    assert plan.summary == "1 glu, 2 qkv; 1 missed"
    assert plan_with().summary.endswith("none missed")
    assert str(Miss("glu", "layers.0.mlp", "no", "file.py:3")) == "layers.0.mlp: glu: no (file.py:3)"


def test_layers_are_found():
    assert make_plan(llama(num_hidden_layers=3), ServingSpec()).layers == "layers"


def test_forwards_hold_the_text_that_apply_writes():
    plan = make_plan(llama(), ServingSpec())
    assert set(plan.forwards) == {r.qualname for r in plan.rewrites if r.edits}
    text = plan.forwards["layers.1.mlp"]
    assert "self.act_and_mul(self.gate_up_proj(x))" in text
    assert "self.gate_proj" not in text


def test_plan_is_of_the_whole_model_whatever_the_stages():
    whole, stages = make_plan(llama(), ServingSpec()), make_plan(llama(), ServingSpec(pp_size=2))
    assert [r.qualname for r in whole.rewrites] == [r.qualname for r in stages.rewrites]


@pytest.mark.parametrize("tp_size", [2, 4])
def test_every_layout_of_ranks_fits_together(tp_size):
    """What a rank gets from a colwise layer, and only that, goes into a rowwise one."""
    plan = make_plan(llama(num_attention_heads=8, num_key_value_heads=4, head_dim=8), ServingSpec(tp_size=tp_size))
    styles = {r.qualname: r.layer.style for r in plan.rewrites if r.fuser == "linear"}
    for layer in range(2):
        assert styles.pop(f"layers.{layer}.self_attn.o_proj") == "rowwise"
        assert styles.pop(f"layers.{layer}.mlp.down_proj") == "rowwise"
    assert set(styles.values()) <= {"replicated"}
    for path, spec in plan.attention:
        (qkv,) = [s for r in plan.by_site[path] for _, s in r.children if isinstance(s, QKVSpec)]
        assert (qkv.num_heads, qkv.num_kv_heads, qkv.head_dim) == (spec.num_heads, spec.num_kv_heads, spec.head_dim)


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"4 query heads, 3 ranks.*--tensor-parallel-size"):
        make_plan(llama(), ServingSpec(tp_size=3))


def test_heads_that_cannot_be_shared_out_are_gathered():
    """Nothing that the ranks merge, and so give in parts, may feed attention that is given the heads of all ranks."""
    config = CONFIG_MAPPING["cohere"](**SIZES, use_qk_norm=True)
    plan = make_plan(build(config, torch.float32), ServingSpec(tp_size=2))
    assert {spec.gathered for _, spec in plan.attention} == {True}
    inside = [r for r in plan.rewrites if ".self_attn." in r.qualname and r.fuser == "linear"]
    found = {r.qualname.rpartition(".")[2]: r.layer.style for r in inside}
    assert {found[name] for name in ("q_proj", "k_proj", "v_proj")} == {"colwise_gather_output"}
    assert found["o_proj"] == "rowwise_split_input"
    assert any("attention here needs the heads of all ranks" in str(miss) for miss in plan.misses)
    one = make_plan(build(config, torch.float32), ServingSpec())
    assert {spec.gathered for _, spec in one.attention} == {False}


def test_attention_that_would_lose_something_stops_the_plan():
    from tfbackend.inline import Inlined
    from tfbackend.plan_refusals import attention_refusals

    decision = decide(lambda: WithKeywords(position_bias=1))
    plan = plan_with(*decision.rewrites, misses=tuple(decision.misses))
    (refusal,) = attention_refusals(plan, decision.observation, ServingSpec(), Inlined())
    assert "the keyword position_bias would be dropped" in str(refusal)
    assert "site" in str(refusal)


def test_bidirectional_models_are_refused_by_name():
    bert = build(CONFIG_MAPPING["roberta"](**SIZES), torch.float32)
    _, refusals = draft_plan(bert, ServingSpec())
    assert any("a token sees those after it" in str(refusal) for refusal in refusals)


def test_windows_and_scales_per_layer():
    kinds = ["sliding_attention", "full_attention"]
    config = CONFIG_MAPPING["gemma2"](
        **SIZES, head_dim=16, layer_types=kinds, sliding_window=9, query_pre_attn_scalar=25, attn_logit_softcapping=2.0
    )
    plan = make_plan(build(config, torch.float32), ServingSpec())
    # gemma2 scales by query_pre_attn_scalar ** -0.5, and caps the scores of every layer
    assert dict(plan.attention) == {
        "layers.0.self_attn": AttentionSpec(4, 2, 16, 16, 0.2, window=9, soft_cap=2.0),
        "layers.1.self_attn": AttentionSpec(4, 2, 16, 16, 0.2, window=None, soft_cap=2.0),
    }


def test_styles_come_from_the_models_own_plan():
    base = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.LayerNorm(2))
    base._tp_plan = {"0": "colwise", "1.*": "rowwise_rep", "2": "colwise"}
    base.config = SimpleNamespace(base_model_tp_plan={"model.0": "something_new"})
    meta = SimpleNamespace(base=base, base_path="model")
    assert tensor_parallel_styles(meta) == {"0": "replicated", "1.0": "rowwise_split_input"}


def test_sites_of_one_class_are_planned_each_by_its_own_numbers():
    plan = decide(Attention, lambda: Attention((True, True, True)), lambda: GLU(act="gelu"), GLU)
    assert not dict(plan.rewrite("qkv", "site").children)["qkv_proj"].bias
    assert dict(plan.rewrite("qkv", "others.0").children)["qkv_proj"].bias
    assert dict(plan.rewrite("glu", "others.1").children)["act_and_mul"].activation == "gelu"
    assert dict(plan.rewrite("glu", "others.2").children)["act_and_mul"].activation == "silu"


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gemma2", "cohere"])
def test_the_engines_default_device_and_dtype_change_nothing(model_type):
    """An engine builds models inside torch.device("cuda") and with its dtype as torch's default."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIG_MAPPING[model_type](**sizes, num_key_value_heads=2, vocab_size=128, **ids)
    plain = make_plan(build(config, torch.bfloat16), ServingSpec(dtype=torch.bfloat16))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            built = build(config, torch.bfloat16)
            engines = make_plan(built, ServingSpec(dtype=torch.bfloat16))
    finally:
        torch.set_default_dtype(before)
    assert engines.rewrites == plain.rewrites
    assert engines.forwards == plain.forwards
    assert not engines.unproven
    assert not any(buffer.is_meta for buffer in built.model.buffers())
