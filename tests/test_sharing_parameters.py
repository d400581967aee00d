"""Parameters that are tied to one another are one parameter in the served tree."""

import pytest
from torch import nn

apply = pytest.importorskip("tfbackend.apply")


def tree():
    return nn.ModuleDict({name: nn.Linear(3, width) for name, width in (("first", 4), ("second", 4), ("wide", 5))})


def test_both_places_hold_one_parameter():
    root = tree()
    apply.share_parameters(root, [("second.weight", "first.weight")])
    assert root["second"].weight is root["first"].weight
    assert root["second"].bias is not root["first"].bias
    assert len(list(root.parameters())) == 5


@pytest.mark.parametrize(
    "pair",
    [("wide.weight", "first.weight"), ("second.weight", "gone.weight"), ("gone.weight", "first.weight")],
)
def test_what_cannot_be_shared_is_left_apart(pair):
    """Loading then names what nothing filled."""
    root = tree()
    before = dict(root.named_parameters())
    apply.share_parameters(root, [pair])
    assert all(root.get_parameter(name) is parameter for name, parameter in before.items())
