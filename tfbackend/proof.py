"""Stage 3: each kind of rewrite is run against its original before it is used.

Plain torch on both sides, float32, CPU, the same random weights and inputs. The site's own class runs with its own
forward, and a twin of it runs with the rewritten forward and with `reference()` layers in place of the new children.
Wide linears are stood in for by products of two narrow matrices of the true outer shapes: a rewrite moves whole
linears about and never looks inside one, and a 70B layer is proven in milliseconds.

What a passed proof says: on these inputs both agree to rounding. What it does not say: that vLLM's kernels are right.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tfbackend.errors import PlanConflictError
from tfbackend.expertspec import ExpertsSpec
from tfbackend.fusers.base import Miss, Rewrite, Site
from tfbackend.graph.interface import RUN_ERRORS, Recorder, answering
from tfbackend.graph.trial import apart, copied, materialise, plain_float32, random_inputs
from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.layerspecs import (
    ActMulSpec,
    AttentionSpec,
    EmbeddingSpec,
    FixedRopeSpec,
    GrownTableSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    NormSpec,
    QKVSpec,
    RotarySpec,
)
from tfbackend.loopedspec import LoopedExpertsSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.moespec import MoESpec
from tfbackend.nativespec import NATIVE_SPECS
from tfbackend.proof_key import content, proof_key
from tfbackend.proof_parts import ReferenceMoE, SideBySide, Turned, expanded, part_of, place_of, reference_experts
from tfbackend.source.edits import apply_edits
from tfbackend.source.forward import keep_defaults
from tfbackend.standinspec import AllKeysSpec, IdleSpec

TOLERANCE = 2e-5
"""Largest difference allowed, relative to the largest value of the original's output."""


@dataclass
class Prover:
    """Proves rewrites, within a time budget, with results kept on disk.

    Attributes:
        directory: where results are kept; None keeps none.
        budget: seconds of proving; rewrites that are not reached are listed as unproven, never as proven.
    """

    directory: Path | None = None
    budget: float = 20.0
    _known: dict[str, str] = field(default_factory=dict)
    _from_disk: set[str] = field(default_factory=set)

    @property
    def counts(self) -> tuple[int, int]:
        """(kinds proven, of them read from disk)."""
        return sum(map(_is_proof, self._known)), sum(map(_is_proof, self._from_disk))

    def check(
        self, sites: Mapping[str, Site], rewrites: Sequence[Rewrite]
    ) -> tuple[list[Rewrite], list[Miss], list[str]]:
        """(rewrites that may be used, Misses for those that differ, "qualname: why" of the unproven)."""
        deadline, good, failed, unproven = time.monotonic() + self.budget, [], [], []
        by_site: dict[str, list[Rewrite]] = {}
        for rewrite in rewrites:
            by_site.setdefault(rewrite.qualname, []).append(rewrite)
        verdicts: dict[tuple[int, str], str | None] = {}
        for path, group in by_site.items():
            site = sites[path]
            slot = (id(site.kind), repr([content(r) for r in group]))
            if slot not in verdicts:
                verdicts[slot] = self._verdict(site, group, deadline)
            problem = verdicts[slot]
            if problem is None:
                unproven.append(f"{path}: the proof budget of {self.budget:g} s was spent")
            if not problem:
                good += group
                continue
            failed += [
                Miss(r.fuser, path, f"not used, its proof failed: {problem}", site.place())
                for r in group
                if r.fuser != "attention"
            ]
            good += [r for r in group if r.fuser == "attention"]
        return good, failed, unproven

    def _verdict(self, site: Site, group: Sequence[Rewrite], deadline: float) -> str | None:
        """ "" where proven, a problem where not, None where time ran out."""
        if all(needs_no_proof(rewrite) for rewrite in group):
            return ""
        key = proof_key(site, group)
        if (kept := self._recall(key)) is not None:
            return kept
        if time.monotonic() > deadline:
            return None
        problem = prove(site, group)
        self._keep(key, problem)
        return problem

    def once(self, key: str, run: Callable[[], str]) -> str:
        """What `run` answers, from memory or from disk where it was asked before."""
        if (kept := self._recall(key)) is None:
            kept = run()
            self._keep(key, kept)
        return kept

    def _recall(self, key: str) -> str | None:
        if key not in self._known and self.directory is not None:
            path = self.directory / f"{key}.json"
            if path.exists():
                self._known[key] = str(json.loads(path.read_text())["problem"])
                self._from_disk.add(key)
        return self._known.get(key)

    def _keep(self, key: str, problem: str) -> None:
        self._known[key] = problem
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = self.directory / f"{key}.{time.monotonic_ns()}.tmp"
            temporary.write_text(json.dumps({"problem": problem}))
            temporary.replace(self.directory / f"{key}.json")


