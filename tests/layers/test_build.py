"""Every live layer computes what its spec says, and every field of a spec has a say."""

import dataclasses

import pytest
import torch
from torch import nn

from tests.layers.variants import INVISIBLE, TABLE, close, context, inputs, live, others, ready, reference
from tfbackend.expertspec import ExpertsSpec
from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.layers.build import _BUILDERS, build_layer, local_sizes, own_slopes
from tfbackend.layerspecs import (
    ActMulSpec,
    AllKeysSpec,
    AttentionSpec,
    EmbeddingSpec,
    IdleSpec,
    LinearSpec,
    MergedLinearSpec,
    NormSpec,
    QKVSpec,
    RotarySpec,
)
from tfbackend.loopedspec import DenseExpertsSpec, LoopedExpertsSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.moespec import MoESpec
from tfbackend.nativespec import NATIVE_SPECS
from tfbackend.statespec import StateSpec

OTHERS = [(spec, name, other) for spec, fields in TABLE for name, other in others(spec, fields)]
VISIBLE = [case for case in OTHERS if (type(case[0]), case[1]) not in INVISIBLE]
SPECS = list(dict.fromkeys([spec for spec, _ in TABLE] + [other for _, _, other in OTHERS]))

# Rotary layers, experts, whole blocks of them and biased keys have files of their own, and what is left of picking keys
# computes nothing; all attention else, and what keeps state, runs in an engine, see tests/serve.
ELSEWHERE = {RotarySpec, AttentionSpec, MLASpec, AllKeysSpec, IdleSpec, StateSpec}
ELSEWHERE |= {ExpertsSpec, MoESpec, DenseExpertsSpec, LoopedExpertsSpec, GroupedLinearSpec, *NATIVE_SPECS}


def test_every_builder_and_every_field_is_in_the_table():
    assert {type(spec) for spec, _ in TABLE} == set(_BUILDERS) - ELSEWHERE
    for spec_class in {type(spec) for spec, _ in TABLE}:
        named = {name for spec, fields in TABLE if type(spec) is spec_class for name in fields}
        assert named == {field.name for field in dataclasses.fields(spec_class)}, spec_class


@pytest.mark.parametrize(("spec", "name", "other"), VISIBLE, ids=str)
def test_every_field_shows(spec, name, other):
    """In what the reference computes, or in its shape: or the tests below could not see it ignored."""
    one, two = (reference(s)(inputs(s, torch.float32)) for s in (spec, other))
    seen = inputs(spec, torch.float32).shape != inputs(other, torch.float32).shape or one.shape != two.shape
    assert seen or (one - two).abs().max() > 0.1


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_its_reference(spec, dtype):
    layer, x = live(spec, dtype), inputs(spec, dtype)
    wanted = reference(spec, layer)(x if isinstance(spec, EmbeddingSpec) else x.float())
    got = ready(layer)(x)
    assert got.dtype == dtype
    close(got, wanted)


@pytest.mark.parametrize("spec", [s for s in SPECS if isinstance(s, NormSpec)], ids=str)
def test_norms_take_heads_and_strided_inputs_and_leave_them_alone(spec, dtype):
    """Norms of queries and keys see [1, tokens, heads, dim], cut out of a wider tensor."""
    layer = live(spec, dtype)
    reference_layer = reference(spec, layer)
    wide = torch.randn(1, 3, 2 * spec.size * 2, dtype=torch.float32).to(dtype)
    heads = wide[..., spec.size :][..., : 2 * spec.size].unflatten(-1, (2, spec.size))
    before = wide.clone()
    close(layer(heads), reference_layer(heads.float()))
    turned = heads.transpose(1, 2)
    close(layer(turned), reference_layer(turned.float()))
    assert torch.equal(wide, before)


def test_a_field_that_cannot_be_served_is_not_ignored():
    with pytest.raises(AssertionError):
        build_layer(NormSpec("rms", 8, 0.1, "plain", True), "x", context(torch.float32), nn.Module())
    with pytest.raises(AssertionError):
        build_layer(MergedLinearSpec(8, (8, 8), True, "rowwise"), "x", context(torch.float32), nn.Module())
    with pytest.raises(KeyError):
        build_layer(ActMulSpec("relu"), "x", context(torch.float32), nn.Module())


