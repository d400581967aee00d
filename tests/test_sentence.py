"""Pooling as sentence-transformers describes it in a folder's files."""

import pytest
import torch

from tfbackend.errors import UnsupportedModelError
from tfbackend.sentence import MODES, module_names, pool, pooling_modes

X = torch.tensor([[1.0, 8.0], [2.0, -4.0], [6.0, 2.0], [3.0, 2.0]])


def listed(*names):
    return [{"type": f"sentence_transformers.models.{name}"} for name in names]


@pytest.mark.parametrize("more", [(), ("Dense", "Dense", "Normalize")])
def test_modules_that_can_be_done(more):
    names = ("Transformer", "Pooling", *more)
    assert module_names(listed(*names)) == [*names]


@pytest.mark.parametrize(
    "names",
    [
        ("Transformer",),
        ("Transformer", "Pooling", "Normalize", "Dense"),
        ("Transformer", "Pooling", "LayerNorm"),
        ("Transformer", "Dense", "Pooling"),
        ("Transformer", "Pooling", "Pooling"),
        ("Transformer", "WeightedLayerPooling", "Pooling"),
    ],
)
def test_other_modules_are_refused(names):
    with pytest.raises(UnsupportedModelError, match="after the model"):
        module_names(listed(*names))


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_sqrt_len_tokens": True, "word_embedding_dimension": 8}, ("mean_sqrt_len_tokens",)),
        ({"pooling_mode_weightedmean_tokens": True, "include_prompt": True}, ("weightedmean",)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, ("max", "lasttoken")),
        ({"pooling_mode": "mean"}, ("mean",)),
        ({"pooling_mode": ["lasttoken", "cls"]}, ("cls", "lasttoken")),
    ],
)
def test_modes(config, modes):
    assert pooling_modes(config) == modes


@pytest.mark.parametrize(
    "config",
    [{}, {"pooling_mode_median": True}, {"pooling_mode": "mean", "include_prompt": False}, {"pooling_mode": "median"}],
)
def test_other_modes_are_refused(config):
    with pytest.raises(UnsupportedModelError, match="Pooling of sentence-transformers"):
        pooling_modes(config)


GIVEN = [
    ("cls", [1.0, 8.0]),
    ("max", [6.0, 8.0]),
    ("mean", [3.0, 2.0]),
    ("mean_sqrt_len_tokens", [6.0, 4.0]),
    ("weightedmean", [(1 + 4 + 18 + 12) / 10, (8 - 8 + 6 + 8) / 10]),
    ("lasttoken", [3.0, 2.0]),
]


@pytest.mark.parametrize(("mode", "wanted"), GIVEN)
def test_what_each_mode_gives(mode, wanted):
    assert pool(mode, X).tolist() == pytest.approx(wanted)
    assert pool(mode, X.bfloat16()).dtype == torch.float32


def test_every_mode_is_tried_here():
    assert {mode for mode, _ in GIVEN} == MODES.keys()
