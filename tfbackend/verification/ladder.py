"""Climbs the ladder: asks one rung after the other, and stops where the next ones would say nothing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PretrainedConfig

from tfbackend.inspection.headers import Headers, read_folder
from tfbackend.inspection.pooling import task_of_model
from tfbackend.inspection.target import Target, find, json_reader
from tfbackend.meta import CLASSIFY, GENERATE
from tfbackend.plan import Plan
from tfbackend.reranker import reranker_of, settle_labels
from tfbackend.sentence import sentence_plan
from tfbackend.verification import oracle, pooling_oracle
from tfbackend.verification.engine_log import died
from tfbackend.verification.machine import has_vllm, room_for
from tfbackend.verification.pooling_running import PoolRunning
from tfbackend.verification.processes import Outcome
from tfbackend.verification.prompts import make_prompts
from tfbackend.verification.rungs import DEFAULT, NOT_RUN, PASS, QUICK, UNKNOWN, Finding, Result, Rung, asked, rungs_of
from tfbackend.verification.running import Running, Runs
from tfbackend.verification.shrink import shrink_config
from tfbackend.verification.structure import Structure
from tfbackend.verification.vectors import texts_of

CHECKPOINT, CONFIG, TINY = "checkpoint", "config", "tiny random checkpoint"


@dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
        model: folder, config.json or Hub id.
        level: QUICK, DEFAULT or FULL.
        trust_remote_code: whether code that comes with the model may run.
        proofs: folder of remembered proofs, None for none.
    """

    model: str
    level: str = DEFAULT
    trust_remote_code: bool = False
    proofs: Path | None = None


@dataclass(frozen=True)
class Report:
    """Everything that was found: one result for each rung of its task, in order.

    Attributes:
        architecture: class of the Transformers model, "" where it could not be built.
        weights: CHECKPOINT or TINY.
        seconds: all of it took.
    """

    request: Request
    architecture: str
    weights: str
    results: tuple[Result, ...]
    seconds: float


class Listener:
    """Is told of each rung as it begins and ends; this one does nothing."""

    def begin(self, rung: Rung) -> None:
        """A rung is being asked."""

    def end(self, result: Result) -> None:
        """A rung has its answer, or was not asked."""


def climb(request: Request, runs: Runs, listener: Listener | None = None) -> Report:
    """Ask every rung of the level.

    Raises:
        ConfigError: MODEL or its config cannot be read.
        CheckpointError: the index of the checkpoint cannot be read.
    """
    start = time.monotonic()
    target = find(request.model, trust_remote_code=request.trust_remote_code)
    with ExitStack() as stack:
        climber = _Climber(request, target, runs, stack)
        results = tuple(climber.results(listener or Listener()))
        name = climber.architecture
    return Report(request, name, TINY if climber.tiny else CHECKPOINT, results, time.monotonic() - start)


def _at_hand(headers: Headers | None) -> bool:
    """Whether there are weights: an index whose files are elsewhere is no checkpoint."""
    return headers is not None and (not headers.tensors or any(t.shape is not None for t in headers.tensors))


