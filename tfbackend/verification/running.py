"""The rungs that run engines, each against Transformers or against the plain engine: eager, one rank, no cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfbackend.verification.answers import Answer, EngineRequest, Pooled, PoolRequest, Prompt, Served
from tfbackend.verification.engine_log import died, loaded_before
from tfbackend.verification.judge import MARGIN, Verdict, judge, top_distance
from tfbackend.verification.machine import devices
from tfbackend.verification.processes import Outcome
from tfbackend.verification.prompts import TOKENS, Prompts
from tfbackend.verification.rungs import FAIL, NOT_RUN, PASS, UNKNOWN, Finding

BLOCK = 32
"""Tokens of a block of the KV cache, where blocks matter."""
CHUNK = 32
"""Most tokens of one forward, where prompts are to be chunked."""
_LEAST_CONTEXT = 256
_SERVED_BY = "tfbackend."


class Runs(Protocol):
    """What runs the oracle and the engines; see workers.Workers."""

    def ask(self, model: str, prompts: tuple[Prompt, ...], max_tokens: int, trust_remote_code: bool) -> Outcome: ...

    def call_oracle(self, function: Any, *args: Any) -> Outcome: ...

    def serve(self, request: EngineRequest) -> Outcome: ...

    def pool(self, request: PoolRequest) -> Outcome: ...


@dataclass
class Running:
    """The engines of one verification, and what the first of them said.

    Attributes:
        model: folder or Hub id of the checkpoint.
        prompts: what they are asked.
        runs: where they run.
        limit: longest context of the model (tokens), None where the config names none.
        quick: whether only the short prompts are asked.
        trust_remote_code: whether code that comes with the model may run.
    """

    model: str
    prompts: Prompts
    runs: Runs
    limit: int | None
    quick: bool
    trust_remote_code: bool = False
    _plain: Outcome | None = None
    _expected: Outcome | None = None

    @property
    def asked(self) -> tuple[Prompt, ...]:
        """The prompts that Transformers is asked too."""
        return self.prompts.short if self.quick else (*self.prompts.short, *self.prompts.long)

    def loads(self) -> Finding:
        """Start the plain engine; what it says is kept for the rungs above."""
        return of_loading(self.plain)

    @property
    def plain(self) -> Outcome:
        """Each prompt alone, then, unless it is to be quick, all at once."""
        if self._plain is None:
            alone = tuple((prompt,) for prompt in (self.asked if self.quick else self._all))
            together = () if self.quick else (self._all,)
            self._plain = self._serve((*alone, *together), find_nonfinite=True)
        return self._plain

    @property
    def _all(self) -> tuple[Prompt, ...]:
        return (*self.prompts.short, *self.prompts.long, *self.prompts.others)

    def _serve(
        self, batches: tuple[tuple[Prompt, ...], ...], *, find_nonfinite: bool = False, **options: Any
    ) -> Outcome:
        context = max(self.prompts.longest, _LEAST_CONTEXT)
        context = min(context, self.limit) if self.limit else context
        options = usual_options(context, self.trust_remote_code) | options
        return self.runs.serve(EngineRequest(self.model, batches, TOKENS, options, find_nonfinite))

    def finite(self) -> Finding:
        """Every output of every module was finite in the plain engine."""
        if not self.plain.ok:
            return Finding(FAIL, detail=died(self.plain))
        served: Served = self.plain.value
        bad = [value for answer in served.answers() for value in answer.logprobs if not math.isfinite(value)]
        return of_outputs(served, f"{len(bad)} log-probabilities are not finite" if bad else "")

    @property
    def expected(self) -> Outcome:
        """What Transformers answers."""
        if self._expected is None:
            self._expected = self.runs.ask(self.model, self.asked, TOKENS, self.trust_remote_code)
        return self._expected

    def _both(self) -> tuple[Sequence[Answer], Sequence[Answer]] | Finding:
        """(Transformers' answers, the plain engine's) to the same prompts, or why there are none."""
        if not self.plain.ok:
            return Finding(NOT_RUN, needs="an engine that answers")
        if not self.expected.ok:
            return Finding(UNKNOWN, detail=f"Transformers cannot say: {died(self.expected)}")
        return self.expected.value, self.plain.value.answers()[: len(self.asked)]

    def greedy(self) -> Finding:
        """Tokens as Transformers says them."""
        both = self._both()
        if isinstance(both, Finding):
            return both
        return _of_tokens(_compare(*both, within=math.inf), len(self.asked), self.prompts.unreached)

    def topk(self) -> Finding:
        """Log-probabilities as Transformers says them."""
        both = self._both()
        if isinstance(both, Finding):
            return both
        found = top_distance(*both)
        figure = f"{found.compared:,} within {found.worst:.1e} nats"
        if not found.within:
            figure = f"{found.worst:.1e} nats apart"
            return Finding(FAIL, figure, found.worst, "nats", found.where or "nothing could be compared")
        return Finding(PASS, figure, found.worst, "nats")

    def batch(self) -> Finding:
        """All prompts at once, against each alone, in one engine."""
        if not self.plain.ok:
            return Finding(NOT_RUN, needs="an engine that answers")
        *alone, together = self.plain.value.batches
        return self._same([answer for batch in alone for answer in batch], together, "the prompt alone")

    def chunked(self) -> Finding:
        """The longer prompts in pieces, against each whole."""
        limits: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "enable_chunked_prefill": True}
        outcome = self._serve((self.asked,), **limits)
        finding = self._against_plain(outcome, "the unchunked prompt")
        if finding.verdict == PASS and not 0 < outcome.value.largest_forward <= CHUNK:
            return Finding(
                UNKNOWN, detail=f"a forward took {outcome.value.largest_forward} tokens: nothing was chunked"
            )
        return finding

    def prefix(self) -> Finding:
        """Two prompts that begin alike, the second and the first again, against each with a cold cache."""
        first, second = self.prompts.long
        outcome = self._serve(((first,), (second, first)), enable_prefix_caching=True, block_size=BLOCK)
        if not (outcome.ok and self.plain.ok):
            return no_answer(outcome, self.plain)
        index = len(self.prompts.short)
        alone = self.plain.value.answers()
        cold = [alone[index], alone[index + 1], alone[index]]
        cached = outcome.value.cached[1]
        finding = self._same(cold, outcome.value.answers(), "the cold cache")
        if finding.verdict == PASS and not all(cached):
            return Finding(UNKNOWN, detail=f"{cached} tokens came from the cache: it never warmed up")
        return finding

    def compiled(self) -> Finding:
        """With torch.compile, against eager."""
        outcome = self._serve((self.asked,), enforce_eager=False)
        return of_compiling(self._against_plain(outcome, "the eager engine"), outcome)

    def ranks(self) -> Finding:
        """On two tensor-parallel ranks, against one."""
        return self._against_plain(self._serve((self.asked,), tensor_parallel_size=2), "one rank")

    def stages(self) -> Finding:
        """On two pipeline stages, against one. vLLM runs those on a CPU only where it compiles, if only by tracing."""
        options: dict[str, Any] = {"pipeline_parallel_size": 2}
        if not devices():
            options |= {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
        return self._against_plain(self._serve((self.asked,), **options), "one stage")

    def _against_plain(self, outcome: Outcome, whose: str) -> Finding:
        """Answers to `asked` in one batch, against the plain engine's."""
        if not (outcome.ok and self.plain.ok):
            return no_answer(outcome, self.plain)
        return self._same(self.plain.value.answers()[: len(self.asked)], outcome.value.answers(), whose)

    def _same(self, expected: Sequence[Answer], got: Sequence[Answer], whose: str) -> Finding:
        verdict = _compare(expected, got, whose=whose)
        figure = f"{verdict.compared} tokens, log-probs within {verdict.worst_logprob:.1e} nats"
        figure += _parted(verdict)
        if not verdict.equal:
            return Finding(FAIL, figure, verdict.worst_logprob, "nats", verdict.fault)
        return Finding(PASS, figure, verdict.worst_logprob, "nats")


