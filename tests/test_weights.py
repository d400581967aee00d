"""Rules of the weight map: names, drops, ties, quantized tensors; a near miss for every hit."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_weights_models import MIXTRAL, Plan, fused, glu, llama, load, on_meta, qkv, rewrite, tensors_of
from tfbackend.errors import PlanConflictError, UnexpectedTensorError
from tfbackend.weights import RULES, Dropped, Gathered, Placement, Unexpected, build_weight_map

Q = "model.layers.0.self_attn.q_proj.weight"
Q_PLACE = ("model.layers.0.self_attn.qkv_proj.weight", "q")
TIED = Plan(fused(), tied=True)


@pytest.fixture(scope="module")
def plain():
    return build_weight_map(llama(), Plan(fused()))


@pytest.fixture(scope="module")
def quantized():
    return build_weight_map(llama(), Plan(fused()), quantized=True)


@pytest.fixture(scope="module")
def tied():
    return build_weight_map(llama(tie_word_embeddings=True), TIED)


# ---- names ----


@pytest.mark.parametrize(
    "name",
    [
        Q,
        "layers.0.self_attn.q_proj.weight",
        "model." + Q,
        "transformer.layers.0.self_attn.q_proj.weight",
        "language_model." + Q,
        "model.language_model.layers.0.self_attn.q_proj.weight",
        "_orig_mod." + Q,
        "model.layers.0._orig_mod.self_attn.q_proj.weight",
        "module." + Q,
        "module.module." + Q,
        "base_model.model." + Q,
        "base_model.model.layers.0.self_attn.q_proj.weight",
        "module._orig_mod.base_model.model." + Q,
        "_orig_mod.module." + Q,
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn.q_proj.weight",
    ],
)
def test_spellings_of_one_tensor(plain, name):
    outcome = plain.resolve(name)
    assert (outcome.target, outcome.shard, outcome.source_name) == (*Q_PLACE, name)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.lm_head.weight", "embed_out.weight", "module.output_projection.weight"]
)
def test_spellings_of_the_head(plain, name):
    assert str(plain.resolve(name)) == "lm_head.weight"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "weight",
        "somewhere." + Q,
        "model.layers.0.self_attn.q_proj.weight2",
        "xmodel.layers.0.self_attn.q_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.00.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model_orig_mod.layers.0.self_attn.q_proj.weight",
        "decoder.lm_head2.weight",
        "vision.lm_head.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_near_misses_are_unexpected(plain, name):
    assert isinstance(plain.resolve(name), Unexpected)


def test_unexpected_names_what_looks_like_it(plain):
    assert Q in plain.resolve("model.layers.0.self_attn.q_prj.weight").nearest


def test_component_that_only_looks_like_a_training_prefix_wins():
    model = llama()
    model.module = torch.nn.Linear(2, 2, device="meta")
    weight_map = build_weight_map(model, Plan())
    assert str(weight_map.resolve("module.weight")) == "head.module.weight"
    assert str(weight_map.resolve("module.module.weight")) == "head.module.weight"


def test_base_model_with_a_name_of_its_own():
    model = llama()
    model.trunk = model.model
    del model.model
    weight_map = build_weight_map(model, Plan(fused(), "trunk", embedding_path="trunk.embed_tokens"))
    for name in ("trunk.layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight", Q):
        assert (weight_map.resolve(name).target, weight_map.resolve(name).shard) == Q_PLACE


def test_model_that_is_its_own_base():
    model = llama().model
    weight_map = build_weight_map(model, Plan(fused(), "", None, embedding_path="embed_tokens"))
    for name in (Q, Q.removeprefix("model.")):
        assert (weight_map.resolve(name).target, weight_map.resolve(name).shard) == Q_PLACE
    assert weight_map.resolve("lm_head.weight").rule == "headless"
    assert isinstance(weight_map.resolve("score.weight"), Unexpected)


def test_rewrites_that_disagree_raise():
    with pytest.raises(PlanConflictError, match="disagree"):
        build_weight_map(llama(), Plan((qkv("layers.0.self_attn"), rewrite("layers.0.self_attn", ("q_proj", "q", 0)))))
    both = rewrite("layers.0.self_attn", ("q_proj", "qk", 0), ("k_proj", "qk", 0))
    with pytest.raises(PlanConflictError, match="k_proj"):
        build_weight_map(llama(), Plan((both,)))


def test_the_model_may_change_after_the_map_is_built():
    model = llama()
    weight_map = build_weight_map(model, Plan(fused()))
    del model.model.layers
    assert weight_map.resolve(Q).shard == "q"
    assert weight_map.expected(Q).shape == (64, 64)


# ---- properties ----


ALL = llama(attention_bias=True)
ALL_MAP = build_weight_map(ALL, Plan(fused()))
WRAPS = st.lists(st.sampled_from(["_orig_mod.", "module.", "base_model.model."]), max_size=3).map("".join)
BASES = st.sampled_from(["", "model.", "transformer.", "language_model."])


def respelled(name: str, wraps: str, base: str, inside: int) -> str:
    if name.startswith("model."):
        name = base + name.removeprefix("model.")
    parts = name.split(".")
    parts.insert(inside % len(parts), "_orig_mod")
    return wraps + (".".join(parts) if inside else name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(st.sampled_from(sorted(ALL.state_dict()))), WRAPS, BASES, st.integers(0, 5))
def test_a_respelled_checkpoint_resolves_injectively(names, wraps, base, inside):
    outcomes = {name: ALL_MAP.resolve(respelled(name, wraps, base, inside)) for name in names}
    assert all(isinstance(outcome, Placement) for outcome in outcomes.values())
    assert len({(o.target, o.shard) for o in outcomes.values()}) == len(names)
    assert all(outcome.canonical == name for name, outcome in outcomes.items())


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="._abmodelyrs0159weight*\\^$()", max_size=30) | st.text(max_size=12))
def test_resolve_is_total(name):
    assert isinstance(ALL_MAP.resolve(name), (Placement, Gathered, Dropped, Unexpected))


# ---- drops ----


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model.rotary_emb.inv_freq", "recomputed-buffer"),
        ("module.rotary_emb.inv_freq", "recomputed-buffer"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "legacy-buffer"),
        ("layers.1.self_attn.rotary_emb.cos_cached", "legacy-buffer"),
    ],
)
def test_rotary_tables_are_dropped(plain, name, rule):
    outcome = plain.resolve(name)
    assert outcome.rule == rule
    assert outcome.why == RULES[rule]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freqs",
        "model.layers.0.position_ids",
        "model.layers.0.attn.bias",
        "model.layers.0.self_attn.bias",
    ],
)
def test_near_misses_of_the_drop_rules(plain, name):
    assert isinstance(plain.resolve(name), Unexpected)


def test_causal_masks_are_dropped_and_real_biases_are_not():
    plan = Plan((), "transformer", tied=True, embedding_path="transformer.wte")
    weight_map = build_weight_map(
        on_meta("gpt_bigcode", n_embd=64, n_layer=1, n_head=2, vocab_size=9, bos_token_id=1, eos_token_id=2), plan
    )
    assert weight_map.resolve("transformer.bias").rule == "recomputed-buffer"
    name = "transformer.h.0.attn.bias"
    ledger = weight_map.new_ledger()
    assert not list(weight_map.stream([(name, torch.ones(1, 1, 8, 8, dtype=torch.uint8))], ledger))
    assert "legacy-buffer: transformer.h.0.attn.bias" in ledger.summary()
    with pytest.raises(UnexpectedTensorError, match=name):
        list(weight_map.stream([(name, torch.ones(64))]))


def test_class_lists_are_asked_only_where_nothing_takes_the_tensor():
    model = llama()
    model._keys_to_ignore_on_load_unexpected = {r"^mtp\.", "q_proj"}
    weight_map = build_weight_map(model, Plan(fused()))
    assert weight_map.resolve("mtp.layers.0.weight").rule == "ignored-by-class"
    assert weight_map.resolve("module.mtp.layers.0.weight").rule == "ignored-by-class"
    assert weight_map.resolve(Q).shard == "q"
    assert isinstance(weight_map.resolve("model.mtp.weight"), Unexpected)


def test_another_stage_has_its_tensors(plain):
    ledger = plain.new_ledger()
    present = lambda place: ".layers.1." not in place  # noqa: E731
    placed = list(plain.stream(tensors_of(llama()).items(), ledger, present=present))
    assert not [p for p, _ in placed if ".layers.1." in p.target]
    assert len(ledger.as_dict()["dropped"]["other-stage"]["tensors"]) == 9


def test_another_stage_keeps_no_experts():
    weight_map = build_weight_map(on_meta("mixtral", **MIXTRAL), Plan())
    ledger = weight_map.new_ledger()
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert not list(weight_map.stream([(name, torch.ones(96, 64))], ledger, present=lambda _: False))
    ledger.check({})


# ---- ties ----


def tied_checkpoint(*, head, embedding=None):
    return [
        (name, tensor)
        for name, tensor in (("lm_head.weight", head), ("model.embed_tokens.weight", embedding))
        if tensor is not None
    ]


TABLE = torch.arange(128 * 64.0).view(128, 64)


@pytest.mark.parametrize("turn", [list, reversed], ids=["head-first", "head-last"])
def test_equal_copy_of_a_tied_head_is_dropped(tied, turn):
    placed, ledger = load(tied, turn(tied_checkpoint(head=TABLE.clone(), embedding=TABLE)))
    assert list(placed) == [("model.embed_tokens.weight", None)]
    assert ledger.as_dict()["dropped"]["tied-copy"]["tensors"] == ["lm_head.weight"]


@pytest.mark.parametrize("turn", [list, reversed], ids=["head-first", "head-last"])
def test_tied_head_that_differs_unties_as_in_transformers(tied, turn):
    placed, ledger = load(tied, turn(tied_checkpoint(head=TABLE + 1, embedding=TABLE)))
    placement, tensor = placed["lm_head.weight", None]
    assert placement.unties
    assert torch.equal(tensor, TABLE + 1)
    assert torch.equal(placed["model.embed_tokens.weight", None][1], TABLE)
    assert not ledger.as_dict()["dropped"]


def test_tied_head_that_differs_is_left_to_the_stage_that_has_the_head(tied):
    ledger = tied.new_ledger()
    tensors = tied_checkpoint(head=TABLE + 1, embedding=TABLE)
    placed = [str(p) for p, _ in tied.stream(tensors, ledger, present=lambda place: place != "lm_head.weight")]
    assert placed == ["model.embed_tokens.weight"]
    assert ledger.as_dict()["dropped"]["other-stage"]["tensors"] == ["lm_head.weight"]


def test_tied_head_alone_fills_the_embedding(tied):
    placed, _ = load(tied, tied_checkpoint(head=TABLE))
    [((target, _), (placement, tensor))] = placed.items()
    assert (target, placement.source_name) == ("model.embed_tokens.weight", "lm_head.weight")
    assert not placement.unties
    assert tensor is TABLE


def test_embedding_alone_is_all_a_tied_model_needs(tied):
    placed, ledger = load(tied, tensors_of(llama(tie_word_embeddings=True)).items())
    ledger.check({target: () for target, shard in placed if shard is None})
    assert "lm_head.weight" not in tied.targets


def test_what_transformers_does_with_a_tied_head_that_differs(tmp_path):
    from safetensors.torch import save_file

    model = on_meta("llama", **SMALL_TIED).to_empty(device="cpu")
    tensors = tensors_of(model) | {"lm_head.weight": TABLE + 1}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, TABLE + 1)
    assert torch.equal(loaded.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


SMALL_TIED = {k: v for k, v in MIXTRAL.items() if k != "num_local_experts"} | {"tie_word_embeddings": True}


# ---- quantized checkpoints ----


@pytest.mark.parametrize(
    "leaf",
    [
        "weight_scale",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "weight_packed",
        "input_scale",
        "weight_scale_inv",
        "weight.absmax",
        "k_scale",
    ],
)
def test_quantized_tensors_follow_their_module(quantized, plain, leaf):
    name = f"layers.0.self_attn.q_proj.{leaf}"
    outcome = quantized.resolve(name)
    assert (outcome.target, outcome.shard) == (f"model.layers.0.self_attn.qkv_proj.{leaf}", "q")
    assert quantized.expected(outcome.canonical) is None
    assert isinstance(plain.resolve(name), Unexpected)


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.q_proj.qweight", "model.layers.0.self_attn.r_proj.scales"])
def test_quantized_tensors_without_their_module_are_unexpected(quantized, name):
    assert isinstance(quantized.resolve(name), Unexpected)


def test_quantized_checkpoints_have_old_buffers_too(quantized):
    assert quantized.resolve("model.layers.0.self_attn.rotary_emb.inv_freq").rule == "legacy-buffer"
    assert quantized.resolve("model.rotary_emb.inv_freq").rule == "recomputed-buffer"


def test_glu_entries_follow_biases():
    weight_map = build_weight_map(llama(mlp_bias=True), Plan((glu("layers.0.mlp"),)))
    assert (
        str(weight_map.resolve("model.layers.0.mlp.up_proj.bias")) == "model.layers.0.mlp.gate_up_proj.bias (shard 1)"
    )


def test_no_vllm_is_imported():
    code = "import sys; sys.modules['vllm'] = None; import tfbackend.weights"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