def _is_proof(key: str) -> bool:
    return "-" not in key


_COMPARED = ("dense_experts", "state")
"""Fusers that compare before they answer."""


def needs_no_proof(rewrite: Rewrite) -> bool:
    """A linear for a linear, frequencies that are only held still, a choice that is none, an attention layer behind an
    unchanged call and what only says how ranks share a linear have no two sides to compare; looped experts, stacks
    of linears and mixers with their state were read by comparing."""
    if isinstance(rewrite.layer, (LoopedExpertsSpec, GroupedLinearSpec)) or rewrite.fuser in _COMPARED:
        return True
    if isinstance(rewrite.layer, (AllKeysSpec, IdleSpec, LinearSpec, FixedRopeSpec, GrownTableSpec)):
        return not rewrite.weights
    only_says = not (rewrite.layer or rewrite.children or rewrite.edits or rewrite.attributes)
    return rewrite.fuser == "attention" or only_says


def prove(site: Site, group: Sequence[Rewrite]) -> str:
    """Run the site's original and its rewritten form on the same random inputs; "" if they agree, else what is
    wrong."""
    calls = site.observation.calls.get(site.kind.first)
    if not calls:
        return "the model did not call it in the observed run, so it has no inputs to be proven with"
    problem = _prove(site, group, calls[0])
    if problem.startswith(_NEEDS_MASK):
        problem = _prove(site, group, calls[0], masked=True)
    return problem


_NEEDS_MASK = ("TypeError: 'NoneType'", "AttributeError: 'NoneType'")
"""How the error of a forward begins that cannot go without the mask it is called with."""


def _prove(site: Site, group: Sequence[Rewrite], call: Any, *, masked: bool = False) -> str:
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad(), plain_float32():
        try:
            original = materialise(site.module, generator)
            for size in _sizes(group):
                args, kwargs = random_inputs(call, original, generator, size, site.observation, masked=masked)
                reference = _Reference(site, group)
                with answering(reference.attend):
                    # Decorators of the original are part of what it does.
                    before = _run(original, type(original).forward, args, kwargs)
                with answering(reference.attend_rewritten(original)):
                    after = reference.run(original, args, kwargs)
                if problem := _compare(before, after, min((r.outputs for r in group if r.outputs), default=None)):
                    return problem
        except PlanConflictError:
            raise
        except RUN_ERRORS as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _sizes(group: Sequence[Rewrite]) -> tuple[float, ...]:
    """Standard deviations of the inputs. Next to inputs of 1, the eps of a norm is below rounding."""
    return (1.0, 1e-3, 1e3) if any(isinstance(r.layer, NormSpec) for r in group) else (1.0,)


