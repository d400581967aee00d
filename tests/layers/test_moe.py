"""A whole mixture-of-experts block in vLLM's runner computes what its spec says, on CPU and on a GPU if there is one.

The reference routes by RouterSpec.route and goes through the tokens one by one.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

from tests.layers.test_experts import reference as reference_experts
from tests.layers.test_experts import tensors
from tests.layers.variants import context
from tfbackend.expertspec import ExpertsSpec
from tfbackend.layers.build import build_layer
from tfbackend.layers.moe import KernelMoE
from tfbackend.moespec import MoESpec, RouterSpec

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 8, 2, 64, 32, 11
ROUTED = ExpertsSpec(EXPERTS, TOP_K, HIDDEN, INNER)
DEVICES = ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
ROUTERS = [
    RouterSpec(),
    RouterSpec(renormalize=False),
    RouterSpec(renormalize=False, scale=2.5),
    RouterSpec(bias=True),
    RouterSpec(wide=True),
    RouterSpec("sigmoid"),
    RouterSpec("sigmoid", renormalize=False, scale=0.6),
    RouterSpec("sigmoid", correction=True),
    RouterSpec("sigmoid", correction=True, scale=2.5, wide=True),
    RouterSpec(correction=True, renormalize=False),
    RouterSpec(groups=4, groups_used=1, renormalize=False),
    RouterSpec(groups=4, groups_used=1, renormalize=False, scale=16.0),
    RouterSpec("sigmoid", groups=4, groups_used=1),
    RouterSpec("sigmoid", groups=4, groups_used=2, correction=True, scale=2.5, wide=True),
    RouterSpec("sigmoid", groups=2, groups_used=1, correction=True, renormalize=False),
]


class Site(nn.Module):
    """A block with a shared expert that is already rewritten."""

    def __init__(self):
        super().__init__()
        self.always, self.how_much = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)


@pytest.fixture
def engine():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def live(spec, given, router, site, device="cpu"):
    around = dataclasses.replace(context(torch.float32), device=torch.device(device))
    with torch.device(device):
        layer = build_layer(spec, "model.layers.0.mlp.moe", around, site)
    assert isinstance(layer, KernelMoE)
    layer.runner.gate.weight.data.copy_(router["weight"])
    if spec.router.bias:
        layer.runner.gate.bias.data.copy_(router["bias"])
    if spec.router.correction:
        layer.correction.weight_loader(layer.correction, router["correction"][None])
    own = layer.runner.routed_experts
    for name, tensor in given.items():
        getattr(own, name).weight_loader(getattr(own, name), tensor.to(device))
    for module in (own, layer.runner.gate):
        module.quant_method.process_weights_after_loading(module)
    return layer


def tensors_of(router):
    made = {"weight": drawn(EXPERTS, HIDDEN) / 8}
    made |= {"bias": drawn(EXPERTS)} if router.bias else {}
    return made | ({"correction": drawn(EXPERTS) / 2} if router.correction else {})


def reference(spec, given, router, site, x):
    logits = F.linear(x, router["weight"], router.get("bias"))
    weights, ids = spec.router.route(logits, TOP_K, router.get("correction"))
    total = reference_experts(spec.experts, given, x, ids, weights)
    if spec.shared:
        beside = site.always(x)
        total = total + (site.how_much(x).sigmoid() * beside if spec.shared_gate else beside)
    return total


def check(spec, engine, device, shape=(TOKENS, HIDDEN)):
    given, router, site = tensors(spec.experts), tensors_of(spec.router), Site()
    x = drawn(*shape)
    with torch.no_grad():
        wanted = reference(spec, given, router, site, x.view(-1, HIDDEN)).view(shape)
        layer = live(spec, given, router, site.to(device), device)
        with set_forward_context(None, engine):
            got = layer(x.to(device)).cpu()
    # A GPU multiplies float32 by its tensor cores.
    within = (1e-5 if device == "cpu" else 2e-2) * max(1.0, spec.router.scale)
    torch.testing.assert_close(got, wanted, rtol=within, atol=within)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "router", ROUTERS, ids=lambda router: f"{router}{' bias' * router.bias}{' wide' * router.wide}"
)
def test_routers(router, engine, device):
    check(MoESpec(ROUTED, router), engine, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gate", ["", "how_much"])
def test_shared_experts(gate, engine, device):
    check(MoESpec(ROUTED, RouterSpec(), "always", gate), engine, device, (1, TOKENS, HIDDEN))


def test_rules_are_told_apart():
    """Or the tests above could not see a rule ignored."""
    everything = {"weight": drawn(EXPERTS, HIDDEN) / 8, "bias": drawn(EXPERTS), "correction": drawn(EXPERTS) / 2}
    logits, seen = F.linear(drawn(TOKENS, HIDDEN), everything["weight"]), []
    for router in ROUTERS:
        own = logits + everything["bias"] if router.bias else logits
        weights, ids = router.route(own, TOP_K, everything["correction"] if router.correction else None)
        dense = torch.zeros(TOKENS, EXPERTS).scatter_(-1, ids, weights)
        assert all((dense - other).abs().max() > 0.01 for other in seen if not router.wide), router
        seen.append(dense)


def test_a_shared_expert_that_has_added_up_gives_each_rank_its_part(engine):
    """The runner adds up what the ranks give; of what is whole on each of two, that is half."""
    site, spec = Site(), MoESpec(ROUTED, RouterSpec(), "always")
    whole = KernelMoE(spec, "model.a.moe", context(torch.float32), site).runner.shared_experts._layer
    two = dataclasses.replace(context(torch.float32), tp_size=2)
    half = KernelMoE(spec, "model.b.moe", two, site).runner.shared_experts._layer
    x = drawn(TOKENS, HIDDEN)
    torch.testing.assert_close(half(x) * 2, whole(x))
    site.always.reduce_results = False
    partial = KernelMoE(dataclasses.replace(spec, shared_out="always"), "model.c.moe", two, site)
    torch.testing.assert_close(partial.runner.shared_experts._layer(x), whole(x))


def test_its_parameters_are_not_those_of_the_block(engine):
    layer = KernelMoE(MoESpec(ROUTED, RouterSpec(), "always"), "model.layers.0.mlp.moe", context(torch.float32), Site())
    assert not [name for name, _ in layer.named_parameters() if "always" in name]
