"""Modules that make a bias for each query and key: which of them come to a table for each token."""

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn

from tfbackend.graph.distances import DistanceError, DistanceTable, find_table, makes_bias
from tfbackend.graph.observe import TOKENS

HEADS, WIDTH, EXTENT, LONGEST = 3, 4, 5, 64


class Relative(nn.Module):
    """A bias of the query and the distance, written as slow as it is plain."""

    def __init__(self, extent=EXTENT):
        super().__init__()
        self.extent = extent
        self.profiles = nn.Parameter(torch.empty(WIDTH, extent))

    def forward(self, x, queries, keys):
        table = (x @ self.profiles).transpose(1, 2)
        distance = queries[:, None] - keys[None, :]
        rows = table[..., distance.clamp(0, self.extent - 1).flatten()].view(*table.shape[:3], *distance.shape)
        bias = torch.stack([rows[:, :, i, i] for i in range(len(queries))], dim=2)
        return bias.masked_fill((distance < 0) | (distance >= self.extent), 0.0)


class KeysFirst(Relative):
    def forward(self, keys, queries, x):
        return super().forward(x, queries, keys)


class OneHead(Relative):
    def forward(self, x, queries, keys):
        return super().forward(x.mean(2, keepdim=True), queries, keys)


class Ahead(Relative):
    """What it says of keys ahead, causal attention never asks."""

    def forward(self, x, queries, keys):
        return super().forward(x, queries, keys) + (queries[:, None] < keys[None, :]) * 3.0


class Everywhere(Relative):
    """Reaches all the way back."""

    def forward(self, x, queries, keys):
        slope = x.sum(-1).transpose(1, 2)[..., None]
        return slope * (queries[:, None] - keys[None, :] + 1)


class ByPlace(Relative):
    """Of where the query is, too."""

    def forward(self, x, queries, keys):
        return super().forward(x, queries, keys) * (1 + queries[:, None] / 7)


class FarAway(Relative):
    """Of where the key is, where that is far from the beginning."""

    def forward(self, x, queries, keys):
        return super().forward(x, queries, keys) * torch.where(keys > LONGEST // 2, 2.0, 1.0)


class Holed(Relative):
    """No bias on every other key."""

    def forward(self, x, queries, keys):
        return super().forward(x, queries, keys) * (keys % 2)


class OfOthers(Relative):
    """Of the tokens before the query, too."""

    def forward(self, x, queries, keys):
        return super().forward(x.cumsum(1), queries, keys)


class OfLater(Relative):
    """Of the distance to later keys."""

    def forward(self, x, queries, keys):
        return super().forward(x, -queries, -keys)


class Silent(Relative):
    """Of later keys, without the token itself."""

    def forward(self, x, queries, keys):
        return super().forward(x, -queries - 1, -keys)


class Transposed(Relative):
    def forward(self, x, queries, keys):
        return super().forward(x, queries, keys).transpose(2, 3).contiguous()


class Blind(Relative):
    """Takes the numbers of its tokens from nobody."""

    def forward(self, x, queries, keys):
        places = torch.arange(x.shape[1])
        return super().forward(x, places, places)


def read(cls, call=None, longest=LONGEST, **fields):
    with init_empty_weights(include_buffers=False):
        module = cls(**fields)
    x = torch.empty(1, TOKENS, HEADS, WIDTH, device="meta")
    places = torch.empty(TOKENS, dtype=torch.long, device="meta")
    with torch.no_grad():
        return find_table(module, call or ((x,), {"queries": places, "keys": places}), longest)


@pytest.mark.parametrize("cls", [Relative, OneHead, Ahead])
def test_a_bias_of_query_and_distance_is_a_table(cls):
    assert read(cls) == DistanceTable("queries", "keys", EXTENT)


def test_which_positions_are_of_queries_is_told_by_what_comes_out():
    x, places = torch.empty(1, TOKENS, HEADS, WIDTH, device="meta"), torch.empty(TOKENS, dtype=torch.int, device="meta")
    assert read(KeysFirst, ((places, places, x), {})) == DistanceTable("queries", "keys", EXTENT)


def test_positions_may_have_an_axis_of_requests():
    class Batched(Relative):
        def forward(self, x, queries, keys):
            return super().forward(x, queries[0], keys[0])

    x = torch.empty(1, TOKENS, HEADS, WIDTH, device="meta")
    places = torch.empty(1, TOKENS, dtype=torch.int, device="meta")
    assert read(Batched, ((x, places, places), {})) == DistanceTable("queries", "keys", EXTENT)


def test_no_context_is_longer_than_the_longest():
    assert read(Relative, extent=40, longest=16).extent == 16
    assert read(Relative, extent=40, longest=64).extent == 40
    assert read(Everywhere, longest=16).extent == 16


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (ByPlace, "more than the query token and the distance"),
        (FarAway, "more than the query token and the distance"),
        (Holed, "more than the query token and the distance"),
        (OfOthers, "depends on other tokens"),
        (Silent, "0 for all distances"),
        (Blind, "not a row for each query"),
        (Transposed, "not a row for each query"),
    ],
)
def test_another_bias_is_none(cls, reason):
    with pytest.raises(DistanceError, match=reason):
        read(cls)


def test_of_later_keys_only_the_token_itself_counts():
    assert read(OfLater).extent == 1


def test_without_positions_there_is_no_table():
    x = torch.empty(1, TOKENS, HEADS, WIDTH, device="meta")
    with pytest.raises(DistanceError, match="no positions"):
        read(Relative, ((x, x, x), {}))


def test_a_bias_that_reaches_too_far_is_none():
    with pytest.raises(DistanceError, match="350000 tokens, too many"):
        read(Everywhere, longest=350000)


def test_what_makes_a_bias_returns_one_tensor_of_its_shape():
    shape = (1, HEADS, TOKENS, TOKENS)
    assert makes_bias(torch.empty(shape), shape)
    assert makes_bias((torch.empty(1, 1, TOKENS, TOKENS),), shape)
    assert not makes_bias(torch.empty(shape, dtype=torch.long), shape)
    assert not makes_bias((torch.empty(shape), torch.empty(shape)), shape)
    assert not makes_bias(torch.empty(1, HEADS, TOKENS, TOKENS + 1), shape)
    assert not makes_bias(None, shape)
