"""Stage 2: the meta model and what the engine asks for become a Plan. Decides everything, changes nothing.

A Plan is the same on every rank and for every pipeline stage; apply filters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from tfbackend.classifier import ClassifierPlan
from tfbackend.distances import biases_by_distance
from tfbackend.errors import PlanConflictError, UnsupportedModelError
from tfbackend.fusers.base import Miss, Rewrite, Site
from tfbackend.graph.numbering import TokenNumbering
from tfbackend.graph.observe import needs_masks, observe
from tfbackend.graph.selection import Selection, find_selection
from tfbackend.graph.stages import Stages, find_stages
from tfbackend.graph.statecache import kept_by
from tfbackend.graph.stateheld import held_sites
from tfbackend.graph.statepass import keep
from tfbackend.graph.token_types import count_types, takes_types
from tfbackend.graph.trial import plain_float32
from tfbackend.grouping import Grouped, counts_kept
from tfbackend.head import HeadPlan
from tfbackend.inline import Inlined, behind_interface
from tfbackend.layerspecs import (
    AttentionSpec,
)
from tfbackend.meta import GENERATE, MetaModel
from tfbackend.mixing import mixing_modules
from tfbackend.mlaspec import MLASpec
from tfbackend.nativespec import NATIVE_SPECS, NativeSpec
from tfbackend.plan_alone import run_alone, unplanned
from tfbackend.plan_reading import explained, parts_read, read_heads, read_token_numbering
from tfbackend.plan_refusals import (
    attention_refusals,
    context_refusals,
    experts_refusals,
    may_run_alone,
    running_refusals,
)
from tfbackend.planner import Planner, collect_proven
from tfbackend.positions import Numbered, following_positions
from tfbackend.proof import Prover
from tfbackend.refusals import (
    inline_refusal,
    mixing_refusal,
    nameless_refusal,
    positions_refusal,
    stages_refusal,
    unobserved_refusal,
)
from tfbackend.serving import ServingSpec
from tfbackend.sharing import gather_heads
from tfbackend.source.edits import apply_edits
from tfbackend.source.forward import defined_name, scratch
from tfbackend.statespec import StateSpec
from tfbackend.tied import laid_out_alike
from tfbackend.unread import unread_parts


@dataclass(frozen=True)
class Plan:
    """All that will be done to one model.

    Attributes:
        architecture: class of the full Transformers model.
        rewrites: every change, by site and fuser.
        misses: every pattern that looked applicable and was not applied, with its reason.
        unproven: "qualname: why" of rewrites that the proof budget left out.
        proofs: how many kinds of rewrite were proven, and how many of them from the cache.
        head: what the head class does between the base model's output and the logits.
        numbering: how the model numbers its tokens by looking at which they are; None where it takes positions.
        typed: whether each call may be given types of tokens.
        settling: (module path, method without arguments) of changes that the model makes to its weights once.
        types: how many of them there are; 0 where type 0 is not the same as none.
        classifier: what a class does between the hidden states and the logits of its labels, where it is one.
        task, base_path, embedding_path, head_path, tied: see meta.MetaModel.
        layers: path of the list of decoder layers, relative to the base model.
        forwards: the text of every forward that changes, by site.
        methods: likewise of another method, where attention that a model wrote out was cut from one.
        masked: whether the model cannot go without the masks that Transformers makes.
        numbered: paths of modules that count tokens themselves and are told the positions instead.
        stages: how the layers can be shared out to pipeline stages; None where there is one.
        alone: why each prompt is run by itself, in Transformers' own code; empty where prompts run side by side.
    """

    architecture: str
    rewrites: tuple[Rewrite, ...]
    misses: tuple[Miss, ...]
    head: HeadPlan | None
    base_path: str
    embedding_path: str
    head_path: str | None
    tied: bool
    layers: str = ""
    unproven: tuple[str, ...] = ()
    proofs: tuple[int, int] = (0, 0)
    forwards: Mapping[str, str] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    masked: bool = False
    numbered: tuple[str, ...] = ()
    task: str = GENERATE
    classifier: ClassifierPlan | None = None
    numbering: TokenNumbering | None = None
    typed: bool = False
    stages: Stages | None = None
    settling: tuple[tuple[str, str], ...] = ()
    types: int = 1
    alone: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        owners: dict[tuple[str, str], Rewrite] = {}
        for rewrite in self.rewrites:
            for claim in rewrite.claims:
                path = ".".join(part for part in (rewrite.qualname, claim) if part)
                other = owners.setdefault((path, "" if claim != "attn" else "attn"), rewrite)
                if other is not rewrite:
                    raise PlanConflictError(
                        "Two rewrites claim one site.", where=path, found=f"{other.fuser} and {rewrite.fuser}"
                    )

    @cached_property
    def by_site(self) -> Mapping[str, tuple[Rewrite, ...]]:
        sites: dict[str, list[Rewrite]] = defaultdict(list)
        for rewrite in self.rewrites:
            sites[rewrite.qualname].append(rewrite)
        return {path: tuple(found) for path, found in sites.items()}

    @property
    def attention(self) -> Iterator[tuple[str, AttentionSpec | MLASpec]]:
        """(site, spec) of every attention layer."""
        for rewrite in self.rewrites:
            for _, spec in rewrite.children:
                if isinstance(spec, (AttentionSpec, MLASpec)):
                    yield rewrite.qualname, spec

    @property
    def both_ways(self) -> bool:
        """Whether tokens see those after them, in any layer."""
        return any(isinstance(spec, AttentionSpec) and spec.both for _, spec in self.attention)

    @property
    def max_context(self) -> int | None:
        """Tokens of the longest context in which every layer attends as Transformers' does; None for any."""
        return min((spec.max_context for _, spec in self.attention if spec.max_context is not None), default=None)

    @property
    def state(self) -> Iterator[tuple[str, StateSpec | NativeSpec]]:
        """(site, spec) of every mixer that keeps state."""
        for rewrite in self.rewrites:
            for _, spec in rewrite.children:
                if isinstance(spec, (StateSpec, *NATIVE_SPECS)):
                    yield rewrite.qualname, spec

    @property
    def counts(self) -> Counter[str]:
        """Rewrites by fuser."""
        return Counter(rewrite.fuser for rewrite in self.rewrites)

    @property
    def summary(self) -> str:
        """One line: what was rewritten and how much was not."""
        if self.alone:
            return f"each prompt by itself, in Transformers' own code, because: {self.alone[0]}"
        done = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        missed = f"{len(self.misses)} missed" if self.misses else "none missed"
        unproven = f", {len(self.unproven)} unproven" if self.unproven else ""
        numbered = f", {len(self.numbered)} given positions instead of a count of tokens" if self.numbered else ""
        return f"{done}{numbered}; {missed}{unproven}"


