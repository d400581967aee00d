"""Joins the parts: MODEL and the engine's settings in, one frozen Inspection out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tfbackend import meta as meta_stage
from tfbackend.errors import UnsupportedModelError
from tfbackend.inspection import layout, memory, verdict
from tfbackend.inspection.accounts import Accounts, keep_accounts
from tfbackend.inspection.classes import ServedClass, served_class
from tfbackend.inspection.diffs import ForwardDiff, forward_diffs
from tfbackend.inspection.headers import Headers
from tfbackend.inspection.layout import Collective, ServedParameter
from tfbackend.inspection.memory import Memory
from tfbackend.inspection.pooling import Pooling, pooling_or_refusal, task_of_model
from tfbackend.inspection.ranking import with_ranks
from tfbackend.inspection.target import Target, find, pick_dtype
from tfbackend.inspection.tree import Site, build_tree
from tfbackend.inspection.verdict import Finding
from tfbackend.mlaspec import WIDTHS, sizes_named
from tfbackend.plan import Plan, draft_plan
from tfbackend.proof import Prover
from tfbackend.reranker import settle_labels
from tfbackend.serving import NATIVES, MLASizes, ServingSpec
from tfbackend.weights import build_weight_map

Progress = Callable[[str], None]
STEPS = (
    "Reading the config and the headers",
    "Building the model on meta",
    "Planning and proving",
    "Laying it out",
    "Keeping accounts of the weights",
)
_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "bitsandbytes": 8.0, "gptq": 4.0, "awq": 4.0}


@dataclass(frozen=True)
class Request:
    """What is asked about.

    Attributes:
        model: folder, config.json or Hub id.
        tp, pp: ranks that share each layer, and stages that share the layers.
        ep: whether experts are spread over ranks.
        dtype: "auto" or a name of vLLM's --dtype.
        max_model_len: longest context wanted, in tokens; None for the model's own.
        gpu: bytes of memory of each GPU, None to leave that out.
        utilisation: the share of it that vLLM may use.
        trust_remote_code: whether code that comes with the model may run.
        proofs: folder of remembered proofs, None for none.
        budget: seconds of proving.
    """

    model: str
    tp: int = 1
    pp: int = 1
    ep: bool = False
    dtype: str = "auto"
    max_model_len: int | None = None
    gpu: int | None = None
    utilisation: float = memory.UTILISATION
    trust_remote_code: bool = False
    proofs: Path | None = None
    budget: float = 20.0


@dataclass(frozen=True)
class Inspection:
    """Everything that is known of a model before it is served.

    Attributes:
        request: what was asked.
        serving: the planner's view of it.
        architecture: class of the full Transformers model.
        served: the class that serves it.
        limit: longest context of the model, in tokens; None where neither its config nor a layer sets one.
        plan: the plan, as far as it goes.
        tree: the module tree, folded.
        parameters: of the served tree, with their shares.
        collectives: exchanges between ranks of one forward.
        memory: of one rank.
        diffs: edited forwards.
        headers, accounts: the checkpoint and its ledger; None where there are no weights at hand.
        problems: why it does not serve, () where it does.
        losses: what is lost though it serves.
        good_ranks: usual numbers of tensor-parallel ranks that divide everything.
        pooling: what a model that pools gives; None of one that generates.
    """

    request: Request
    serving: ServingSpec
    architecture: str
    served: ServedClass
    limit: int | None
    plan: Plan
    tree: Site
    parameters: tuple[ServedParameter, ...]
    collectives: tuple[Collective, ...]
    memory: Memory
    diffs: tuple[ForwardDiff, ...]
    headers: Headers | None
    accounts: Accounts | None
    problems: tuple[Finding, ...] = field(default=())
    losses: tuple[Finding, ...] = field(default=())
    good_ranks: tuple[int, ...] = field(default=())
    pooling: Pooling | None = None

    @property
    def status(self) -> int:
        """0 serves, 1 serves with losses, 2 does not serve."""
        return verdict.NOT_SERVED if self.problems else verdict.WITH_LOSSES if self.losses else verdict.SERVES


def inspect_model(request: Request, progress: Progress = lambda step: None) -> Inspection:
    """Inspect a model; `progress` is told each of STEPS as it begins.

    Raises:
        ConfigError: MODEL or a setting cannot be read, or the config builds no model.
        CheckpointError: the index of the checkpoint cannot be read.
        UnsupportedModelError: the model does not run on meta tensors, so nothing about it can be known.
    """
    progress(STEPS[0])
    target = find(request.model, trust_remote_code=request.trust_remote_code)
    task, code = task_of_model(target.config, request.model), request.trust_remote_code
    settle_labels(target.config)
    serving = _serving(request, target, task)
    progress(STEPS[1])
    built = meta_stage.build(target.config, serving.dtype, trust_remote_code=code, task=task)
    progress(STEPS[2])
    plan, refusals = draft_plan(built, serving, Prover(request.proofs, request.budget))
    pooling, more = pooling_or_refusal(built, plan, request.model) if task != meta_stage.GENERATE else (None, [])
    refusals = (*refusals, *more)
    progress(STEPS[3])
    served = served_class(target.config, plan.architecture, task)
    parameters = layout.parameters(built, plan, serving.tp_size, serving.dtype, ep=serving.ep)
    good = layout.ranks_that_divide(built, plan, serving.dtype)
    tree = build_tree(built, plan, parameters)
    measured = _measure(request, target, serving, plan, parameters)
    progress(STEPS[4])
    accounts = _accounts(built, plan, target, serving, code)
    problems = _problems(target, plan, refusals, served, serving, parameters, good, accounts, measured)
    refused = {path for finding in problems for path in finding.where}
    return Inspection(
        request=request,
        serving=serving,
        architecture=plan.architecture,
        served=served,
        limit=min(filter(None, (_limit(target.config), plan.max_context)), default=None),
        plan=plan,
        tree=tree,
        parameters=tuple(parameters),
        collectives=tuple(layout.collectives(plan)),
        memory=measured,
        diffs=forward_diffs(built, plan),
        headers=target.headers,
        accounts=accounts,
        problems=tuple(problems),
        losses=tuple(f for f in verdict.losses(plan, tree, serving) if not refused.issuperset(f.where) or not f.place),
        good_ranks=good,
        pooling=pooling,
    )


def _problems(
    target: Target,
    plan: Plan,
    refusals: tuple[UnsupportedModelError, ...],
    served: ServedClass,
    serving: ServingSpec,
    parameters: list[ServedParameter],
    good: tuple[int, ...],
    accounts: Accounts | None,
    measured: Memory,
) -> list[Finding]:
    """Why the model does not serve, what cannot be mended by a setting first."""
    return [
        *verdict.class_findings(served, serving),
        *verdict.refusal_findings(refusals, plan),
        *verdict.layout_findings(parameters, good),
        *verdict.weight_findings(target.headers, accounts),
        *verdict.memory_findings(measured),
    ]


def _serving(request: Request, target: Target, task: str) -> ServingSpec:
    quantization = _quantization(target.config)
    return ServingSpec(
        dtype=pick_dtype(request.dtype, target.config),
        tp_size=request.tp,
        pp_size=request.pp,
        ep=request.ep,
        quantization=quantization.get("quant_method") if quantization else None,
        max_model_len=request.max_model_len or _limit(target.config) or 2048,
        device="cuda",
        compiled=True,
        whole_prompts=task != meta_stage.GENERATE,
        mla=_mla(target.config),
        natives=NATIVES,
    )


def _mla(config: Any) -> MLASizes | str:
    sizes = sizes_named(config.get_text_config())
    if isinstance(sizes, str) or sizes.cached in WIDTHS:
        return sizes
    return f"vLLM has no kernel over latents for {sizes}"


def _limit(config: Any) -> int | None:
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    found = (getattr(text, name, None) for name in names)
    return next((int(n) for n in found if isinstance(n, int) and n > 0), None)


def _quantization(config: Any) -> dict[str, Any] | None:
    owners = (config, config.get_text_config())
    found = next((q for owner in owners if (q := getattr(owner, "quantization_config", None))), None)
    return found if isinstance(found, dict) or found is None else found.to_dict()


def _bits(config: Any) -> float | None:
    """Bits of a weight of a quantized linear, None where the checkpoint is not quantized or its method unknown."""
    quantization = _quantization(config)
    if quantization is None:
        return None
    if quantization.get("load_in_4bit"):
        return 4.0
    named = quantization.get("bits") or quantization.get("w_bit")
    return float(named) if named else _BITS.get(str(quantization.get("quant_method")))


def _measure(
    request: Request, target: Target, serving: ServingSpec, plan: Plan, parameters: list[ServedParameter]
) -> Memory:
    bits = _bits(target.config)
    parts = memory.measure(
        parameters,
        [(_layer_number(path, plan), spec) for path, spec in plan.attention],
        [(_layer_number(path, plan), spec) for path, spec in plan.state],
        tp=serving.tp_size,
        pp=serving.pp_size,
        itemsize=torch.empty(0, dtype=serving.dtype).element_size(),
        bits=bits,
    )
    fitted = None
    if request.gpu is not None:
        fitted = memory.fit(parts, request.gpu, request.utilisation, serving.max_model_len)
    return Memory(parts, fitted, estimated=bits is not None)


def _layer_number(path: str, plan: Plan) -> int | None:
    stem = f"{plan.layers}."
    return int(path.removeprefix(stem).partition(".")[0]) if plan.layers and path.startswith(stem) else None


def _accounts(
    built: meta_stage.MetaModel, plan: Plan, target: Target, serving: ServingSpec, trust_remote_code: bool
) -> Accounts | None:
    if target.headers is None or not target.headers.tensors:
        return None
    quantized = serving.quantization is not None
    weight_map = build_weight_map(built.model, plan, quantized=quantized)
    headers = with_ranks(target.headers, target.config, built, plan, trust_remote_code=trust_remote_code)
    return keep_accounts(weight_map, built.model, headers, quantized=quantized)