def of_loading(outcome: Outcome) -> Finding:
    """Whether the plain engine came up, and with a class of ours."""
    if not outcome.ok and not loaded_before(outcome):
        return Finding(FAIL, detail=died(outcome))
    if not outcome.ok:
        return Finding(PASS, "it came up, and failed later")
    served: Served | Pooled = outcome.value
    figure = f"{served.model_class.rpartition('.')[2]}, up in {served.seconds:.1f} s"
    if not served.model_class.startswith(_SERVED_BY):
        return Finding(FAIL, figure, served.seconds, "s", f"{served.model_class} serves it, not tfbackend")
    return Finding(PASS, figure, served.seconds, "s")


def _compare(expected: Sequence[Answer], got: Sequence[Answer], **how: Any) -> Verdict:
    return judge(expected, [a.tokens for a in got], [a.logprobs for a in got], **how)


def _parted(verdict: Verdict) -> str:
    if not verdict.ties:
        return ""
    return f"; {verdict.ties} parted at a margin of {verdict.closest:.1e} logits, below {MARGIN:g}"


def _of_tokens(verdict: Verdict, prompts: int, unreached: Sequence[int]) -> Finding:
    exact = "all equal" if not verdict.ties else "equal"
    figure = f"{verdict.compared} tokens of {prompts} prompts, {exact}" + _parted(verdict)
    if unreached:
        figure += f"; windows of {', '.join(map(str, unreached))} tokens not reached"
    if not verdict.equal:
        figure = f"{verdict.compared} tokens equal before the first difference of each prompt"
        return Finding(FAIL, figure, float(verdict.compared), "tokens", verdict.fault)
    return Finding(PASS, figure, float(verdict.compared), "tokens")


def usual_options(context: int, trust_remote_code: bool) -> dict[str, Any]:
    """Keywords of every engine that takes up to `context` tokens."""
    options: dict[str, Any] = {"max_model_len": context, "max_num_batched_tokens": max(2048, context)}
    return options | {"trust_remote_code": True} if trust_remote_code else options


def of_outputs(seen: Served | Pooled, bad: str) -> Finding:
    """What was seen of the outputs of modules; `bad` says which numbers of the answers are not finite, "" for none."""
    figure = f"{seen.checked:,} module outputs"
    if seen.nonfinite:
        return Finding(FAIL, figure, detail=f"first at {seen.nonfinite}")
    if bad:
        return Finding(FAIL, figure, detail=bad)
    if not seen.checked:
        return Finding(UNKNOWN, figure, detail="no module output could be looked at")
    return Finding(PASS, figure, float(seen.checked), "outputs")


def of_compiling(finding: Finding, outcome: Outcome) -> Finding:
    """`finding` about the answers of an engine that compiles; without graphs it says nothing."""
    if finding.verdict == PASS and not outcome.value.graphs:
        return Finding(UNKNOWN, detail="nothing was compiled")
    return finding


def no_answer(outcome: Outcome, plain: Outcome) -> Finding:
    """What an engine that did not answer, or a plain one that did not, leaves of a comparison."""
    if not outcome.ok:
        return Finding(FAIL, detail=died(outcome))
    return Finding(NOT_RUN, needs=f"an engine that answers, and the plain one did not: {plain.error}")