@dataclass
class _Climber:
    request: Request
    target: Target
    runs: Runs
    stack: ExitStack
    structure: Structure = field(init=False)
    running: Running | PoolRunning = field(init=False)

    def __post_init__(self) -> None:
        self.task = task_of_model(self.target.config, self.request.model)
        settle_labels(self.target.config)
        self.structure = self._structure_of(self.target)
        self.tiny = not _at_hand(self.target.headers)
        self.architecture = ""

    def _structure_of(self, target: Target) -> Structure:
        return Structure(target.config, self.request.trust_remote_code, self.request.proofs, self.task)

    def results(self, listener: Listener) -> list[Result]:
        results, stopped = [], ""
        for rung in rungs_of(self.task):
            result = self._ask(rung, stopped, listener)
            if rung.needed and result.finding.verdict != PASS and not stopped and not self._may_go_on(result):
                stopped = rung.title
            listener.end(result)
            results.append(result)
        return results

    @staticmethod
    def _may_go_on(result: Result) -> bool:
        """An engine can tell what proofs and headers left open."""
        return result.finding.verdict == UNKNOWN and result.rung.name in ("proofs", "ledger")

    def _ask(self, rung: Rung, stopped: str, listener: Listener) -> Result:
        of = (CONFIG if rung.name in ("meta", "proofs") else TINY) if self.tiny else CHECKPOINT
        if not asked(rung, self.request.level):
            flag = "a run without --quick" if rung.level == DEFAULT else "--full"
            return Result(rung, Finding(NOT_RUN, needs=flag), of)
        if stopped:
            return Result(rung, Finding(NOT_RUN, needs=f"the rung before: {stopped}"), of)
        listener.begin(rung)
        start = time.monotonic()
        finding = _STEPS[rung.name](self) if rung.name in _STEPS else getattr(self.running, rung.name)()
        return Result(rung, finding, of, time.monotonic() - start)

    def _meta(self) -> Finding:
        finding = self.structure.build()
        if self.structure.built is not None:
            self.architecture = type(self.structure.built.model).__name__
        return finding

    def _proofs(self) -> Finding:
        return self.structure.prove()

    def _ledger(self) -> Finding:
        if self.tiny and (problem := self._make_tiny()) is not None:
            return problem
        assert self.target.headers is not None
        return self.structure.account(self.target.headers)

    def _make_tiny(self) -> Finding | None:
        """Swap in a tiny checkpoint of the architecture; a Finding where that fails."""
        whole = self.structure.plan
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="tfbackend-verify-"))
        config = shrink_config(self.target.config)
        made = self._checkpoint(config, folder)
        if not made.ok:
            return Finding(UNKNOWN, detail=f"no tiny checkpoint could be made: {died(made)}", needs="weights")
        tiny = find(folder, trust_remote_code=self.request.trust_remote_code)
        self.target = Target(folder, tiny.config, read_folder(Path(folder)))
        self.structure = self._structure_of(self.target)
        for finding in (self.structure.build(), self.structure.prove()):
            if finding.verdict != PASS:
                return Finding(UNKNOWN, detail=f"the tiny model differs: {finding.detail}", needs="weights")
        assert whole is not None and self.structure.plan is not None
        if lost := _kinds(whole) - _kinds(self.structure.plan):
            return Finding(UNKNOWN, detail=f"the tiny model lacks {', '.join(sorted(lost))}", needs="weights")
        return None

    def _checkpoint(self, config: PretrainedConfig, folder: str) -> Outcome:
        code = self.request.trust_remote_code
        if self.task == GENERATE:
            return self.runs.call_oracle(oracle.make_checkpoint, config, folder, code)
        return self.runs.call_oracle(pooling_oracle.make_checkpoint, config, folder, self.task == CLASSIFY, code)

    def _loads(self) -> Finding:
        if not has_vllm():
            return Finding(NOT_RUN, needs="vLLM 0.32 or 0.33")
        plan, config = self.structure.plan, self.target.config.get_text_config()
        assert plan is not None
        windows = [reach for _, spec in plan.attention if (reach := spec.window or spec.chunk)]
        padding = config.pad_token_id if isinstance(getattr(config, "pad_token_id", None), int) else None
        quick, trust, limit = self.request.level == QUICK, self.request.trust_remote_code, self.structure.limit
        vocabulary = getattr(config, "vocab_size", None) or _BYTES
        prompts = make_prompts(vocabulary, windows, limit, padding)
        if self.task == GENERATE:
            self.running = Running(self.target.name, prompts, self.runs, limit, quick, trust)
            return self.running.loads()
        end = getattr(config, "eos_token_id", None)
        end = end if isinstance(end, int) else None
        texts = texts_of(prompts, vocabulary, end, padding, typed=plan.typed and plan.types > 1)
        task, own = self._pooling_task(), reranker_of(self.target.config) is not None
        context = self.structure.context
        self.running = PoolRunning(self.target.name, texts, self.runs, task, context, quick, own, trust)
        return self.running.loads()

    def _pooling_task(self) -> str:
        """What of vLLM's pooling tasks the model is asked for."""
        assert self.structure.built is not None
        if self.task == CLASSIFY:
            return "token_classify" if self.structure.built.tokenwise else "classify"
        found = sentence_plan(json_reader(self.target.name))
        return "token_embed" if found is not None and not found.modes else "embed"

    def _ranks(self) -> Finding:
        if missing := room_for(2):
            return Finding(NOT_RUN, needs=missing)
        _, refusals = self.structure.plan_for(2)
        if refusals:
            return Finding(NOT_RUN, needs=f"a model that two ranks can share: {refusals[0]}")
        return self.running.ranks()

    def _compiled(self) -> Finding:
        assert self.structure.plan is not None
        if self.structure.plan.alone:
            return Finding(NOT_RUN, needs="a model whose prompts run side by side")
        return self.running.compiled()

    def _equal(self) -> Finding:
        assert isinstance(self.running, PoolRunning)
        return self.running.equal()

    def _stages(self) -> Finding:
        if missing := room_for(2):
            return Finding(NOT_RUN, needs=missing)
        plan, refusals = self.structure.plan_for(stages=2)
        if refusals or plan.stages is None or plan.stages.count < 2:
            found = refusals[0] if refusals else "it has one layer"
            return Finding(NOT_RUN, needs=f"a model that two stages can share: {found}")
        assert isinstance(self.running, Running), "models that pool have no such rung"
        return self.running.stages()


_BYTES = 256
"""Token ids of a model that names no vocabulary."""


def _kinds(plan: Plan) -> set[str]:
    return set(plan.counts)


_STEPS: dict[str, Callable[[_Climber], Finding]] = {
    "meta": _Climber._meta,
    "proofs": _Climber._proofs,
    "ledger": _Climber._ledger,
    "loads": _Climber._loads,
    "cosine": _Climber._equal,
    "logits": _Climber._equal,
    "compiled": _Climber._compiled,
    "tp2": _Climber._ranks,
    "pp2": _Climber._stages,
}
"""What answers a rung; the others are asked of what runs the engines, by their names."""