@pytest.mark.parametrize(
    ("style", "cls", "more"),
    [
        ("colwise", "ColumnParallelLinear", {"gather_output": False}),
        ("colwise_gather_output", "ColumnParallelLinear", {"gather_output": True}),
        ("rowwise", "RowParallelLinear", {"input_is_parallel": True, "reduce_results": True}),
        ("rowwise_split_input", "RowParallelLinear", {"input_is_parallel": False, "reduce_results": True}),
        ("replicated", "ReplicatedLinear", {}),
    ],
)
def test_styles_are_told_apart_by_class(style, cls, more):
    layer = live(LinearSpec(8, 8, False, style), torch.float32)
    assert type(layer).__name__ == cls
    assert {name: getattr(layer, name) for name in more} == more


@pytest.mark.parametrize(
    "spec",
    [MergedLinearSpec(32, (48, 16, 8), True), QKVSpec(32, 16, 32, 4, 2, True), QKVSpec(32, 32, 16, 4, 1, False)],
    ids=str,
)
def test_parts_come_out_where_they_were_loaded(spec, dtype):
    """Each part is loaded as a shard of its own, and found again by the sizes that a forward splits at."""
    layer = live(spec, dtype)
    shards = ("q", "k", "v") if isinstance(spec, QKVSpec) else range(len(spec.out_features))
    sizes = local_sizes(spec, 1)
    x, wanted = inputs(spec, dtype), []
    for shard, size in zip(shards, sizes, strict=True):
        weight = (torch.randn(size, 32, dtype=torch.float32) * 0.2).to(dtype)
        layer.weight.weight_loader(layer.weight, weight, shard)
        part = x.float() @ weight.float().T
        if spec.bias:
            bias = torch.randn(size, dtype=torch.float32).to(dtype)
            layer.bias.weight_loader(layer.bias, bias, shard)
            part = part + bias.float()
        wanted.append(part)
    for got, part in zip(ready(layer)(x).split(sizes, dim=-1), wanted, strict=True):
        close(got, part)


@pytest.mark.parametrize(
    ("spec", "ranks", "sizes"),
    [
        (MergedLinearSpec(32, (48, 16), True), 2, (24, 8)),
        (QKVSpec(32, 16, 32, 8, 4, True), 2, (64, 32, 64)),
        (QKVSpec(32, 16, 32, 8, 2, True), 4, (32, 16, 32)),
    ],
    ids=str,
)
def test_sizes_on_one_of_several_ranks(spec, ranks, sizes):
    assert local_sizes(spec, ranks) == sizes


@pytest.mark.parametrize(
    ("rank", "ranks", "wanted"), [(0, 1, [4.0, 3.0, 2.0, 1.0]), (0, 2, [4.0, 3.0]), (1, 2, [2.0, 1.0])]
)
def test_slopes_of_the_heads_of_a_rank(monkeypatch, rank, ranks, wanted):
    monkeypatch.setattr("tfbackend.layers.build.get_tensor_model_parallel_rank", lambda: rank)
    assert own_slopes((4.0, 3.0, 2.0, 1.0), ranks) == wanted


COMPILED = [
    NormSpec("rms", 48, 1.0),
    NormSpec("rms", 48, 1.0, "zero_centred"),
    NormSpec("layer", 48, 0.1, "zero_centred", True),
    ActMulSpec("gelu_tanh"),
    EmbeddingSpec(100, 32, 5.5),
    QKVSpec(32, 16, 16, 4, 2, True),
]


@torch.no_grad()
@pytest.mark.parametrize("spec", COMPILED, ids=str)
def test_compiled_in_one_graph(spec, dtype):
    layer, x = live(spec, dtype), inputs(spec, dtype)
    wanted = reference(spec, layer)(x if isinstance(spec, EmbeddingSpec) else x.float())
    torch._dynamo.reset()
    close(torch.compile(ready(layer), fullgraph=True, backend="aot_eager")(x), wanted)


@torch.no_grad()
def test_compiled_by_inductor():
    """A chain of the kinds that have code of their own, in one compilation."""
    specs = [NormSpec("rms", 64, 0.1), ActMulSpec("silu"), NormSpec("layer", 32, 0.1, "zero_centred", True)]
    layers = [live(spec, torch.float32) for spec in specs]
    wanted = x = inputs(specs[0], torch.float32)
    for spec, layer in zip(specs, layers, strict=True):
        wanted = reference(spec, layer)(wanted)
    torch._dynamo.reset()
    close(torch.compile(nn.Sequential(*layers), fullgraph=True)(x), wanted)
