"""Norms in every spelling, the values that are read from them, and what only looks like one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from tests.sites import WIDTH, decide
from tfbackend.layerspecs import NormSpec


class RMS(nn.Module):
    def __init__(self, eps=1e-5, size=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Division(RMS):
    def forward(self, x):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class DivisionOnePlusWeight(RMS):
    def forward(self, x):
        return (x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps)) * (1.0 + self.weight)


class RootAlone(RMS):
    """Times the root: the graph has all the parts of a norm."""

    def forward(self, x):
        return x * torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class OnePlusWeight(RMS):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class Weightless(RMS):
    def __init__(self):
        super().__init__()
        del self.weight

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).type_as(x)


class Functional(RMS):
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight, 1e-3)


class FunctionalZeroCentred(RMS):
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight + 1, 1e-3)


class FunctionalNoEps(RMS):
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight)


class Centred(RMS):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


class Biased(Centred):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


class WrongDim(RMS):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps))


class EpsOutside(RMS):
    def forward(self, x):
        return self.weight * (x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps))


class EpsUnderRootOfDivision(RMS):
    def forward(self, x):
        return self.weight * x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps)


class TwoEps(RMS):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3 + self.eps))


class Gated(RMS):
    def forward(self, x, gate=None):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x * F.silu(gate if gate is not None else x)


class Matrix(RMS):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, WIDTH))


class Grouped(RMS):
    def forward(self, x):
        parts = x.view(1, x.shape[1], 4, WIDTH // 4)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)
        return parts.view(x.shape) * self.weight


class Scaled(RMS):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * self.factor


class FourthPower(RMS):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + self.eps))


class MaskedWeight(RMS):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * self.kept * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class BufferWeight(RMS):
    def __init__(self):
        super().__init__()
        del self.weight
        self.register_buffer("weight", torch.ones(WIDTH))


@pytest.mark.parametrize(
    ("build", "spec"),
    [
        (lambda: RMS(1e-5), NormSpec("rms", WIDTH, 1e-5)),
        (lambda: RMS(0.25), NormSpec("rms", WIDTH, 0.25)),
        (OnePlusWeight, NormSpec("rms", WIDTH, 1e-5, "zero_centred")),
        (Weightless, NormSpec("rms", WIDTH, 1e-5, "none")),
        (Functional, NormSpec("rms", WIDTH, 1e-3)),
        (FunctionalZeroCentred, NormSpec("rms", WIDTH, 1e-3, "zero_centred")),
        (Centred, NormSpec("layer", WIDTH, 1e-5, "plain", bias=True)),
        (lambda: nn.RMSNorm(WIDTH, eps=1e-4), NormSpec("rms", WIDTH, 1e-4)),
        (lambda: nn.RMSNorm(WIDTH, eps=1e-4, elementwise_affine=False), NormSpec("rms", WIDTH, 1e-4, "none")),
        (lambda: nn.LayerNorm(WIDTH, eps=1e-2), NormSpec("layer", WIDTH, 1e-2, "plain", bias=True)),
        (lambda: nn.LayerNorm(WIDTH, bias=False), NormSpec("layer", WIDTH, 1e-5)),
        (lambda: LlamaRMSNorm(WIDTH, eps=2e-5), NormSpec("rms", WIDTH, 2e-5)),
        (Division, NormSpec("rms", WIDTH, 1e-5)),
        (DivisionOnePlusWeight, NormSpec("rms", WIDTH, 1e-5, "zero_centred")),
        (lambda: GemmaRMSNorm(WIDTH, eps=2e-5), NormSpec("rms", WIDTH, 2e-5, "zero_centred")),
        (lambda: OlmoLayerNorm(WIDTH), NormSpec("layer", WIDTH, 1e-5, "none")),
        (lambda: NemotronLayerNorm1P(WIDTH, eps=1e-3), NormSpec("layer", WIDTH, 1e-3, "zero_centred", bias=True)),
    ],
)
def test_kind_eps_and_weight_are_read_from_the_graph(build, spec):
    plan = decide(build)
    assert plan.rewrite("norm").layer == spec
    assert not plan.unproven


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (WrongDim, "takes its mean over another dimension than the last"),
        (Biased, "adds a bias to an RMS norm, for which there is no layer"),
        (EpsOutside, "what stands under its root is not mean + eps"),
        (TwoEps, "what stands under its root is not mean + eps"),
        (FunctionalNoEps, "its eps depends on the dtype"),
        (Gated, "also does silu"),
        (Matrix, f"has a parameter weight of shape (1, {WIDTH})"),
        (MaskedWeight, "reads a buffer kept"),
        (BufferWeight, "reads a buffer weight"),
        (lambda: nn.RMSNorm(WIDTH), "its eps depends on the dtype"),
        (lambda: nn.GroupNorm(1, 7), "takes no root"),
        (EpsUnderRootOfDivision, "what stands under its root is not mean + eps"),
    ],
)
def test_near_misses_say_why(build, reason):
    assert decide(build).reason("norm") == reason


@pytest.mark.parametrize("build", [Grouped, FourthPower, RootAlone, lambda: Scaled(3.0)])
def test_what_the_graph_does_not_tell_the_proof_does(build):
    assert decide(build).reason("norm").startswith("not used, its proof failed: outputs differ")


def test_number_that_only_some_sites_have_is_proven_for_each(tmp_path):
    """With a factor of 1 the reading is right; the cached proof must not speak for a factor of 2."""
    for build, fails in ((lambda: Scaled(1.0), False), (lambda: Scaled(2.0), True), (lambda: Scaled(1.0), False)):
        plan = decide(build, directory=tmp_path)
        assert any(m.fuser == "norm" for m in plan.misses) == fails
    both = decide(lambda: Scaled(1.0), lambda: Scaled(2.0))
    assert both.rewrite("norm", "site")
    assert both.reason("norm", "others.0").startswith("not used, its proof failed")


def test_eps_is_proven_where_it_shows():
    """Next to inputs of 1 an eps of 1e-6 and one of 1e-5 agree to rounding; next to inputs of 1e-3 they do not."""
    from dataclasses import replace

    from tfbackend.proof import prove

    plan = decide(lambda: RMS(1e-6))
    rewrite = plan.rewrite("norm")
    wrong = replace(rewrite, layer=replace(rewrite.layer, eps=1e-5))
    assert prove(plan.planner.sites["site"], [rewrite]) == ""
    assert "outputs differ" in prove(plan.planner.sites["site"], [wrong])


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2", "cohere", "nemotron", "glm4"])
def test_reference_equals_the_original_on_values(model_type):
    """The same weights and inputs through Transformers' norm and the spec's reference."""
    from tfbackend.meta import build
    from tfbackend.plan import draft_plan
    from tfbackend.serving import ServingSpec

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = CONFIG_MAPPING[model_type](**sizes, num_key_value_heads=2, vocab_size=64, pad_token_id=0)
    meta = build(config, torch.float32)
    plan, _ = draft_plan(meta, ServingSpec())
    torch.manual_seed(0)
    checked = 0
    for rewrite in plan.rewrites:
        if not isinstance(rewrite.layer, NormSpec):
            continue
        original = meta.base.get_submodule(rewrite.qualname).to_empty(device="cpu")
        reference = rewrite.layer.reference()
        for name, parameter in original.named_parameters():
            parameter.data.normal_()
            setattr(reference, name, parameter)
        x = torch.randn(3, rewrite.layer.size) * 0.01
        torch.testing.assert_close(reference(x), original(x), rtol=1e-5, atol=1e-6)
        checked += 1
    assert checked >= 2
