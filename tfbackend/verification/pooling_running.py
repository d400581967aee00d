"""The rungs that run engines of a model that pools, each against Transformers or against the plain engine: eager, on
one rank, each text alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfbackend.verification.answers import Pooled, PoolRequest, Rows, Text
from tfbackend.verification.engine_log import died
from tfbackend.verification.pooling_oracle import Judged, ask_pooled
from tfbackend.verification.processes import Outcome
from tfbackend.verification.rungs import FAIL, NOT_RUN, PASS, UNKNOWN, Finding
from tfbackend.verification.running import Runs, no_answer, of_compiling, of_loading, of_outputs, usual_options
from tfbackend.verification.vectors import Texts, gap

_NAMED = 2


@dataclass
class PoolRunning:
    """The engines of one verification, and what the first of them gave.

    Attributes:
        model: folder or Hub id of the checkpoint.
        texts: what they are asked about.
        runs: where they run.
        task: of vLLM's pooling tasks.
        context: longest text that they take (tokens).
        quick: whether only the texts that Transformers is asked about are.
        own_tokenizer: whether they need the tokenizer of the model.
        trust_remote_code: whether code that comes with the model may run.
    """

    model: str
    texts: Texts
    runs: Runs
    task: str
    context: int
    quick: bool
    own_tokenizer: bool = False
    trust_remote_code: bool = False
    _plain: Outcome | None = None
    _expected: Outcome | None = None

    @property
    def labels(self) -> bool:
        """Whether logits of labels are asked for, and not vectors."""
        return self.task.endswith("classify")

    @property
    def expected(self) -> Outcome:
        """What Transformers gives: a `Judged`."""
        if self._expected is None:
            asking = (self.model, self.texts.asked, self.labels, self.trust_remote_code)
            self._expected = self.runs.call_oracle(ask_pooled, *asking)
        return self._expected

    @property
    def asked(self) -> tuple[Text, ...]:
        """The texts that both can be asked about: those that Transformers runs, or all where it runs none."""
        if not self.expected.ok:
            return self.texts.asked
        answers = self.expected.value.answers
        run = tuple(t for t, rows in zip(self.texts.asked, answers, strict=True) if rows is not None)
        return run or self.texts.asked

    @property
    def _all(self) -> tuple[Text, ...]:
        shortest = min(len(text.ids) for text in self.asked)
        others = () if self.quick else tuple(t for t in self.texts.others if len(t.ids) >= shortest)
        return (*self.asked, *others)

    @property
    def plain(self) -> Outcome:
        """Each text alone, then all at once."""
        if self._plain is None:
            alone = tuple((text,) for text in self._all)
            self._plain = self._serve((*alone, self._all), find_nonfinite=True)
        return self._plain

    def _serve(self, batches: tuple[tuple[Text, ...], ...], *, find_nonfinite: bool = False, **options: Any) -> Outcome:
        options = usual_options(self.context, self.trust_remote_code) | options
        return self.runs.pool(PoolRequest(self.model, batches, self.task, options, self.own_tokenizer, find_nonfinite))

    def loads(self) -> Finding:
        """Start the plain engine; what it gives is kept for the rungs above."""
        return of_loading(self.plain)

    def finite(self) -> Finding:
        """Every output of every module was finite in the plain engine, and every number that it gave."""
        if not self.plain.ok:
            return Finding(FAIL, detail=died(self.plain))
        pooled: Pooled = self.plain.value
        rows = [row for batch in pooled.batches for answer in batch for row in answer]
        bad = sum(not math.isfinite(number) for row in rows for number in row)
        return of_outputs(pooled, f"{bad} numbers of the answers are not finite" if bad else "")

    @property
    def _alone(self) -> tuple[Rows, ...]:
        pooled: Pooled = self.plain.value
        return tuple(answer for batch in pooled.batches[:-1] for answer in batch)

    def equal(self) -> Finding:
        """What Transformers gives, alone and in one batch."""
        if not self.plain.ok:
            return Finding(NOT_RUN, needs="an engine that answers")
        if not self.expected.ok:
            return Finding(UNKNOWN, detail=f"Transformers cannot say: {died(self.expected)}")
        judged: Judged = self.expected.value
        wanted = [rows for rows in judged.answers if rows is not None]
        if not wanted:
            return Finding(UNKNOWN, detail=f"Transformers runs no text: {'; '.join(judged.problems[:_NAMED])}")
        count, together = len(wanted), self.plain.value.batches[-1]
        ways = {"alone": self._alone[:count], "in a batch": together[:count]}
        findings = [self._same(wanted, got, how) for how, got in ways.items()]
        worst = next((f for f in findings if f.verdict != PASS), findings[-1])
        notes = [judged.how] if judged.how else []
        notes += [f"{len(judged.problems)} texts that Transformers cannot run left out"] if judged.problems else []
        unreached = ", ".join(map(str, self.texts.unreached))
        notes += [f"windows of {unreached} tokens not reached"] if unreached else []
        figure = "; ".join([worst.figure, *notes])
        return Finding(worst.verdict, figure, worst.value, worst.unit, worst.detail)

    def batch(self) -> Finding:
        """All texts at once, against each alone, in one engine."""
        if not self.plain.ok:
            return Finding(NOT_RUN, needs="an engine that answers")
        return self._same(self._alone, self.plain.value.batches[-1], "in a batch")

    def compiled(self) -> Finding:
        """With torch.compile, against eager."""
        outcome = self._serve((self.asked,), enforce_eager=False)
        return of_compiling(self._against_plain(outcome, "compiled"), outcome)

    def ranks(self) -> Finding:
        """On two tensor-parallel ranks, against one."""
        return self._against_plain(self._serve((self.asked,), tensor_parallel_size=2), "on two ranks")

    def _against_plain(self, outcome: Outcome, how: str) -> Finding:
        if not (outcome.ok and self.plain.ok):
            return no_answer(outcome, self.plain)
        return self._same(self._alone[: len(self.asked)], outcome.value.batches[-1], how)

    def _same(self, expected: Sequence[Rows], got: Sequence[Rows], how: str) -> Finding:
        found = gap(expected, got)
        figure = f"{found.rows} {'rows of logits' if self.labels else 'vectors'} within {found.apart:.1e}"
        if not self.labels:
            figure += f", cosine {found.cosine:.6f}"
        if not found.within(vectors=not self.labels):
            where = f"{found.where or 'nothing could be compared'}, {how}"
            return Finding(FAIL, figure.replace("within", "apart by"), found.apart, "", where)
        return Finding(PASS, figure, found.apart)
