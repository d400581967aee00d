"""Figures of famous models against what their publishers say, and against arithmetic on their configs."""

import pytest

from tests.inspection.conftest import inspected

# Elements that the model cards and the checkpoints' own indexes give (total_size / 2 for bf16). DeepSeek-V3's
# 671,026,419,200 counts 58 x 256 correction biases, which Transformers keeps as buffers; its module for predicting a
# second token is not in that number, nor in the model.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-4b": 4_022_468_096,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "mistral-7b-v0.1": 7_241_732_096,
    "phi-3-mini-4k": 3_821_079_552,
    "command-r-35b": 34_980_831_232,
    "gpt-neox-20b": 20_554_567_680,
    "smollm2-135m": 134_515_008,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    # 2 x 100352 x 4096 + 32 x (4 x 4096^2 + 3 x 4096 x 11008 + 4 x 4096) + 4096
    "olmo-2-7b": 7_298_617_344,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name):
    assert sum(p.count for p in inspected(name).parameters) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_dim"),
    [
        ("llama-3.1-8b", 32, 8, 128),
        ("llama-3.1-70b", 80, 8, 128),
        ("llama-3.1-405b", 126, 8, 128),
        ("qwen3-4b", 36, 8, 128),
        ("olmo-2-7b", 32, 32, 128),
        ("command-r-35b", 40, 64, 128),
        ("gpt-neox-20b", 44, 64, 96),
        ("smollm2-135m", 30, 3, 64),
        ("gemma-2-9b", 21, 8, 256),  # every second of 42 layers sees everything
        ("gemma-3-1b", 4, 1, 256),  # every sixth of 26
        ("mistral-7b-v0.1", 0, 8, 128),  # none does
    ],
)
def test_bytes_of_cache_a_token(name, layers, kv_heads, head_dim):
    assert inspected(name).memory.kv_bytes_per_token == layers * 2 * kv_heads * head_dim * 2


@pytest.mark.parametrize("tp", [1, 8])
def test_latents_are_cached_once_for_all_heads(tp):
    """DeepSeek-V3's 61 layers keep 512 numbers of the latent and 64 with positions, on every rank."""
    assert inspected("deepseek-v3", tp=tp).memory.kv_bytes_per_token == 61 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral-7b-v0.1", {4096: 32}),
        ("phi-3-mini-4k", {2047: 32}),
        ("gemma-2-9b", {4096: 21, None: 21}),
        ("gemma-3-1b", {512: 22, None: 4}),
        ("qwen3-4b", {None: 36}),
    ],
)
def test_windows(name, windows):
    found = {}
    for _, spec in inspected(name).plan.attention:
        found[spec.window] = found.get(spec.window, 0) + 1
    assert found == windows


def test_what_the_heads_do():
    assert inspected("gemma-2-9b").plan.head.soft_cap == 30.0
    assert inspected("command-r-35b").plan.head.scale == 0.0625
    assert {spec.soft_cap for _, spec in inspected("gemma-2-9b").plan.attention} == {50.0}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-4b", "gemma-2-9b", "gemma-3-1b", "mistral-7b-v0.1"])
@pytest.mark.parametrize("tp", [1, 2])
def test_models_that_serve(name, tp):
    found = inspected(name, tp=tp)
    assert found.status == 0, [*map(str, found.problems), *map(str, found.losses)]


@pytest.mark.parametrize(("name", "lost"), [("command-r-35b", "rope"), ("gpt-neox-20b", "packed_qkv")])
def test_models_that_serve_with_a_loss_name_it(name, lost):
    found = inspected(name)
    assert not found.problems
    assert all(lost in finding.what and finding.place for finding in found.losses)
    assert found.status == bool(found.losses)


def test_two_all_reduces_a_layer():
    found = inspected("llama-3.1-8b", tp=2)
    layers = [c.layer for c in found.collectives if c.kind == "all-reduce"]
    assert layers.count(None) == 1
    assert all(layers.count(layer) == 2 for layer in range(32))


