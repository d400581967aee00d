"""Tokens that a model counts itself, told from positions that it was given."""

import pytest
import torch
from torch import nn

from tfbackend.graph.counted import CountedTokens

X = torch.zeros(1, 5, 8)
POSITIONS = torch.arange(5)[None] + 3


def _count(x, positions):
    return x + torch.arange(x.shape[1])[:, None]


def _add_up_a_mask(x, positions):
    return x + torch.ones(1, x.shape[1]).cumsum(-1)[..., None]


def _count_into(x, positions):
    x = x.clone()
    x += torch.arange(x.shape[1])[:, None]
    return x


def _count_into_a_part(x, positions):
    x = x.clone()
    x[..., 0] = torch.arange(x.shape[1])
    return x


def _count_for_a_table(x, positions):
    return x + nn.functional.embedding(torch.arange(x.shape[1]), torch.ones(9, 8))


def _use_what_is_given(x, positions):
    return x + nn.functional.embedding(positions, torch.ones(9, 8))


def _count_and_forget(x, positions):
    torch.arange(x.shape[1])
    return x + positions[..., None]


@pytest.mark.parametrize(
    "forward", [_count, _add_up_a_mask, _count_into, _count_into_a_part, _count_for_a_table], ids=lambda f: f.__name__
)
def test_what_is_computed_from_a_count_is_known(forward):
    with CountedTokens(5) as counted:
        assert forward(X, POSITIONS) in counted


def _count_experts(x, positions):
    return x + torch.ones(3).cumsum(0).sum()


@pytest.mark.parametrize("forward", [_use_what_is_given, _count_and_forget, _count_experts], ids=lambda f: f.__name__)
def test_what_is_computed_from_positions_is_no_count(forward):
    with CountedTokens(5) as counted:
        assert forward(X, POSITIONS) not in counted
