"""Models that look at values of their tensors, which the run on meta cannot give them, and models that just fail."""

import pytest
import torch
from torch import nn

from tests.sites import WIDTH, OneSite
from tfbackend.graph.observe import observe


class Counts(nn.Module):
    def forward(self, x):
        return x[:, : int((x > 0).sum().item())]


class Picks(nn.Module):
    def forward(self, x):
        return x[torch.nonzero(x[0, :, 0])]


class Mismatched(nn.Module):
    def forward(self, x):
        return x @ torch.zeros(WIDTH + 1, 3, device=x.device)


@pytest.mark.parametrize(("build", "reads"), [(Counts, True), (Picks, True), (Mismatched, False)])
def test_why_and_where_the_run_ended(build, reads):
    with torch.device("meta"):
        base = OneSite([build()]).eval()
    seen = observe(base)
    line = build.forward.__code__.co_firstlineno + 1
    assert seen.reads_values is reads
    assert seen.problem.endswith(f" (test_reading_values.py:{line})")