def _run(module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(module, *copied(args), **copied(kwargs))


def _compare(before: Any, after: Any, outputs: int | None = None) -> str:
    left = [x for x in tree_leaves(before) if isinstance(x, torch.Tensor)][:outputs]
    right = [x for x in tree_leaves(after) if isinstance(x, torch.Tensor)]
    if len(left) != len(right) or not left:
        return f"the original gives {len(left)} tensors, the rewritten one {len(right)}"
    for a, b in zip(left, right, strict=True):
        if a.shape != b.shape:
            return f"the original gives {tuple(a.shape)}, the rewritten one {tuple(b.shape)}"
        worst = apart(a, b)
        if not worst <= TOLERANCE:
            return f"outputs differ by {worst:.2g} of the largest value, {TOLERANCE:g} is allowed"
    return ""


_KINDS = ("_modules", "_parameters", "_buffers")


def _kinds(module: nn.Module) -> Iterator[dict[str, Any]]:
    yield from (vars(module)[kind] for kind in _KINDS)


class _Reference:
    """The rewritten side: a shallow copy of the original with the new children in reference form."""

    def __init__(self, site: Site, group: Sequence[Rewrite]) -> None:
        self.site, self.group = site, group
        specs = [spec for r in group for _, spec in r.children]
        whole = [replace(spec, window=None, chunk=None) for spec in specs if isinstance(spec, AttentionSpec)]
        self.latent = next((spec for spec in specs if isinstance(spec, MLASpec)), None)
        whole += [expanded(self.latent)] if self.latent is not None else []
        self.attention = whole[0].reference() if whole else None
        self.tables = whole[0].distance_bias or "" if whole else ""

    def attend(self, module: nn.Module, q: Any, k: Any, v: Any, mask: Any = None, **keywords: Any) -> Any:
        if self.attention is None:
            return q.transpose(1, 2)
        biases = keywords.get("key_bias"), keywords.get(self.tables)
        return self.attention(q, k, v, keywords.get("s_aux"), *biases)

    def attend_rewritten(self, original: nn.Module) -> Recorder:
        """What answers the rewritten side, which may hand over latents in place of keys and values."""
        if self.latent is None:
            return self.attend
        made = self.latent.reference()
        made.expand = original.get_submodule(self.latent.expand)
        return lambda module, q, k, v, mask=None, **keywords: made(q, k, v)

    def run(self, original: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole = [r.layer for r in self.group if r.layer is not None]
        if whole:
            assert isinstance(whole[0], (NormSpec, EmbeddingSpec, LinearSpec))
            if any(entry.transposed for rewrite in self.group for entry in rewrite.weights):
                return Turned(original)(*args, **kwargs)
            return _copy_state(whole[0].reference(), original)(*args, **kwargs)
        twin = copy.copy(original)
        twin.__dict__ = {**vars(original), **{kind: dict(vars(original)[kind]) for kind in _KINDS}}
        for rewrite in self.group:
            for name in rewrite.removes:
                next(own for own in _kinds(twin) if name in own).pop(name)
            for name, spec in rewrite.children:
                if not isinstance(spec, (AttentionSpec, MLASpec)):
                    twin._modules[name] = _reference_child(name, spec, rewrite, original)
            for name, value in rewrite.attributes:
                twin.__dict__[name] = value
        edits = [edit for rewrite in self.group for edit in rewrite.edits]
        return _run(twin, self._forward(edits), args, kwargs)

    def _forward(self, edits: Sequence[Any]) -> Any:
        source = self.site.source
        if not edits:
            return type(self.site.module).forward
        assert not isinstance(source, str)
        text = apply_edits(source.text, edits)
        scope: dict[str, Any] = {}
        code = compile("from __future__ import annotations\n" + text, f"<proof of {self.site.qualname}>", "exec")
        exec(code, {**source.function.__globals__}, scope)
        return keep_defaults(scope[source.name], source.function)


def _copy_state(reference: nn.Module, original: nn.Module) -> nn.Module:
    for name, parameter in original.named_parameters():
        setattr(reference, name, parameter)
    return reference


def _reference_child(name: str, spec: LayerSpec, rewrite: Rewrite, original: nn.Module) -> nn.Module:
    if isinstance(spec, (QKVSpec, MergedLinearSpec)):
        parts = sorted((e for e in rewrite.weights if e.target == name), key=lambda entry: place_of(entry.shard))
        return SideBySide([part_of(original.get_submodule(e.source), e.transposed) for e in parts], spec)
    if isinstance(spec, ExpertsSpec):
        return reference_experts(spec, original)
    if isinstance(spec, NATIVE_SPECS):
        return spec.reference().bind(original, {e.place.removeprefix(f"{name}."): e.source for e in rewrite.weights})
    if isinstance(spec, MoESpec):
        return ReferenceMoE(spec, name, rewrite.weights, original)
    assert isinstance(spec, (ActMulSpec, NormSpec, EmbeddingSpec, LinearSpec, RotarySpec))
    return spec.reference()
