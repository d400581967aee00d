"""The rotary layer turns queries and keys as its spec says, wherever they lie in memory, and nothing else."""

import dataclasses
import operator
from itertools import product

import pytest
import torch

from tests.layers.variants import close, context
from tfbackend.layers.build import build_layer
from tfbackend.layers.rotary import Rotary, RotaryTables
from tfbackend.layerspecs import RotarySpec

HEADS, KV_HEADS, TOKENS, DIM = 4, 2, 6, 32
SPECS = [
    RotarySpec(DIM, dim, neox, False, half, copy)
    for dim, neox, half, copy in product((DIM, DIM // 4), (True, False), ("first", "even"), (False, True))
]


def as_projected(x, heads):
    """A view of [tokens, heads * dim], as linears leave it."""
    return x, x[:, : heads * DIM].unflatten(-1, (heads, DIM)).transpose(0, 1)[None]


def as_part_of_qkv(x, heads):
    """A part of a wider row."""
    return x, x[:, DIM : DIM + heads * DIM].unflatten(-1, (heads, DIM)).transpose(0, 1)[None]


def heads_first(x, heads):
    """[heads, tokens, dim] in memory, as normed queries may be."""
    whole = x[:, : heads * DIM].unflatten(-1, (heads, DIM)).transpose(0, 1).contiguous()
    return whole, whole[None]


def every_second(x, heads):
    """The last dimension is strided."""
    whole = x.repeat_interleave(2, -1)
    return whole, whole[:, ::2][:, : heads * DIM].unflatten(-1, (heads, DIM)).transpose(0, 1)[None]


LAYOUTS = [as_projected, as_part_of_qkv, heads_first, every_second]


def angles(spec, dtype, seed=0):
    """cos and sin [1, tokens, rotary_dim], folded as the spec says; no angle is 0."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.rand(TOKENS, spec.rotary_dim // 2, generator=generator, dtype=torch.float32) * 3 + 0.5
    whole = torch.cat((half, half), -1) if spec.half == "first" else half.repeat_interleave(2, -1)
    return whole.cos()[None].to(dtype), whole.sin()[None].to(dtype)


def random(heads, dtype, tokens=TOKENS):
    return torch.randn(tokens, (heads + 2) * DIM, dtype=torch.float32).to(dtype)


def build(spec, dtype):
    return build_layer(spec, "model.layers.0.self_attn.rotary", context(dtype), torch.nn.Module())


def wanted_of(spec, query, key, cos, sin):
    return spec.reference()(*(t.float() for t in (query, key, cos, sin)))


def test_every_field_is_varied():
    varied = {f.name for f in dataclasses.fields(RotarySpec) if len({getattr(s, f.name) for s in SPECS}) > 1}
    assert {f.name for f in dataclasses.fields(RotarySpec)} - varied == {"head_dim", "wide"}


def test_every_field_shows():
    base = RotarySpec(DIM, DIM)
    query, cos = torch.randn(1, HEADS, TOKENS, DIM), torch.rand(1, TOKENS, DIM)
    plain = base.reference()(query, query, cos, cos)[0]
    for name, value in {"rotary_dim": DIM // 4, "neox": False, "half": "even"}.items():
        other = dataclasses.replace(base, **{name: value})
        assert (other.reference()(query, query, cos, cos)[0] - plain).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.rotary_dim}-{s.neox}-{s.half}-{s.copy}")
def test_equals_its_reference(spec, layout, dtype):
    (query_home, query), (key_home, key) = (
        layout(random(HEADS, dtype), HEADS),
        layout(random(KV_HEADS, dtype), KV_HEADS),
    )
    query_before, key_before = query_home.clone(), key_home.clone()
    cos, sin = angles(spec, dtype)
    wanted = wanted_of(spec, query, key, cos, sin)
    got = build(spec, dtype)(query, key, cos, sin)
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == dtype
        close(one, other)
    if spec.copy:
        assert torch.equal(query_home, query_before)
        assert torch.equal(key_home, key_before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize(("heads", "tokens"), [(1, TOKENS), (HEADS, 1), (1, 1)])
def test_copies_even_where_a_view_would_count_as_dense(layout, heads, tokens):
    """A dimension of size 1 may have any stride: `contiguous()` then hands back the tensor itself."""
    spec = RotarySpec(DIM, DIM, copy=True)
    home, query = layout(random(heads, torch.float32, tokens), heads)
    before = home.clone()
    cos, sin = (t[:, :tokens] for t in angles(spec, torch.float32))
    wanted = wanted_of(spec, query, query, cos, sin)
    got = build(spec, torch.float32)(query, query, cos, sin)
    close(got[0], wanted[0])
    close(got[1], wanted[1])
    assert torch.equal(home, before)


def test_layers_of_one_model_share_tables_but_not_those_of_other_angles():
    """Two kinds of layers with angles of their own take turns; another folding of the same cos is another table."""
    shared = context(torch.float32)
    specs = [RotarySpec(DIM, DIM, copy=True), RotarySpec(DIM, DIM, half="even", copy=True)]
    layers = [build_layer(spec, "x", shared, torch.nn.Module()) for spec in specs]
    query = torch.randn(1, HEADS, TOKENS, DIM)
    for step in range(2):
        global_angles, local_angles = angles(specs[0], torch.float32, step), angles(specs[0], torch.float32, step + 9)
        mixed = (global_angles[0], local_angles[1])
        for cos, sin in (global_angles, local_angles, mixed, global_angles, local_angles):
            for spec, layer in zip(specs, layers, strict=True):
                close(layer(query, query, cos, sin)[0], wanted_of(spec, query, query, cos, sin)[0])


def test_the_table_is_made_once_for_all_layers_of_a_step():
    tables, spec = RotaryTables(), RotarySpec(DIM, DIM)
    cos, sin = angles(spec, torch.float32)
    assert tables.table(cos, sin, spec.picked) is tables.table(cos, sin, spec.picked)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_one_graph(backend):
    spec = RotarySpec(DIM, DIM // 4, neox=False, half="even")
    home, query = as_part_of_qkv(random(HEADS, torch.float32), HEADS)
    before = home.clone()
    cos, sin = angles(spec, torch.float32)
    wanted = wanted_of(spec, query, query, cos, sin)
    torch._dynamo.reset()
    got = torch.compile(build(spec, torch.float32), fullgraph=True, backend=backend)(query, query, cos, sin)
    close(got[0], wanted[0])
    close(got[1], wanted[1])
    assert torch.equal(home, before)


def test_wide_rotation_is_in_float32():
    """Under compilation; the kernel has no such mode, and the fuser does not ask it to."""
    spec = RotarySpec(DIM, DIM, wide=True)
    query = torch.randn(1, HEADS, TOKENS, DIM).bfloat16()
    cos, sin = angles(spec, torch.float32)
    torch._dynamo.reset()
    got = torch.compile(build(spec, torch.bfloat16), fullgraph=True, backend="aot_eager")(query, query, cos, sin)
    assert torch.equal(got[0], spec.reference()(query.float(), query.float(), cos, sin)[0].bfloat16())


@pytest.mark.parametrize("half", ["first", "even"])
def test_no_index_of_cos_and_sin_is_left_in_a_graph(half):
    """vLLM leaves an index in the piece that made the tensor: each layer would get slices of its own, under names of
    their own, and be compiled by itself."""
    spec = RotarySpec(32, 32, neox=half == "first", half=half)
    seen = []

    def note(graph, _):
        seen.extend(n for n in graph.graph.nodes if n.target is operator.getitem and n.args[0].op == "placeholder")
        return graph.forward

    layer = torch.compile(Rotary(spec, RotaryTables()), backend=note, fullgraph=True)
    q, k, table = torch.randn(1, 4, 5, 32), torch.randn(1, 2, 5, 32), torch.randn(1, 5, 32)
    layer(q, k, table, table.sin())
    assert seen == []
