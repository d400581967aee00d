"""The rungs that need no engine: building, planning, proving, keeping accounts of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from tfbackend import meta
from tfbackend.errors import TfbackendError, UnsupportedModelError
from tfbackend.inspection.accounts import Accounts, keep_accounts
from tfbackend.inspection.headers import Headers
from tfbackend.inspection.ranking import with_ranks
from tfbackend.meta import GENERATE, MetaModel
from tfbackend.plan import Plan, draft_plan
from tfbackend.proof import Prover
from tfbackend.serving import ServingSpec
from tfbackend.verification.prompts import TOKENS
from tfbackend.verification.rungs import FAIL, PASS, UNKNOWN, Finding
from tfbackend.weights import build_weight_map

LONGEST_TEXT = 1200
"""Tokens; longer than the widest window that prompts reach past."""
_PROOF_SECONDS = 120.0
_NAMED = 3


@dataclass
class Structure:
    """What is known of a model before any engine runs.

    Attributes:
        config: its config.
        trust_remote_code: whether code that comes with the model may run.
        proofs: folder of remembered proofs, None for none.
        task: one of meta.TASKS, what it is served for.
        built, plan: the model on meta and its plan in float32 for one rank, once they are made.
    """

    config: PretrainedConfig
    trust_remote_code: bool = False
    proofs: Path | None = None
    task: str = GENERATE
    built: MetaModel | None = None
    plan: Plan | None = None
    refusals: Sequence[UnsupportedModelError] = field(default=())

    def build(self) -> Finding:
        """Build on meta."""
        try:
            code = self.trust_remote_code
            self.built = meta.build(self.config, torch.float32, trust_remote_code=code, task=self.task)
        except TfbackendError as error:
            return Finding(FAIL, detail=str(error))
        model = self.built.model
        again = f"{self.built.head_path}.weight" if self.built.tied else ""  # on meta both have one of their own
        count = sum(parameter.numel() for name, parameter in model.named_parameters() if name != again)
        figure = f"{type(model).__name__}, {count:,} parameters"
        return Finding(PASS, figure, float(count), "parameters")

    def prove(self) -> Finding:
        """Plan, and prove each kind of rewrite."""
        try:
            self.plan, self.refusals = self.plan_for(1)
        except TfbackendError as error:
            return Finding(FAIL, detail=str(error))
        plan, (kinds, kept) = self.plan, self.plan.proofs
        refuted = sum("its proof failed" in miss.reason for miss in plan.misses)
        figure = f"{len(plan.rewrites)} rewrites of {kinds} kinds"
        figure += f" ({kept} remembered)" if kept else ""
        figure += f", {len(plan.misses)} missed" if plan.misses else ""
        figure += f", {refuted} of them refuted and left as they were" if refuted else ""
        if self.refusals:
            return Finding(FAIL, figure, float(len(plan.rewrites)), "rewrites", _some(list(map(str, self.refusals))))
        if plan.unproven:
            return Finding(UNKNOWN, f"{figure}, {len(plan.unproven)} unproven", detail=_some(plan.unproven))
        return Finding(PASS, figure, float(len(plan.rewrites)), "rewrites")

    def plan_for(self, ranks: int = 1, stages: int = 1) -> tuple[Plan, tuple[UnsupportedModelError, ...]]:
        """The plan in float32 for so many tensor-parallel ranks and pipeline stages, and why it may not be served with
        it."""
        assert self.built is not None
        serving = ServingSpec(dtype=torch.float32, tp_size=ranks, pp_size=stages)
        if self.task != GENERATE:
            serving = replace(serving, whole_prompts=True, max_model_len=self.context)
        return draft_plan(self.built, serving, Prover(self.proofs, _PROOF_SECONDS))

    @property
    def limit(self) -> int | None:
        """Longest context of the model (tokens), None where the config names none."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def context(self) -> int:
        """Tokens of the longest text that a model that pools is asked about."""
        return min(LONGEST_TEXT, max(1, (self.limit or LONGEST_TEXT) - TOKENS))

    def account(self, headers: Headers) -> Finding:
        """The ledger from the headers of the checkpoint."""
        assert self.built is not None and self.plan is not None
        if headers.problems:
            pickled = not headers.tensors and any("pickled" in problem for problem in headers.problems)
            return Finding(UNKNOWN if pickled else FAIL, detail=_some(headers.problems))
        if not headers.tensors:
            return Finding(UNKNOWN, detail=headers.note or "no tensor is named anywhere")
        try:
            code = self.trust_remote_code
            headers = with_ranks(headers, self.config, self.built, self.plan, trust_remote_code=code)
        except TfbackendError as error:
            return Finding(FAIL, detail=str(error))
        quantized = getattr(self.config, "quantization_config", None) is not None
        weight_map = build_weight_map(self.built.model, self.plan, quantized=quantized)
        return _judge_accounts(keep_accounts(weight_map, self.built.model, headers, quantized=quantized))


def _judge_accounts(accounts: Accounts) -> Finding:
    counts = accounts.counts
    figure = f"{len(accounts.entries):,} tensors: {counts['placed']:,} placed, {counts['dropped']:,} dropped by rule"
    problems = [
        f"{entry.tensor.name} is {entry.outcome}" + (f": {entry.note}" if entry.note else "")
        for entry in accounts.entries
        if entry.outcome not in ("placed", "dropped")
    ]
    problems += [f"{gap.place} is filled by nothing, {gap.wanted} would fill it" for gap in accounts.gaps]
    if problems:
        return Finding(FAIL, f"{figure}, {len(problems)} problems", float(len(problems)), "problems", _some(problems))
    return Finding(PASS, figure, float(counts["placed"]), "tensors")


def _some(items: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f"; and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return "; ".join(items[:_NAMED]) + more