def make_plan(meta: MetaModel, serving: ServingSpec, prover: Prover | None = None) -> Plan:
    """Decide every rewrite of `meta` and prove each kind of it.

    Raises:
        UnsupportedModelError: the model's attention cannot be served faithfully, or its head cannot be read.
    """
    plan, refusals = draft_plan(meta, serving, prover)
    if refusals:
        raise refusals[0]
    return plan


def draft_plan(
    meta: MetaModel, serving: ServingSpec, prover: Prover | None = None
) -> tuple[Plan, tuple[UnsupportedModelError, ...]]:
    """The plan as far as it goes, and each reason why the model may not be served with it: what `inspect` shows.

    Raises:
        UnsupportedModelError: the model does not run on meta tensors, so there is nothing to plan.
    """
    # An engine builds models with its own device and dtype as torch's defaults.
    with plain_float32():
        try:
            plan, refusals = _draft(meta, serving, prover or Prover())
        except UnsupportedModelError as error:
            if not may_run_alone(meta, serving, [error]):
                raise
            plan, refusals = unplanned(meta), (error,)
        return (run_alone(plan, refusals), ()) if may_run_alone(meta, serving, refusals) else (plan, refusals)


def _draft(meta: MetaModel, serving: ServingSpec, prover: Prover) -> tuple[Plan, tuple[UnsupportedModelError, ...]]:
    base = meta.base
    if not meta.embedding_path:
        raise nameless_refusal(type(base).__name__)
    observation = observe(base)
    directory = (prover.directory.parent / "forwards" if prover.directory else None) or scratch()
    grouped = Grouped()
    with ExitStack() as edited:
        if observation.reads_values:
            grouped = edited.enter_context(counts_kept(base, observation, directory))
            observation = observe(base) if grouped.forwards else observation
        if observation.problem:
            raise unobserved_refusal(type(base).__name__, observation.problem, reads_values=observation.reads_values)
        inlined = edited.enter_context(behind_interface(base, observation, serving, directory))
        if inlined.methods:
            observation = observe(base)
        assert not observation.problem, observation.problem
        tabled = edited.enter_context(biases_by_distance(base, observation, serving, directory))
        observation = observe(base) if tabled.forwards else observation
        assert not observation.problem, observation.problem
        keeping = keep(base) if not serving.stateless and kept_by(base.config) else None
        held = held_sites(base, replace(observation, keeping=keeping)) if observation.counting else ()
        numbered = edited.enter_context(following_positions(base, observation, directory, held))
        observation = tabled.read(explained(numbered.observation, inlined))
        observation = replace(observation, selection=find_selection(base, observation), keeping=keeping)
        plan, refusals = _decide(meta, serving, prover, replace(numbered, observation=observation), inlined)
        return replace(plan, forwards={**grouped.forwards, **tabled.forwards, **plan.forwards}), refusals


