"""Modules that let tokens see each other outside attention are refused by name."""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from tests.fusers.test_glu import GLU
from tests.fusers.test_qkv import Attention
from tests.sites import SIZES, WIDTH, OneSite
from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.observe import observe
from tfbackend.meta import build
from tfbackend.mixing import mixing_modules
from tfbackend.plan import make_plan
from tfbackend.proof import Prover
from tfbackend.serving import ServingSpec


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x):
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Pointwise(Convolution):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Layer(nn.Module):
    """A mixer below a layer: the innermost is named."""

    def __init__(self):
        super().__init__()
        self.good, self.mixer = GLU(), nn.Sequential(nn.Identity(), Convolution())

    def forward(self, x):
        return self.mixer(self.good(x))


def found(*modules):
    base = OneSite([m.to("meta") for m in modules]).eval().to("meta")
    seen = observe(base)
    assert not seen.problem, seen.problem
    return dict(mixing_modules(base, "", seen, Prover(None)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.cumsum(1),
        lambda x: x + x.mean(1, keepdim=True),
        lambda x: x.roll(1, 1),
        lambda x: x.flip(1),
        lambda x: torch.cat((x[:, :1], x[:, 1:] - x[:, :-1]), 1),
        lambda x: x.softmax(1),
        lambda x: torch.einsum("bik,bjk->bij", x, x) @ x,
    ],
)
def test_functions_over_the_token_axis(function):
    assert list(found(Function(function))) == ["site"]


@pytest.mark.parametrize(
    "module",
    [GLU(), Attention(), Pointwise(), nn.LayerNorm(WIDTH), Function(lambda x: x.softmax(-1)), nn.BatchNorm1d(7)],
)
def test_what_works_on_each_token_alone_is_served(module):
    assert found(module) == {}


def test_the_innermost_module_is_named():
    ((where, what),) = found(Layer()).items()
    assert where in ("site.mixer.1", "site.mixer.1.conv")
    assert what.endswith("changes with token 2")


def test_result_is_remembered(tmp_path):
    base = OneSite([Convolution()]).eval().to("meta")
    seen = observe(base)
    first = list(mixing_modules(base, "", seen, Prover(tmp_path)))
    prover = Prover(tmp_path)
    assert list(mixing_modules(base, "", seen, prover)) == first
    assert len(list(tmp_path.glob("tokens-*.json"))) >= 1
    assert prover.counts == (0, 0), "it is no proof of a rewrite"


HYBRIDS = [
    ("falcon_h1", {}, "layers.0.mamba"),
    ("lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96}, "layers.0.conv"),
]


@pytest.mark.parametrize(("model_type", "fields", "where"), HYBRIDS)
def test_hybrid_models_are_refused_where_their_state_is_not_kept(model_type, fields, where):
    meta = build(CONFIG_MAPPING[model_type](**SIZES, **fields), torch.float32)
    with pytest.raises(UnsupportedModelError, match=where) as caught:
        make_plan(meta, ServingSpec(stateless="no room is left"))
    assert "no room is left" in str(caught.value)


@pytest.mark.parametrize(("model_type", "fields", "where"), HYBRIDS)
def test_what_has_a_state_is_not_refused(model_type, fields, where):
    meta = build(CONFIG_MAPPING[model_type](**SIZES, **fields), torch.float32)
    assert where in dict(make_plan(meta, ServingSpec()).state)


def test_layer_is_judged_without_the_mixer_that_has_a_state():
    """What else is in the layer must not mix either."""
    base = OneSite([Layer().to("meta")]).eval().to("meta")
    seen = observe(base)
    kept = frozenset({"site.mixer"})
    assert dict(mixing_modules(base, "", seen, Prover(None), kept)) == {}
    base.site.good = nn.Sequential(Convolution(), GLU()).to("meta")
    seen = observe(base)
    (where,) = dict(mixing_modules(base, "", seen, Prover(None), kept))
    assert where in ("site.good.0", "site.good.0.conv")


class WeightReader(nn.Module):
    """Reads the weight of a linear that is too wide to be filled for a trial, and mixes tokens."""

    def __init__(self):
        super().__init__()
        self.into, self.wide = nn.Linear(WIDTH, 1 << 11), nn.Linear(1 << 11, 1 << 11)

    def forward(self, x):
        return (self.into(x) @ self.wide.weight).cumsum(1)[..., :WIDTH]


def test_mixer_that_reads_a_wide_weight_is_seen():
    assert list(found(WeightReader())) == ["site"]
