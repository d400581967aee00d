"""A forward that assigns its own buffer computes the same without, and then compiles."""

import torch
from torch import nn

from tfbackend.source.buffers import buffers_as_locals
from tfbackend.source.forward import forward_source, generate_class


class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(6, dtype=torch.float64))
        self.register_buffer("other", torch.ones(6))

    def forward(self, x):
        y = x * 2
        self.table = self.table.to(x.dtype)
        if y.dim() == 1:
            y = y + self.table[: x.shape[0]] * self.other[: x.shape[0]]
        return y


class ReadsBefore(Moves):
    def forward(self, x):
        y = x + self.table[: x.shape[0]].to(x.dtype)
        self.table = self.table * 2
        return y


class OnOneBranch(Moves):
    def forward(self, x):
        if x.dim() == 2:
            self.table = self.table.to(x.dtype)
        return x + self.table[: x.shape[-1]]


def rewritten(cls):
    return buffers_as_locals(forward_source(cls), ("table", "other"))


def test_an_assigned_buffer_becomes_a_local(tmp_path):
    text = rewritten(Moves)
    assert "tfb_table = self.table.to(x.dtype)" in text
    assert "tfb_table[: x.shape[0]] * self.other" in text
    module, x = Moves(), torch.randn(4)
    wanted = module(x)
    module = Moves()
    module.__class__ = generate_class(Moves, text, tmp_path)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), wanted)
    assert module.table.dtype == torch.float64


def test_what_would_change_the_meaning_is_left_alone():
    for cls in (ReadsBefore, OnOneBranch):
        assert rewritten(cls) == forward_source(cls).text
