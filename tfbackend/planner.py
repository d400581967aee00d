"""Asks every fuser about every site of a model once, and puts the answers that are not proven aside."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tfbackend.fusers import FUSERS
from tfbackend.fusers.base import Fuser, Match, Miss, Rewrite, Site
from tfbackend.graph.kinds import Kind, KindKey, kind_key, tampered
from tfbackend.graph.observe import Observation
from tfbackend.layerspecs import (
    ROWWISE,
    ROWWISE_PARTIAL,
    AttentionSpec,
)
from tfbackend.meta import MetaModel
from tfbackend.mlaspec import MLASpec
from tfbackend.proof import Prover
from tfbackend.serving import ServingSpec
from tfbackend.sharing import merged_for_ranks
from tfbackend.styles import tensor_parallel_styles


def collect_proven(
    planner: Planner, prover: Prover, written_out: Collection[str] = ()
) -> tuple[list[Rewrite], list[Miss], list[str]]:
    """(rewrites that may be used, misses, unproven). `written_out` are paths of attention that the model wrote out.

    Where a proof fails all is collected again without that rewrite: other fusers may have what it had claimed, and
    what it had relied on, a style of its neighbour, is not to be.
    """
    denied: dict[tuple[str, str], Miss] = {}
    while True:
        rewrites, misses = planner.collect(denied)
        good, failed, unproven = prover.check(planner.sites, rewrites)
        failed = failed or _lone_latents(good)
        if planner.serving.tp_size > 1:
            failed = failed or merged_for_ranks(good, written_out)
        if not failed:
            return good, misses, unproven
        denied |= {(miss.fuser, miss.qualname): miss for miss in failed}


def _lone_latents(rewrites: Sequence[Rewrite]) -> list[Miss]:
    """Misses for layers over latents in a model that also has others: vLLM has one kind of page for a whole cache."""
    latent = [r for r in rewrites if any(isinstance(spec, MLASpec) for _, spec in r.children)]
    whole = [r for r in rewrites if any(isinstance(spec, AttentionSpec) for _, spec in r.children)]
    if not latent or not whole:
        return []
    reason = f"keys and values are cached whole, as in {whole[0].qualname}, which cannot do without"
    return [Miss(r.fuser, r.qualname, reason) for r in latent]


class Planner:
    """Walks the sites once. `sites` keeps, for each path with a rewrite, the site as its last fuser saw it."""

    def __init__(self, meta: MetaModel, serving: ServingSpec, observation: Observation) -> None:
        self.base, self.serving, self.observation = meta.base, serving, observation
        inside = meta.embedding_path.removeprefix(f"{meta.base_path}.")
        self.vocabulary = inside if meta.base_path else meta.embedding_path
        self.model_styles = tensor_parallel_styles(meta)
        self.styles: dict[str, str] = {}
        self.partial: set[str] = set()
        self.kinds: dict[KindKey, Kind] = {}
        self.matches: dict[tuple[Any, ...], Match | Miss] = {}
        self.sites: dict[str, Site] = {}
        self.denied: Mapping[tuple[str, str], Miss] = {}

    def collect(self, denied: Mapping[tuple[str, str], Miss]) -> tuple[list[Rewrite], list[Miss]]:
        """Every answer of every fuser. `denied` gives the Misses of (fuser, site) pairs that are not asked again."""
        self.styles, self.sites, self.denied, self.partial = dict(self.model_styles), {}, denied, set()
        rewrites, misses, claimed = [], [], set[str]()
        for path, module in self.base.named_modules():
            if not path or path in claimed or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                continue
            for answer in self._ask_all(path, module, claimed):
                if isinstance(answer, Rewrite):
                    rewrites.append(answer)
                    self._note_styles(path, answer)
                    claimed |= {f"{path}.{claim}" if claim else path for claim in answer.claims}
                elif answer.near:
                    misses.append(answer)
        return rewrites, misses

    def _note_styles(self, path: str, rewrite: Rewrite) -> None:
        """A linear becomes partial where one rewrite asks for it and another finds that it may be rowwise."""
        for child, style in rewrite.styles:
            name = f"{path}.{child}"
            if style == ROWWISE_PARTIAL:
                self.partial.add(name)
            else:
                self.styles[name] = ROWWISE_PARTIAL if style == ROWWISE and name in self.partial else style

    def _ask_all(self, path: str, module: nn.Module, claimed: set[str]) -> Iterator[Rewrite | Miss]:
        key = kind_key(module, self.observation.calls.get(path, []))
        kind = self.kinds.setdefault(key, Kind(path, module, self.observation))
        taken = frozenset[str]()
        for fuser in FUSERS:
            site = Site(path, module, kind, self.observation, self.serving, self.vocabulary, self.styles, taken)
            answer = self._ask(fuser, site, key)
            yield answer
            if isinstance(answer, Rewrite):
                self.sites[path] = site
                if "" in answer.claims:
                    return
                taken |= answer.claims

    def _ask(self, fuser: Fuser, site: Site, key: KindKey) -> Rewrite | Miss:
        if (denied := self.denied.get((fuser.name, site.qualname))) is not None:
            return denied
        if fuser.name != "attention" and (problem := tampered(site.module)):
            return Miss(fuser.name, site.qualname, f"left as it is: {problem}", near=fuser.name == "linear")
        per_site = fuser.name in ("embedding", "attention", "fixed_rope", "grown_table")
        slot = (fuser.name, (site.qualname,) if per_site else key, site.taken, self._styles_of(site))
        match = self.matches.get(slot)
        if match is None:
            match = self.matches[slot] = fuser.match(site)
        if isinstance(match, Miss):
            return replace(match, qualname=site.qualname)
        return fuser.rewrite(site, match)

    def _styles_of(self, site: Site) -> tuple[str | None, ...]:
        """A match may depend on how the model wants its linears shared out, which paths decide and not kinds."""
        if self.serving.tp_size == 1:
            return ()
        return tuple(site.tp_style.get(site.path(name)) for name, _ in site.module.named_children())
