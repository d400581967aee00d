"""Modules that are not called, and tied to some that are: they are laid out as those, whose parameters they share.

Of a block that a model repeats, each repeat may call a part of its own and leave the others be. A checkpoint has one
tensor for all repeats, and what it fills has to look alike in each: the same part of it on a rank, merged with the
same others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from tfbackend.fusers.base import Miss, Rewrite
from tfbackend.graph.observe import Observation, observe
from tfbackend.layerspecs import AttentionSpec
from tfbackend.meta import MetaModel
from tfbackend.mlaspec import MLASpec
from tfbackend.nativespec import NATIVE_SPECS
from tfbackend.statespec import StateSpec

_OWN = (AttentionSpec, MLASpec, StateSpec, *NATIVE_SPECS)
"""Layers that keep something for their site alone."""


def laid_out_alike(
    meta: MetaModel, observation: Observation, rewrites: Sequence[Rewrite], misses: Sequence[Miss]
) -> tuple[list[Rewrite], list[Miss]]:
    """The rewrites with those that modules take over which are not called from the called ones they are tied to, and
    the misses that remain. A module whose parameters the model reads in some other way takes over nothing."""
    pairs = _pairs(meta, observation)
    added: dict[tuple[str, str], Rewrite] = {}
    for rewrite in rewrites:
        for path in _places(rewrite, pairs):
            copy = replace(rewrite, qualname=path, edits=(), summary=f"{rewrite.summary}, tied to {rewrite.qualname}")
            added[rewrite.fuser, path] = copy
    touched = {path for (_, qualname), copy in added.items() for path in _modules(copy, qualname)}
    if not touched or not _runs_without(meta.base, touched):
        return [*rewrites], [*misses]
    known = {(rewrite.fuser, rewrite.qualname) for rewrite in rewrites}
    fresh = [copy for key, copy in added.items() if key not in known]
    return [*rewrites, *fresh], [miss for miss in misses if miss.qualname not in touched]


def _pairs(meta: MetaModel, observation: Observation) -> dict[str, list[str]]:
    """Paths of modules that are called, each with those that are tied to it and are not."""
    prefix, groups = f"{meta.base_path}." if meta.base_path else "", dict[str, set[str]]()
    ties: Mapping[str, str] = getattr(meta.model, "all_tied_weights_keys", None) or {}
    for tied, source in ties.items():
        if tied.startswith(prefix) and source.startswith(prefix):
            names = [name.removeprefix(prefix).rpartition(".")[0] for name in (source, tied)]
            groups.setdefault(names[0], {names[0]}).add(names[1])
    pairs = dict[str, list[str]]()
    for group in groups.values():
        called = [path for path in group if observation.calls.get(path)]
        pairs |= {path: sorted(group.difference(called)) for path in called}
    return pairs


def _modules(rewrite: Rewrite, path: str) -> list[str]:
    """Paths of the modules whose parameters a rewrite of the site at `path` carries."""
    names = [entry.source for entry in rewrite.weights] or ([""] if rewrite.layer is not None else [])
    return [f"{path}.{name}" if name else path for name in names]


def _places(rewrite: Rewrite, pairs: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Where the rewrite would have the same for modules that are not called."""
    carried = _modules(rewrite, rewrite.qualname)
    specs = [rewrite.layer, *(spec for _, spec in rewrite.children)]
    if not carried or any(isinstance(spec, _OWN) for spec in specs):
        return
    inside = carried[0].removeprefix(rewrite.qualname)
    for path in pairs.get(carried[0], ()):
        place = path.removesuffix(inside)
        wanted = [place + module.removeprefix(rewrite.qualname) for module in carried]
        if all(other in pairs.get(module, ()) for module, other in zip(carried, wanted, strict=True)):
            yield place


def _runs_without(base: nn.Module, paths: set[str]) -> bool:
    """Whether the model runs where these modules have no parameters: then it reads none of them."""
    with _bare([base.get_submodule(path) for path in paths]):
        return not observe(base).problem


@contextmanager
def _bare(modules: Sequence[nn.Module]) -> Iterator[None]:
    kept = [dict(module._parameters) for module in modules]
    for module in modules:
        module._parameters.clear()
    try:
        yield
    finally:
        for module, parameters in zip(modules, kept, strict=True):
            module._parameters.update(parameters)
