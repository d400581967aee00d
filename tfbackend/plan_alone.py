"""Plans that leave a model as it is: nothing is known of it, or each prompt is to be run by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tfbackend.errors import UnsupportedModelError
from tfbackend.meta import EMBED, MetaModel

if TYPE_CHECKING:
    from tfbackend.plan import Plan


def unplanned(meta: MetaModel) -> Plan:
    """The plan that leaves a model as it is."""
    from tfbackend.plan import Plan

    return Plan(
        architecture=type(meta.model).__name__,
        rewrites=(),
        misses=(),
        head=None,
        base_path=meta.base_path,
        embedding_path=meta.embedding_path,
        head_path=meta.head_path,
        tied=meta.tied,
        task=meta.task,
    )


def run_alone(plan: Plan, refusals: Sequence[UnsupportedModelError]) -> Plan:
    """The plan for a model that runs prompt by prompt: nothing is rewritten, and what no embedding follows from is left
    out."""
    return replace(
        plan,
        rewrites=tuple(r for r in plan.rewrites if r.fuser == "idle") if plan.task == EMBED else (),
        misses=(),
        unproven=(),
        forwards={},
        methods={},
        masked=False,
        numbered=(),
        classifier=None,
        numbering=None,
        typed=False,
        stages=None,
        settling=(),
        alone=tuple({(r.summary, r.found): _reason(r) for r in reversed(refusals)}.values())[::-1],
    )


def _reason(refusal: UnsupportedModelError) -> str:
    """What a refusal found, without what to do about it."""
    summary, where, found = refusal.summary.rstrip("."), refusal.where, refusal.found
    return f"{summary} ({where}: {found})" if found else f"{summary} ({where})"
