"""Routed experts, by vLLM's kernels and in plain torch, compute what their spec says, however the checkpoint has them.

The reference goes through the tokens one by one and reads the tensors as the spec says the checkpoint has them.
"""

import dataclasses

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

from tests.layers.variants import close, context
from tfbackend.expertspec import ExpertsSpec
from tfbackend.layers.build import build_layer
from tfbackend.layers.experts import KernelExperts, PlainExperts, unpack_routing

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 6, 2, 64, 32, 11
BASE = ExpertsSpec(EXPERTS, TOP_K, HIDDEN, INNER)
OAI = {"activation": "swigluoai", "alpha": 1.702, "limit": 7.0}
WITH_KERNEL = [
    BASE,
    dataclasses.replace(BASE, transposed=True),
    dataclasses.replace(BASE, interleaved=True),
    dataclasses.replace(BASE, bias=True),
    dataclasses.replace(BASE, activation="gelu"),
    dataclasses.replace(BASE, activation="gelu_tanh", bias=True, transposed=True, interleaved=True),
    dataclasses.replace(BASE, **OAI, interleaved=True, bias=True, transposed=True),
    dataclasses.replace(BASE, **OAI),
    dataclasses.replace(BASE, intermediate=40, bias=True),  # padded by the kernel
]
PLAIN_ONLY = [
    dataclasses.replace(BASE, activation="relu2", gated=False),
    dataclasses.replace(BASE, activation="relu2", gated=False, bias=True, transposed=True),
    dataclasses.replace(BASE, limit=0.5),
    dataclasses.replace(BASE, activation="swigluoai", alpha=0.7, limit=0.5),
    dataclasses.replace(BASE, hidden=40),
]
SPECS = WITH_KERNEL + [s.without_kernel() for s in WITH_KERNEL + PLAIN_ONLY]


@pytest.fixture
def engine():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def tensors(spec):
    """Name in the layer -> a random tensor as the checkpoint has it."""
    generator = torch.Generator().manual_seed(11)
    factor = 2 if spec.gated else 1
    shapes = {"w13_weight": (factor * spec.intermediate, spec.hidden), "w2_weight": (spec.hidden, spec.intermediate)}
    if spec.transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if spec.bias:
        shapes |= {"w13_bias": (factor * spec.intermediate,), "w2_bias": (spec.hidden,)}
    return {
        name: torch.randn(spec.num_experts, *shape, generator=generator) * (0.3 if len(shape) == 2 else 1.0)
        for name, shape in shapes.items()
    }


def routing(spec, tokens=TOKENS):
    generator = torch.Generator().manual_seed(12)
    scores = torch.rand(tokens, spec.num_experts, generator=generator)
    weights, ids = scores.topk(spec.top_k, dim=-1)
    return ids, weights


def reference(spec, given, x, ids, weights):
    made = spec.reference()
    made.into, made.out = given["w13_weight"], given["w2_weight"]
    if spec.bias:
        made.into_bias, made.out_bias = given["w13_bias"], given["w2_bias"]
    return made(x, ids, weights)


def live(spec, given, dtype=torch.float32):
    layer = build_layer(spec, "model.layers.0.mlp.experts.routed", context(dtype), torch.nn.Module())
    assert isinstance(layer, KernelExperts if spec.kernel else PlainExperts)
    own = dict(layer.runner.routed_experts.named_parameters(recurse=False))
    assert own.keys() == given.keys()
    for name, tensor in given.items():
        loader = getattr(own[name], "weight_loader", None)
        own[name].data.copy_(tensor) if loader is None else loader(own[name], tensor.to(dtype))
    if spec.kernel:
        routed = layer.runner.routed_experts
        routed.quant_method.process_weights_after_loading(routed)
    return layer


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_its_reference(spec, engine):
    given = tensors(spec)
    x = torch.randn(TOKENS, spec.hidden, generator=torch.Generator().manual_seed(13))
    ids, weights = routing(spec)
    layer = live(spec, given)
    with torch.no_grad(), set_forward_context(None, engine):
        close(layer(x, ids, weights), reference(spec, given, x, ids, weights))


@pytest.mark.parametrize(
    "change", [{"interleaved": True}, {"transposed": True}, {"activation": "gelu"}, {"limit": 0.5}]
)
def test_a_spec_that_is_read_wrongly_shows(change):
    """Or the test above could not see an orientation or a rule ignored."""
    square = dataclasses.replace(BASE, hidden=64, intermediate=32)
    given = tensors(square)
    given["w13_weight"] = torch.randn(EXPERTS, 64, 64)
    x, (ids, weights) = torch.randn(TOKENS, 64), routing(square)
    given["w2_weight"] = torch.randn(EXPERTS, 64, 32)
    turned = {**given, "w2_weight": given["w2_weight"].transpose(1, 2)}
    other = turned if "transposed" in change else given
    one = reference(square, given, x, ids, weights)
    two = reference(dataclasses.replace(square, **change), other, x, ids, weights)
    assert (one - two).abs().max() > 0.1


def test_routing_survives_being_packed():
    ids, weights = torch.tensor([[70_000, 3]]), torch.tensor([[0.25, 1e-30]])
    packed = torch.cat((weights, ids.float()), -1)
    again_weights, again_ids = unpack_routing(torch.empty(1, 4), packed, 2, False)
    assert torch.equal(again_weights, weights)
    assert torch.equal(again_ids, ids.int())


def test_plain_experts_trace_as_one_operation(engine):
    spec = BASE.without_kernel()
    layer = live(spec, tensors(spec))
    ids, weights = routing(spec)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for tokens in (TOKENS, 3):
        x = torch.randn(tokens, spec.hidden)
        with torch.no_grad():
            close(compiled(x, ids[:tokens], weights[:tokens]), layer(x, ids[:tokens], weights[:tokens]))
