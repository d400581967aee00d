"""A model that changes its own weights while it runs: the method that does it is found, or that there is none."""

import pytest
import torch
from torch import nn

from tests.sites import WIDTH
from tfbackend.graph.observe import observe


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.into, self.halved = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), False

    def halve(self):
        if not self.halved:
            self.into.weight.mul_(0.5)
        self.halved = True

    def halve_by(self, factor):
        self.into.weight.mul_(factor)


class InMethod(Base):
    def forward(self, input_ids, position_ids=None):
        self.halve()
        return self.into(self.embed(input_ids))


class InForward(Base):
    def forward(self, input_ids, position_ids=None):
        self.into.weight.mul_(0.5)
        return self.into(self.embed(input_ids))


class WithArgument(Base):
    def forward(self, input_ids, position_ids=None):
        self.halve_by(0.5)
        return self.into(self.embed(input_ids))


class OfItsActivations(Base):
    def forward(self, input_ids, position_ids=None):
        return self.into(self.embed(input_ids)).mul_(0.5)


@pytest.mark.parametrize(
    ("cls", "found"),
    [(InMethod, [("", "halve")]), (InForward, [("", "")]), (WithArgument, [("", "")]), (OfItsActivations, [])],
)
def test_who_changes_weights(cls, found):
    with torch.device("meta"):
        base = cls()
    seen = observe(base)
    assert not seen.problem
    assert seen.settling == found
    assert not base.halved, "the observed run leaves nothing behind"
