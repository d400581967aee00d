"""Rotary embedding by vLLM's kernel, from the cos and sin that the Transformers model computes.

Transformers stays the only source of the angles, whatever its scaling: the kernel's table is made of this step's cos
and sin, once a step, and every layer of the step uses it with positions 0, 1, 2 ...
"""

from __future__ import annotations

import torch
from torch import nn
from vllm import _custom_ops as ops

from tfbackend.layerspecs import RotarySpec


class RotaryTables:
    """This step's kernel tables by the cos they were made of, shared by the layers of a model.

    Attributes:
        positions: 0, 1, 2 ... on the device, at least as many as the step has tokens.
    """

    def __init__(self) -> None:
        self.positions = torch.empty(0, dtype=torch.long)
        self._tables: list[tuple[torch.Tensor, torch.Tensor, slice, torch.Tensor]] = []

    def table(self, cos: torch.Tensor, sin: torch.Tensor, pick: slice) -> torch.Tensor:
        """[tokens, rotary_dim]: half of cos beside half of sin, made anew for other tensors."""
        for known_cos, known_sin, known_pick, table in self._tables:
            if known_cos is cos and known_sin is sin and known_pick == pick:
                return table
        table = torch.cat((cos[0, :, pick], sin[0, :, pick]), dim=-1)
        self._tables = [(cos, sin, pick, table), *self._tables[:1]]
        tokens = table.shape[0]
        if self.positions.shape[0] < tokens or self.positions.device != cos.device:
            self.positions = torch.arange(tokens, device=cos.device)
        return table


class Rotary(nn.Module):
    """Query and key [1, heads, tokens, head_dim], cos and sin [1, tokens, rotary_dim] -> rotated query and key.

    Outside of compilation query and key are rotated in place.
    """

    def __init__(self, spec: RotarySpec, tables: RotaryTables) -> None:
        super().__init__()
        self.spec, self.tables = spec, tables
        self.head_dim, self.neox = spec.head_dim, spec.neox
        self.pick = spec.picked

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate; see the class."""
        if torch.compiler.is_compiling():
            return self._traced(query, key, cos, sin)
        table = self.tables.table(cos, sin, self.pick)
        query, key = _rows(query, self.spec.copy), _rows(key, self.spec.copy)
        positions = self.tables.positions[: table.shape[0]]
        # The CPU kernel misreads [tokens, heads, dim]; it is at home with rows.
        ops.rotary_embedding(positions, query.flatten(1), key.flatten(1), self.head_dim, table, self.neox)
        return query.transpose(0, 1).unsqueeze(0), key.transpose(0, 1).unsqueeze(0)

    def _traced(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # By token and not by head: attention reads it so, and Inductor would copy each head to its place afterwards.
        cos, sin = self._picked(cos), self._picked(sin)
        query, key = (self.spec.rotate(x.squeeze(0).transpose(0, 1), cos, sin) for x in (query, key))
        return query.transpose(0, 1).unsqueeze(0), key.transpose(0, 1).unsqueeze(0)

    def _picked(self, table: torch.Tensor) -> torch.Tensor:
        """[1, tokens, rotary_dim] -> [tokens, 1, what one half of a head is turned by].

        By methods and not by an index: where vLLM cuts a graph at attention it leaves an index with what it is of,
        each layer would be given slices of its own, and no two layers would be compiled as one.
        """
        start, stop, step = self.pick.indices(table.shape[-1])
        part = table.narrow(-1, start, stop - start)
        half = part if step == 1 else part.view(*part.shape[:-1], -1, step).select(-1, 0)
        return half.squeeze(0).unsqueeze(1)


def _rows(x: torch.Tensor, copy: bool) -> torch.Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim] with the heads of a token side by side, as the kernel reads
    them."""
    rows = x[0].transpose(0, 1)
    if copy:
        return rows.clone(memory_format=torch.contiguous_format)
    dense = rows.stride(-1) == 1 and rows.stride(-2) == rows.shape[-1]
    return rows if dense else rows.contiguous()
