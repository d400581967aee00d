"""What a plan leaves out that a model may not be served without, each with its place and its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.interface import GROUPED
from tfbackend.graph.observe import Observation
from tfbackend.inline import Inlined
from tfbackend.meta import GENERATE, MetaModel
from tfbackend.refusals import context_refusal, looped_refusal, settling_refusal
from tfbackend.serving import ServingSpec
from tfbackend.sharing import uneven

if TYPE_CHECKING:
    from tfbackend.plan import Plan


def attention_refusals(
    plan: Plan, observation: Observation, serving: ServingSpec, inlined: Inlined
) -> Iterator[UnsupportedModelError]:
    served = {path for path, _ in plan.attention}
    for path in observation.attention:
        if path not in served:
            reasons = [str(m) for m in plan.misses if m.qualname == path and m.fuser == "attention"]
            yield UnsupportedModelError(
                "The attention of a layer cannot be served faithfully.",
                where=path,
                found="; ".join(reasons) or "no reason was given",
            )
    if not observation.attention and not inlined.problems and not any(plan.state):
        yield UnsupportedModelError(
            "No layer of the model calls Transformers' attention interface.",
            where=plan.architecture,
            needed="attention through ALL_ATTENTION_FUNCTIONS",
            remedy="Use a version of the model that does",
        )
    if serving.tp_size > 1:
        yield from uneven(plan.rewrites, serving.tp_size, ep=serving.ep)


def may_run_alone(meta: MetaModel, serving: ServingSpec, refusals: Sequence[UnsupportedModelError]) -> bool:
    """Whether the model may be called with one prompt at a time instead: it is asked for nothing but what it gives for
    whole prompts, on one rank and with its own weights, and no option of the engine would help."""
    plain = serving.whole_prompts and serving.tp_size == serving.pp_size == 1 and serving.quantization is None
    helpless = any("--" not in (refusal.remedy or "") for refusal in refusals)
    return meta.task != GENERATE and plain and helpless


def context_refusals(plan: Plan, serving: ServingSpec) -> Iterator[UnsupportedModelError]:
    bound = plan.max_context
    if bound is not None and bound < serving.max_model_len:
        path = next(path for path, spec in plan.attention if spec.max_context == bound)
        yield context_refusal(path, bound, serving.max_model_len)


def experts_refusals(plan: Plan, serving: ServingSpec) -> Iterator[UnsupportedModelError]:
    """Transformers' own experts look at which are asked for, and so run neither compiled nor on several ranks."""
    for miss in plan.misses:
        stuck = serving.compiled or serving.tp_size > 1 or serving.quantization
        if (miss.fuser == "experts" and stuck) or (miss.fuser == "dense_experts" and serving.quantization):
            yield UnsupportedModelError(
                "The experts of a layer cannot be served.",
                where=miss.qualname,
                found=str(miss),
                remedy="Serve it unquantized with --enforce-eager and --tensor-parallel-size 1",
            )


def running_refusals(base: nn.Module, plan: Plan, observation: Observation) -> Iterator[UnsupportedModelError]:
    """What a model does while it runs that does not belong in a forward that is captured or compiled."""
    yield from _looped_refusals(base, plan, observation)
    if any(not found.method for found in observation.settling):
        yield settling_refusal(type(base).__name__)


def _looped_refusals(base: nn.Module, plan: Plan, observation: Observation) -> Iterator[UnsupportedModelError]:
    """What was answered for in the observed run has to be replaced: as it is, it cannot be captured or compiled."""
    fusers = ("looped_experts", "grouped_linear")
    replaced = {rewrite.qualname for rewrite in plan.rewrites if rewrite.fuser in fusers}
    for path in observation.calls:
        cls = type(base.get_submodule(path))
        if path not in replaced and (cls in observation.looped or hasattr(cls, GROUPED)):
            reasons = [str(m) for m in plan.misses if m.qualname == path and m.fuser in fusers]
            yield looped_refusal(path, "; ".join(reasons) or "values of tensors that are read on the way")
