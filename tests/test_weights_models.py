"""Weight maps of real architectures, held against what Transformers itself loads."""

from dataclasses import dataclass, field

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tfbackend.fusers.base import Rewrite, WeightEntry
from tfbackend.weights import Dropped, Gathered, Placement, Unexpected, build_weight_map

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@dataclass(frozen=True)
class Plan:
    """What a weight map reads of a plan."""

    rewrites: tuple[Rewrite, ...] = ()
    base_path: str = "model"
    head_path: str | None = "lm_head"
    tied: bool = False
    embedding_path: str = "model.embed_tokens"


def rewrite(site: str, *entries: tuple[str, str, str | int | None]) -> Rewrite:
    return Rewrite(site, "test", "", weights=tuple(WeightEntry(*entry) for entry in entries))


def qkv(site: str) -> Rewrite:
    return rewrite(site, *((f"{part}_proj", "qkv_proj", part) for part in "qkv"))


def glu(site: str) -> Rewrite:
    return rewrite(site, ("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1))


def fused(layers: str = "layers", attention: str = "self_attn") -> tuple[Rewrite, ...]:
    return tuple(r for i in range(2) for r in (qkv(f"{layers}.{i}.{attention}"), glu(f"{layers}.{i}.mlp")))


def config_of(model_type: str, **fields):
    return AutoConfig.for_model(model_type, **fields)


def on_meta(model_type: str, **fields):
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config_of(model_type, **fields))


def llama(**fields):
    return on_meta("llama", **SMALL, **fields)


def tensors_of(model, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random tensor for each distinct parameter of the model."""
    generator = torch.Generator().manual_seed(seed)
    tied = getattr(model, "all_tied_weights_keys", {})
    return {
        name: torch.randn(state.shape, generator=generator)
        for name, state in model.state_dict().items()
        if name not in tied
    }


@dataclass(frozen=True)
class Case:
    model_type: str
    plan: Plan
    fields: dict = field(default_factory=lambda: dict(SMALL))
    old_name: str = ""
    place: str = ""

    def __str__(self) -> str:
        return self.model_type


MIXTRAL = {**SMALL, "num_local_experts": 4}
CASES = [
    Case(
        "llama",
        Plan(fused()),
        old_name="layers.1.self_attn.k_proj.weight",
        place="model.layers.1.self_attn.qkv_proj.weight (shard k)",
    ),
    Case(
        "gpt_neox",
        Plan(base_path="gpt_neox", embedding_path="gpt_neox.embed_in"),
        old_name="embed_out.weight",
        place="lm_head.weight",
    ),
    Case(
        "opt",
        Plan(
            tuple(qkv(f"decoder.layers.{i}.self_attn") for i in range(2)),
            tied=True,
            embedding_path="model.decoder.embed_tokens",
        ),
        {**SMALL, "word_embed_proj_dim": 32},
        "decoder.layers.0.self_attn.v_proj.bias",
        "model.decoder.layers.0.self_attn.qkv_proj.bias (shard v)",
    ),
    Case(
        "biogpt",
        Plan(base_path="biogpt", head_path="output_projection", tied=True, embedding_path="biogpt.embed_tokens"),
        old_name="biogpt.layers.0.fc1.bias",
        place="model.layers.0.fc1.bias",
    ),
    Case(
        "gpt_bigcode",
        Plan(
            (rewrite("h.0.attn", ("c_attn", "qkv", None)),), "transformer", tied=True, embedding_path="transformer.wte"
        ),
        GPT,
        "h.0.attn.c_attn.bias",
        "model.h.0.attn.qkv.bias",
    ),
    Case(
        "mixtral",
        Plan(tuple(qkv(f"layers.{i}.self_attn") for i in range(2))),
        MIXTRAL,
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.0.mlp.gate.weight",
    ),
    Case(
        "phi3",
        Plan(tuple(rewrite(f"layers.{i}.self_attn", ("qkv_proj", "qkv_proj", None)) for i in range(2))),
        old_name="model.layers.1.self_attn.qkv_proj.weight",
        place="model.layers.1.self_attn.qkv_proj.weight",
    ),
    Case(
        "gpt2",
        Plan(base_path="transformer", tied=True, embedding_path="transformer.wte"),
        GPT,
        "wte.weight",
        "model.wte.weight",
    ),
    Case(
        "qwen3_moe",
        Plan(fused()[::2]),
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate.weight",
    ),
]


def load(weight_map, tensors):
    """Stream a checkpoint as layers.loading does, and hold the result by place."""
    ledger = weight_map.new_ledger()
    placed = {}
    for placement, tensor in weight_map.stream(tensors, ledger):
        assert ledger.claim(placement), placement
        placed[placement.target, placement.shard] = (placement, tensor)
    return placed, ledger


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_checkpoint_of_transformers_lands_as_transformers_loads_it(case, tmp_path):
    torch.manual_seed(0)
    config = config_of(case.model_type, **case.fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    weight_map = build_weight_map(on_meta(case.model_type, **case.fields), case.plan)

    placed, ledger = load(weight_map, reversed(load_file(tmp_path / "model.safetensors").items()))

    ledger.check({target: () for target, shard in placed if shard is None})
    tied = {f"{case.plan.head_path}.weight"} if case.plan.tied else set()
    assert {placement.canonical for placement, _ in placed.values()} == wanted.keys() - tied
    for placement, tensor in placed.values():
        torch.testing.assert_close(tensor, wanted[placement.canonical], rtol=0, atol=0)
    assert {target for target, _ in placed} == weight_map.targets


@pytest.mark.parametrize("case", CASES, ids=str)
def test_old_name_has_the_same_place(case):
    placement = build_weight_map(on_meta(case.model_type, **case.fields), case.plan).resolve(case.old_name)
    assert str(placement) == case.place


@pytest.mark.parametrize("case", CASES, ids=str)
def test_base_model_alone_has_the_same_places(case):
    model = on_meta(case.model_type, **case.fields)
    weight_map = build_weight_map(model, case.plan)
    base = model.get_submodule(case.plan.base_path)
    for name in base.state_dict():
        inside = weight_map.resolve(f"{case.plan.base_path}.{name}")
        alone = weight_map.resolve(name)
        assert (alone.target, alone.shard) == (inside.target, inside.shard)


def test_experts_saved_one_by_one_become_the_stacked_parameter():
    model = on_meta("mixtral", **MIXTRAL)
    weight_map = build_weight_map(model, Plan())
    gathered = weight_map.resolve("model.layers.0.block_sparse_moe.experts.3.w1.weight")
    assert isinstance(gathered, Gathered)
    assert gathered.converter.part == (".experts.*.w1.weight", "3")
    experts = {
        f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight": torch.full((96, 64), 10.0 * e + i)
        for e in range(4)
        for i, w in enumerate(("w1", "w3"))
    }
    ledger = weight_map.new_ledger()
    [(placement, stacked)] = weight_map.stream(reversed(experts.items()), ledger)
    assert placement.target == "model.layers.0.mlp.experts.gate_up_proj"
    assert set(placement.origins) == set(experts)
    assert stacked[:, 0, 0].tolist() == [0, 10, 20, 30]
    assert stacked[:, 96, 0].tolist() == [1, 11, 21, 31]


def test_stacked_experts_pass_as_they_are():
    placement = build_weight_map(on_meta("mixtral", **MIXTRAL), Plan()).resolve("model.layers.0.mlp.experts.down_proj")
    assert isinstance(placement, Placement)


def test_module_of_the_head_class_outside_base_and_head_keeps_its_path():
    model = on_meta("opt", **SMALL)
    model.extra = torch.nn.LayerNorm(64, device="meta")
    weight_map = build_weight_map(model, Plan(embedding_path="model.decoder.embed_tokens"))
    assert str(weight_map.resolve("extra.weight")) == "head.extra.weight"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gpt_neox.layers.0.attention.bias", "ignored-by-class"),
        ("gpt_neox.layers.1.attention.masked_bias", "ignored-by-class"),
        ("gpt_neox.layers.0.attention.rotary_emb.inv_freq", "legacy-buffer"),
        ("gpt_neox.rotary_emb.inv_freq", "recomputed-buffer"),
    ],
)
def test_buffers_of_old_gpt_neox(name, rule):
    weight_map = build_weight_map(on_meta("gpt_neox", **SMALL), CASES[1].plan)
    outcome = weight_map.resolve(name)
    assert isinstance(outcome, Dropped)
    assert outcome.rule == rule


def test_class_that_names_the_layers_it_ignores():
    fields = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
    model = on_meta("qwen3_moe", **fields)
    name = "model.layers.61.mlp.gate.weight"
    assert isinstance(build_weight_map(model, Plan()).resolve(name), Unexpected)
    model._keys_to_ignore_on_load_unexpected = {r"model\.layers\.61.*"}
    assert build_weight_map(model, Plan()).resolve(name).rule == "ignored-by-class"


def test_blocks_that_are_repeated_share_places():
    """Zamba2 repeats one block of attention. Merged projections are shared as a whole; the head is not spoken of."""
    config = AutoConfig.for_model(
        "zamba2", **SMALL | {"num_hidden_layers": 4}, layers_block_type=["linear_attention", "hybrid"] * 2
    )
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    blocks = [f"layers.{number}.shared_transformer.self_attn" for number in (1, 3)]
    plan = Plan(tuple(map(qkv, blocks)), tied=True)
    shared = dict(build_weight_map(model, plan).shared)
    assert shared["model.layers.3.shared_transformer.self_attn.qkv_proj.weight"] == (
        "model.layers.1.shared_transformer.self_attn.qkv_proj.weight"
    )
    first, second = (dict(model.model.layers[number].shared_transformer.named_parameters()) for number in (1, 3))
    assert len(shared) == len(second) - 2, "three projections are one place"
    assert first.keys() >= second.keys()
    assert not any("lm_head" in place or "embed" in place for place in shared)
    one_is_left = Plan((qkv(blocks[0]),), tied=True)
    assert "model.layers.3.shared_transformer.self_attn.q_proj.weight" not in dict(
        build_weight_map(model, one_is_left).shared
    )