def test_a_model_that_is_not_served_says_why_with_a_place():
    found = inspected("deepseek-v3", tp=8)
    assert found.problems
    told = [f for f in (*found.problems, *found.losses) if f.where and "whole on every rank:" not in f.what]
    assert told
    assert all("modeling_" in f"{finding.place} {finding}" for finding in told)
    assert all(str(finding) for finding in (*found.problems, *found.losses))


def test_kv_heads_are_replicated_where_there_are_more_ranks():
    """Llama 70B on 16 ranks: 64 / 16 = 4 query heads and one of 8 KV heads, each of them on two ranks."""
    found = inspected("llama-3.1-70b", tp=16)
    weight = next(p for p in found.parameters if p.name == "model.layers.0.self_attn.qkv_proj.weight")
    assert weight.replicas == 2
    assert weight.shape == ((64 + 2 * 8) * 128, 8192)
    assert weight.rank_shape == ((4 + 2) * 128, 8192)
    assert found.memory.kv_bytes_per_token == 80 * 2 * 128 * 2


def test_what_does_not_divide_is_named_with_a_remedy():
    found = inspected("smollm2-135m", tp=2)
    assert found.status == 2
    assert [finding.what for finding in found.problems] == ["9 query heads do not divide over 2 ranks"]
    assert found.problems[0].where == ("model.layers.0-29.self_attn.qkv_proj.weight",)
    assert "1, 3" in found.problems[0].remedy


def test_weights_of_a_rank_are_half_where_everything_is_shared_out():
    """Llama 8B on two ranks: all but the 65 norms of 4096 is shared out."""
    norms = 65 * 4096
    assert inspected("llama-3.1-8b", tp=2).memory.weights == 2 * ((8_030_261_248 - norms) // 2 + norms)


def test_memory_that_is_too_small_is_a_problem():
    found = inspected("llama-3.1-70b", gpu=80 * 10**9)
    assert found.status == 2
    assert found.memory.fit.longest == 0
    assert "leave no room" in found.problems[0].what


def test_the_longest_context_that_fits():
    """(80e9 x 0.92 - weights - 2e9) / 131072 bytes a token = 424,000; the model allows 131,072."""
    found = inspected("llama-3.1-8b", gpu=80 * 10**9)
    assert found.memory.fit.longest == 131_072
    assert found.memory.fit.requests == pytest.approx((80e9 * 0.92 - 2 * 8_030_261_248 - 2e9) / (131_072 * 131_072))
    small = inspected("llama-3.1-8b", gpu=24 * 10**9)
    room = int(24e9 * 0.92) - 2 * 8_030_261_248 - 2 * 10**9
    assert small.memory.fit.longest == room // (16 * 131_072) * 16


def test_pipeline_stages():
    found = inspected("llama-3.1-8b", pp=2)
    first, last = found.memory.stages
    assert (first.layers, last.layers) == (range(16), range(16, 32))
    assert last.weights - first.weights == 2 * 4096  # the norm; the table and the head are of one size
    if not found.served.supports("SupportsPP"):
        assert found.status == 2
        assert "pipeline" in found.problems[0].what


EXPERTS = ".routed_experts."


@pytest.mark.parametrize("ep", [False, True])
def test_experts_are_shared_out(ep):
    """128 experts in each of 94 layers, three matrices of 4096 x 1536 in each: an eighth on each rank."""
    found = inspected("qwen3-235b-a22b", tp=8, ep=ep)
    weights = {
        p.name.rpartition(".")[2]: p for p in found.parameters if ".layers.0.mlp." in p.name and EXPERTS in p.name
    }
    assert weights.keys() == {"w13_weight", "w2_weight"}
    into, out = (weights[name].rank_shape for name in ("w13_weight", "w2_weight"))
    assert (into, out) == (((16, 3072, 4096), (16, 4096, 1536)) if ep else ((128, 384, 4096), (128, 4096, 192)))
    experts = sum(p.rank_bytes for p in found.parameters if EXPERTS in p.name)
    assert experts == 94 * 128 * 3 * 4096 * 1536 * 2 // 8
    assert [c.layer for c in found.collectives if c.kind == "all-reduce"].count(5) == 2