def _decide(
    meta: MetaModel, serving: ServingSpec, prover: Prover, numbered: Numbered, inlined: Inlined
) -> tuple[Plan, tuple[UnsupportedModelError, ...]]:
    base, observation = meta.base, numbered.observation
    head, classifier, refusals = read_heads(meta, observation)
    if meta.task != GENERATE:
        idle = unread_parts(base, observation, parts_read(meta, classifier))
        observation = replace(observation, idle=idle)
    planner = Planner(meta, serving, observation)
    rewrites, misses, unproven = collect_proven(planner, prover, inlined.methods)
    if serving.tp_size > 1:
        rewrites = [*gather_heads(rewrites, inlined.methods)]
    rewrites, misses = laid_out_alike(meta, observation, rewrites, misses)
    plan = Plan(
        architecture=type(meta.model).__name__,
        rewrites=tuple(rewrites),
        misses=tuple(misses),
        head=head,
        base_path=meta.base_path,
        embedding_path=meta.embedding_path,
        head_path=meta.head_path,
        tied=meta.tied,
        layers=_layer_list(base),
        unproven=tuple(unproven),
        proofs=prover.counts,
        task=meta.task,
        classifier=classifier,
    )
    refusals += map(inline_refusal, inlined.problems.items())
    refusals += attention_refusals(plan, observation, serving, inlined)
    refusals += context_refusals(plan, serving)
    refusals += experts_refusals(plan, serving)
    refusals += running_refusals(base, plan, observation)
    kept = frozenset(path for path, _ in plan.state)
    missed = {miss.qualname: miss.reason for miss in misses if miss.fuser == "state"}
    for path, found in mixing_modules(base, plan.layers, observation, prover, kept):
        refusals.append(mixing_refusal(path, found, missed.get(path, "")))
    if numbered.problem:
        refusals.append(positions_refusal((observation.counting or numbered.modules)[0], numbered.problem))
    numbering = read_token_numbering(meta, serving, observation, planner.vocabulary, refusals)
    forwards, methods = _texts(plan, planner.sites, inlined, numbered)
    masked = (bool(inlined.methods) or isinstance(observation.selection, Selection)) and needs_masks(base)
    plan = replace(plan, forwards=forwards, methods=methods, masked=masked, numbered=numbered.modules)
    types = count_types(base, observation) if serving.whole_prompts else 1
    typed = serving.whole_prompts and takes_types(base) and types > 0
    stages = find_stages(base, plan.layers) if serving.pp_size > 1 else None
    if stages is not None and stages.problem:
        refusals.append(stages_refusal(stages))
    settling = tuple(observation.settling)
    plan = replace(plan, numbering=numbering, typed=typed, types=types, stages=stages, settling=settling)
    return plan, tuple(refusals)


def _forwards(plan: Plan, sites: Mapping[str, Site]) -> dict[str, str]:
    """The edited source of every site that has edits."""
    texts = {}
    for path, rewrites in plan.by_site.items():
        edits = [edit for rewrite in rewrites for edit in rewrite.edits]
        source = sites[path].source if edits else ""
        if not isinstance(source, str):
            texts[path] = apply_edits(source.text, edits)
    return texts


def _texts(
    plan: Plan, sites: Mapping[str, Site], inlined: Inlined, numbered: Numbered
) -> tuple[dict[str, str], dict[str, str]]:
    """(forwards, other methods) that change, by site. A text of `numbered` was made from that of `inlined`."""
    forwards, methods = _forwards(plan, sites), dict[str, str]()
    texts = {(path, defined_name(text)): text for path, text in inlined.methods.items()} | numbered.methods
    for (path, name), text in texts.items():
        known = forwards if name == "forward" else methods
        if name != "forward" and path in methods:
            raise PlanConflictError("Two methods of one module would change.", where=path, found=name)
        known.setdefault(path, text)
    whole = {rewrite.qualname for rewrite in plan.rewrites if rewrite.layer is not None}
    if taken := whole & {*numbered.modules}:
        raise PlanConflictError("A module that is told positions would be replaced.", where=min(taken))
    return forwards, methods


def _layer_list(base: nn.Module) -> str:
    """Path of the longest ModuleList whose entries are of few classes: the decoder layers."""
    lists = [(len(m), name) for name, m in base.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=lambda found: (found[0], -found[1].count(".")), default=(0, ""))[1]
