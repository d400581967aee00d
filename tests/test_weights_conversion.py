"""Conversions of Transformers that lack an input, have one too many, or one that does not fit."""

import pytest
import torch

from tests.test_weights_models import MIXTRAL, Plan, on_meta
from tfbackend.errors import MissingTensorError, ShapeMismatchError, UnexpectedTensorError
from tfbackend.weights import build_weight_map

EXPERTS = {
    f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight": torch.full((96, 64), float(e))
    for e in range(4)
    for w in ("w1", "w3")
}


@pytest.fixture(scope="module")
def mixtral():
    return build_weight_map(on_meta("mixtral", **MIXTRAL), Plan())


def test_absent_expert_is_named(mixtral):
    gone = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    with pytest.raises(MissingTensorError) as caught:
        list(mixtral.stream([item for item in EXPERTS.items() if item[0] != gone]))
    assert caught.value.needed == gone
    assert caught.value.where == "model.layers.0.mlp.experts.gate_up_proj"


def test_absent_last_experts_and_absent_half_are_named(mixtral):
    with pytest.raises(MissingTensorError, match=r"experts.3.w1.weight"):
        list(mixtral.stream([item for item in EXPERTS.items() if ".3." not in item[0]]))
    with pytest.raises(MissingTensorError, match=r"experts.0.w3.weight, .* and 1 more"):
        list(mixtral.stream([item for item in EXPERTS.items() if "w1" in item[0]]))


@pytest.mark.parametrize("shape", [(95, 64), (96, 65), (192, 64)])
def test_expert_of_another_shape_does_not_fit(mixtral, shape):
    wrong = {**EXPERTS, "model.layers.0.block_sparse_moe.experts.1.w1.weight": torch.zeros(shape)}
    with pytest.raises(ShapeMismatchError, match=r"mlp.experts.gate_up_proj"):
        list(mixtral.stream(wrong.items()))


def test_experts_with_as_many_elements_in_another_shape_do_not_fit(mixtral):
    with pytest.raises(ShapeMismatchError, match=r"\(48, 128\)"):
        list(mixtral.stream((name, torch.zeros(48, 128)) for name in EXPERTS))


def test_one_half_as_large_as_both_does_not_stand_for_both(mixtral):
    gates = [(name, torch.zeros(192, 64)) for name in EXPERTS if "w1" in name]
    with pytest.raises(MissingTensorError, match=r"experts.0.w3.weight, .* and 1 more"):
        list(mixtral.stream(gates))


def test_twice_the_experts_do_not_fit(mixtral):
    names = [f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight" for w in ("w1", "w3") for e in range(8)]
    with pytest.raises(ShapeMismatchError, match=r"mlp.experts.gate_up_proj"):
        list(mixtral.stream((name, torch.zeros(96, 64)) for name in names))


def test_expert_twice_is_refused(mixtral):
    again = "_orig_mod.model.layers.0.block_sparse_moe.experts.3.w1.weight"
    for items in ([*EXPERTS.items(), (again, torch.zeros(96, 64))], [(again, torch.zeros(96, 64)), *EXPERTS.items()]):
        with pytest.raises(UnexpectedTensorError, match=r"both go to model.layers.0.mlp.experts.gate_up_proj"):
            list(mixtral.stream(items))


def test_expert_beyond_those_of_the_config_is_refused(mixtral):
    more = "model.layers.0.block_sparse_moe.experts.4.w1.weight"
    with pytest.raises(UnexpectedTensorError, match=more):
        list(mixtral.stream([*EXPERTS.items(), (more, torch.zeros(96, 64))]))


def test_conversions_are_done_as_soon_as_they_can_be(mixtral):
    seen = []

    def watched():
        for name, tensor in EXPERTS.items():
            seen.append(name)
            yield name, tensor
        raise AssertionError("read on before the conversion was handed out")

    next(mixtral.stream(watched()))
    assert len(seen) == len(EXPERTS)
