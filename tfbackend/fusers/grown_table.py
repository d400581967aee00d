"""A table that a module makes anew once a call has more tokens than it has rows -> the same, made long enough at once.

An engine's calls hold tokens of many requests, more than any one of them may have, and a compiled forward cannot
replace a buffer. What the rows hold does not depend on how many there are, which is checked.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import nn

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.graph.interface import RUN_ERRORS, rescales
from tfbackend.graph.observe import TOKENS
from tfbackend.layerspecs import GrownTableSpec


class GrownTableFuser:
    name: ClassVar[str] = "grown_table"

    def match(self, site: Site) -> Match | Miss:
        module, calls = site.module, site.observation.calls.get(site.qualname, [])
        bare = next(module.children(), None) is None and next(module.parameters(), None) is None
        if not bare or not any(True for _ in module.buffers()) or rescales(module) or len(calls) != 1 or calls[0][1]:
            return Miss(self.name, site.qualname, "keeps no table", near=False)
        args = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in calls[0][0])
        if any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in calls[0][0]):
            return Miss(self.name, site.qualname, "keeps no table", near=False)
        longest = max(size for buffer in module.buffers() for size in (*buffer.shape, 1))
        problem = _problem(module, GrownTableSpec(longest + TOKENS, _longer(args, longest + TOKENS)), args)
        if problem:
            return Miss(self.name, site.qualname, problem, site.place(), near=problem != _STAYS)
        return Match({"args": args}, claims=frozenset({""}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        tokens = site.serving.max_tokens
        spec = GrownTableSpec(tokens, _longer(match.roles["args"], tokens))
        return Rewrite(site.qualname, self.name, str(spec), layer=spec, claims=match.claims)


_STAYS = "its buffers stay as long as they are"


def _longer(args: tuple[object, ...], tokens: int) -> tuple[object, ...]:
    return tuple(tuple(tokens if n == TOKENS else n for n in x) if isinstance(x, tuple) else x for x in args)


def _problem(module: nn.Module, spec: GrownTableSpec, args: tuple[object, ...]) -> str:
    """Why the module does not grow a table, or grows one that is not the same; "" if neither."""
    before, after = copy.deepcopy(module), copy.deepcopy(module)
    try:
        spec.grow(after)
        shapes = [[(name, b.shape) for name, b in m.named_buffers()] for m in (before, after)]
        if shapes[0] == shapes[1]:
            return _STAYS
        few = GrownTableSpec(TOKENS, args)
        return "" if torch.equal(few.grow(before), few.grow(after)) else "its table changes as it grows"
    except RUN_ERRORS:
        return _STAYS
