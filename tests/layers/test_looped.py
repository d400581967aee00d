"""The layer in place of a loop over experts gives what the loop's reference gives, however its parameters come."""

import dataclasses

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

from tests.layers.variants import close, context
from tfbackend.expertspec import ExpertsSpec
from tfbackend.layers.build import build_layer
from tfbackend.loopedspec import DenseExpertsSpec, ExpertsPart, LoopedExpertsSpec

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 6, 3, 64, 32, 11
BASE = ExpertsSpec(EXPERTS, TOP_K, HIDDEN, INNER)
HALVES = (
    ExpertsPart("gate", "w13_weight", 0),
    ExpertsPart("up", "w13_weight", 1, transposed=True),
    ExpertsPart("down", "w2_weight", None, transposed=True),
)
WHOLES = (ExpertsPart("gate_up", "w13_weight", None), ExpertsPart("down", "w2_weight", None))
SPECS = {
    "halves": LoopedExpertsSpec(BASE, (0, 1, 2), HALVES),
    "wholes": LoopedExpertsSpec(BASE, (0, "ids", "weights"), WHOLES),
    "identity": LoopedExpertsSpec(BASE, (0, 1, 2), WHOLES, identity=4),
    "interleaved": LoopedExpertsSpec(dataclasses.replace(BASE, interleaved=True), (0, 1, 2), WHOLES),
}
ROWS = {"gate": INNER, "up": INNER, "gate_up": 2 * INNER}


@pytest.fixture
def engine():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def tensors(spec, flat):
    """Parameters as the original has them, more experts than have weights where it has identities."""
    generator, found = torch.Generator().manual_seed(3), {}
    for part in spec.parts:
        shape = (HIDDEN, INNER) if part.source == "down" else (ROWS[part.source], HIDDEN)
        more = spec.identity if part.source == "gate_up" else 0
        tensor = torch.randn(EXPERTS + more, *shape[:: -1 if part.transposed else 1], generator=generator) * 0.3
        found[part.source] = tensor.flatten(0, 1) if flat else tensor
    return found


def arguments(spec):
    generator = torch.Generator().manual_seed(4)
    scores = torch.rand(TOKENS, EXPERTS + spec.identity, generator=generator)
    weights, ids = scores.topk(TOP_K, dim=-1)
    x = torch.randn(1, TOKENS, HIDDEN, generator=generator)
    named = {"ids": ids, "weights": weights}
    return ((x,), named) if "ids" in spec.places else ((x, ids, weights), {})


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "plain"])
@pytest.mark.parametrize("name", SPECS)
def test_equals_its_reference(name, kernel, order, engine):
    spec = SPECS[name] if kernel else SPECS[name].without_kernel()
    given = tensors(spec, flat=name == "halves")
    reference = spec.reference()
    reference.load(given)
    layer = build_layer(spec, "model.layers.0.experts", context(torch.float32), torch.nn.Module())
    own = dict(layer.routed.runner.routed_experts.named_parameters(recurse=False))
    for part in spec.parts[::order]:
        shard = () if part.shard is None else (part.shard,)
        own[part.target].weight_loader(own[part.target], given[part.source], *shard)
    if kernel:
        routed = layer.routed.runner.routed_experts
        routed.quant_method.process_weights_after_loading(routed)
    args, kwargs = arguments(spec)
    with torch.no_grad(), set_forward_context(None, engine):
        close(layer(*args, **kwargs), reference(*args, **kwargs))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "plain"])
def test_weights_of_all_experts(kernel, before, engine):
    """Every expert on every token, as the original would, is what those with a weight give."""
    experts = dataclasses.replace(BASE, top_k=1 if before else TOP_K)
    spec = DenseExpertsSpec(experts, TOP_K, before, WHOLES)
    spec = spec if kernel else spec.without_kernel()
    layer = build_layer(spec, "model.layers.0.routed", context(torch.float32), torch.nn.Module())
    given = tensors(SPECS["wholes"], flat=False)
    own = dict(layer.routed.runner.routed_experts.named_parameters(recurse=False))
    for part in spec.parts:
        own[part.target].weight_loader(own[part.target], given[part.source])
    if kernel:
        routed = layer.routed.runner.routed_experts
        routed.quant_method.process_weights_after_loading(routed)
    x, (scores, ids) = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS).topk(TOP_K)
    weights = torch.zeros(TOKENS, EXPERTS).scatter(1, ids, scores)
    rows = x[None] * weights.T[..., None] if before else x.expand(EXPERTS, -1, -1)
    gate, up = (rows @ given["gate_up"].transpose(1, 2)).chunk(2, dim=-1)
    each = (torch.nn.functional.silu(gate) * up) @ given["down"].transpose(1, 2)
    with torch.no_grad(), set_forward_context(None, engine):
        close(layer(x, weights), (each if before else each * weights.T[..., None]).sum(0))


def test_an_identity_left_out_shows():
    """Or the test above could not see it."""
    spec = SPECS["identity"]
    made, args = spec.reference(), arguments(spec)[0]
    made.load(tensors(spec, flat=False))
    handed_on = args[0][0] * (args[2] * (args[1] >= EXPERTS)).sum(-1, keepdim=True)
    assert (args[1] >= EXPERTS).any()
    inside = dataclasses.replace(spec, identity=0).compute(made.routed, (*args[:1], args[1] % EXPERTS, args[2]), {})
    assert (made(*args) - handed_on - inside).abs().max() > 0.1
