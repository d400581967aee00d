"""Weights that a checkpoint has [in, out]: where they go, what is said of those that do not fit."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from tests.sites import OneSite
from tfbackend.graph.observe import observe
from tfbackend.inspection.accounts import keep_accounts
from tfbackend.inspection.headers import Headers, TensorHeader
from tfbackend.meta import build
from tfbackend.plan import draft_plan
from tfbackend.planner import Planner, collect_proven
from tfbackend.proof import Prover
from tfbackend.serving import ServingSpec
from tfbackend.weights import build_weight_map

CONFIG = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32, "n_inner": 96}
TURNED = {
    "transformer.h.0.attn.c_attn.weight": (64, 192),
    "transformer.h.0.attn.c_proj.weight": (64, 64),
    "transformer.h.0.mlp.c_fc.weight": (64, 96),
    "transformer.h.0.mlp.c_proj.weight": (96, 64),
}


@pytest.fixture(scope="module")
def planned():
    meta = build(GPT2Config(**CONFIG), torch.float32)
    plan, refusals = draft_plan(meta, ServingSpec())
    assert not refusals
    return meta, plan


@pytest.fixture(scope="module")
def tensors():
    return {k: v for k, v in GPT2LMHeadModel(GPT2Config(**CONFIG)).state_dict().items() if k != "lm_head.weight"}


def test_all_of_them_and_nothing_else_is_transposed(planned, tensors):
    meta, plan = planned
    placed = {p.source_name: (p, t) for p, t in build_weight_map(meta.model, plan).stream(tensors.items())}
    assert placed.keys() == tensors.keys()
    assert {name for name, (placement, _) in placed.items() if placement.transposed} == TURNED.keys()
    assert all(tuple(placed[name][1].shape) == shape for name, shape in TURNED.items()), "as the checkpoint has them"


def test_what_a_quantizer_writes_beside_them_is_not(planned):
    meta, plan = planned
    weight_map = build_weight_map(meta.model, plan, quantized=True)
    for name in TURNED:
        assert weight_map.resolve(name).transposed
        for leaf in ("qweight", "qzeros", "scales", "weight_scale", "bias"):
            assert not weight_map.resolve(name.removesuffix("weight") + leaf).transposed


def headers_of(tensors) -> Headers:
    made = [
        TensorHeader(name=name, shape=tuple(t.shape), dtype="F32", file="model.safetensors")
        for name, t in tensors.items()
    ]
    return Headers(tuple(made), ("model.safetensors",))


def test_inspect_says_which_are_and_names_the_shape_of_the_checkpoint(planned, tensors):
    meta, plan = planned
    weight_map = build_weight_map(meta.model, plan)
    accounts = keep_accounts(weight_map, meta.model, headers_of(tensors), quantized=False)
    assert accounts.complete
    assert {e.tensor.name for e in accounts.entries if e.note == "transposed"} == TURNED.keys()
    name = "transformer.h.0.mlp.c_fc.weight"
    wrong = tensors | {name: tensors[name].t()}
    accounts = keep_accounts(weight_map, meta.model, headers_of(wrong), quantized=False)
    assert [e.note for e in accounts.entries if e.outcome == "misfit"] == ["found (96, 64), needed (64, 96)"]


class _Chain(nn.Module):
    def __init__(self, widths, turned):
        super().__init__()
        kinds = zip(turned, widths[:-1], widths[1:], strict=True)
        self.parts = nn.ModuleList(Conv1D(out, wide) if t else nn.Linear(wide, out) for t, wide, out in kinds)

    def forward(self, x):
        for part in self.parts:
            x = part(x).tanh()
        return x


@settings(max_examples=25, deadline=None)
@given(widths=st.lists(st.integers(1, 9), min_size=2, max_size=5), data=st.data(), ranks=st.sampled_from([1, 2, 3]))
def test_every_tensor_reaches_its_place_the_right_way_round(widths, data, ranks):
    """Whatever mixture of linears a model has, and however many ranks share them."""
    widths = [32, *widths]
    turned = data.draw(st.lists(st.booleans(), min_size=len(widths) - 1, max_size=len(widths) - 1))
    with init_empty_weights(include_buffers=False):
        base = OneSite([_Chain(widths, turned)]).eval()
    meta = SimpleNamespace(base=base, base_path="", embedding_path="embed")
    rewrites, _, _ = collect_proven(Planner(meta, ServingSpec(tp_size=ranks), observe(base)), Prover(None))
    plan = SimpleNamespace(rewrites=rewrites, base_path="", head_path=None, tied=False, embedding_path="embed")
    tensors = {name: torch.randn(t.shape) for name, t in base.state_dict().items()}
    layers = {f"model.{r.qualname}": r.layer for r in rewrites if r.fuser == "linear"}
    assert len(layers) == len(turned)
    seen = 0
    for placement, tensor in build_weight_map(base, plan).stream(tensors.items()):
        path, _, leaf = placement.target.rpartition(".")
        if path in layers and leaf == "weight":
            loaded, seen = tensor.t() if placement.transposed else tensor, seen + 1
            assert loaded.shape == (layers[path].out_features, layers[path].in_features)
            assert placement.transposed is turned[int(path.rpartition(".")[2])]
    assert seen == len(turned)
