"""Experts that all run on every token, weighed with 0 where not chosen -> a routed-experts layer.

    rows = x.repeat(experts, 1) * scores.T.reshape(-1, 1)
    out.add_(self.experts(rows).view(experts, -1, hidden).sum(0))      ->      out.add_(self.routed(x, scores))

Two things are proven apart, each by running it: what the child computes, row by row, each block of rows by an expert of
its own; and that the forward does with whatever stands in for the child what the layer does with scores.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import ClassVar

import torch

from tfbackend.fusers.base import Match, Miss, Rewrite, Site, WeightEntry
from tfbackend.fusers.dense_reading import DenseError, read_block, read_dense
from tfbackend.fusers.experts import has_kernel
from tfbackend.graph.interface import has_experts_interface
from tfbackend.graph.observe import TOKENS
from tfbackend.loopedspec import DenseExpertsSpec
from tfbackend.source.edits import Edit


class DenseExpertsFuser:
    name: ClassVar[str] = "dense_experts"

    def match(self, site: Site) -> Match | Miss:
        name = next(_candidates(site), None)
        if name is None:
            return Miss(self.name, site.qualname, "gives no child a row for each token and expert", near=False)
        if site.serving.quantization:
            return Miss(self.name, site.qualname, "quantized experts have no loader yet", site.place())
        if isinstance(site.source, str) or hasattr(site.module, "routed"):
            return Miss(self.name, site.qualname, "its forward cannot be edited", site.place())
        try:
            reading = read_dense(site.child(name), site.observation.calls[site.path(name)][0][0][0])
            text, top_k, before = read_block(site, name, reading.experts.num_experts)
        except DenseError as error:
            return Miss(self.name, site.qualname, str(error), site.place())
        experts = reading.experts.with_top_k(1 if before else top_k)
        spec = DenseExpertsSpec(experts, top_k, before, reading.parts)
        spec = spec if has_kernel(experts, site.serving) else spec.without_kernel()
        inside = {f"{name}.{path}" if path else name for path, _ in site.child(name).named_modules()}
        edits = tuple(_line_edits(site.source.text, text, self.name))
        return Match({"spec": spec, "child": name}, edits, frozenset({*inside, "routed"}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec, child = match.roles["spec"], match.roles["child"]
        target = "routed.routed.runner.routed_experts"
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            children=(("routed", spec),),
            removes=(child,),
            edits=match.edits,
            weights=tuple(WeightEntry(f"{child}.{p.source}", f"{target}.{p.target}", p.shard) for p in spec.parts),
            claims=match.claims,
            captured=tuple((f"{child}.{p.source}", p.target) for p in spec.parts),
        )


def _candidates(site: Site) -> Iterator[str]:
    """Children that hold stacked matrices and were given one tensor, of a row for each token and matrix."""
    for name, child in site.module.named_children():
        calls, parameters = site.observation.calls.get(site.path(name), []), list(child.parameters())
        if len(calls) != 1 or has_experts_interface(child) or not all(p.dim() == 3 for p in parameters):
            continue
        args, kwargs = calls[0]
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or len(parameters) < 2:
            continue
        if args[0].shape[:-1].numel() == TOKENS * min(p.shape[0] for p in parameters):
            yield name


def _line_edits(before: str, after: str, by: str) -> Iterator[Edit]:
    """The edits that make one text of the other, whole lines."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line))
    for tag, i, k, j, m in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield Edit(starts[i], starts[k], "".join(new[j:m]), by)
