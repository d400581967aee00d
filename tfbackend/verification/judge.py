"""Says whether two runs computed the same thing.

A token may differ only where the expected run's top two logits are closer than ``MARGIN``; from there on the sequences
are different ones and that prompt is compared no further. Log-probabilities of equal tokens agree within ``LOGPROB``:
greedy tokens alone cannot see a scaled or uncapped logit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tfbackend.verification.answers import Answer, Top

MARGIN = 2e-3
"""Logits."""
LOGPROB = 5e-3
"""Nats, in float32."""


class Expected(Protocol):
    """What follows one prompt: tokens, their log-probabilities, and how far each led the runner-up (logits)."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[float, ...]: ...

    @property
    def margins(self) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class Verdict:
    """Whether all is equal, and what that rests on.

    Attributes:
        equal: no fault was found, and something was compared.
        compared: tokens that were.
        worst_logprob: largest difference of a log-probability (nats), NaN where one was.
        fault: the first one, in words.
        ties: prompts that part where the rule lets them.
        closest: margin of the first such parting (logits), NaN for none.
    """

    equal: bool
    compared: int
    worst_logprob: float
    fault: str = ""
    ties: int = 0
    closest: float = math.nan

    def __str__(self) -> str:
        head = "equal" if self.equal else "WRONG"
        tail = f": {self.fault}" if self.fault else ""
        return f"{head} ({self.compared} tokens, log-probabilities within {self.worst_logprob:.1e}){tail}"


def judge(
    expected: Sequence[Expected],
    tokens: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    within: float = LOGPROB,
    whose: str = "Transformers",
) -> Verdict:
    """Compare greedy tokens and their log-probabilities with the expected ones, which `whose` run gave."""
    compared, worst, faults, ties = 0, 0.0, [], []
    if not len(expected) == len(tokens) == len(logprobs):
        return Verdict(False, 0, 0.0, f"{len(expected)} answers expected, {len(tokens)} came")
    for index, answer in enumerate(expected):
        found = _judge_one(answer, tokens[index], logprobs[index], within, whose)
        compared, worst = compared + found.compared, _worse(worst, found.worst_logprob)
        if found.fault:
            faults.append(f"prompt {index}, {found.fault}")
        if found.ties:
            ties.append(found.closest)
    if not faults and compared == 0:
        faults.append("nothing could be compared")
    fault = faults[0] if faults else ""
    return Verdict(not faults, compared, worst, fault, len(ties), ties[0] if ties else math.nan)


def _worse(a: float, b: float) -> float:
    return b if b != b else max(a, b)


def _judge_one(
    answer: Expected, tokens: Sequence[int], logprobs: Sequence[float], within: float, whose: str
) -> Verdict:
    """Compare one prompt."""
    worst, fault, step = 0.0, "", -1
    if not len(answer.tokens) == len(tokens) == len(logprobs):
        return Verdict(False, 0, 0.0, f"{len(answer.tokens)} tokens expected, {len(tokens)} came")
    for step, (want, got) in enumerate(zip(answer.tokens, tokens, strict=True)):
        if want != got:
            lead = answer.margins[step]
            if lead < MARGIN:
                return Verdict(not fault, step, worst, fault, 1, lead)
            fault = fault or f"step {step}: token {got}, {whose} says {want} by {lead:.3f} logits"
            return Verdict(False, step, worst, fault)
        difference = abs(answer.logprobs[step] - logprobs[step])
        if not difference <= within and not fault:  # "not <=": a NaN must fail
            fault = (
                f"step {step}: log-probability of token {got} is {logprobs[step]:.4f}, "
                f"{whose} says {answer.logprobs[step]:.4f}"
            )
        worst = _worse(worst, difference)
    return Verdict(not fault, step + 1, worst, fault)


@dataclass(frozen=True)
class Distance:
    """How far the likeliest tokens' log-probabilities lie apart (nats), over how many of them, and where most."""

    worst: float
    compared: int
    where: str

    @property
    def within(self) -> bool:
        """Whether that is within the bound; a NaN is not, and neither is nothing."""
        return self.compared > 0 and self.worst <= LOGPROB


def top_distance(expected: Sequence[Answer], got: Sequence[Answer]) -> Distance:
    """Compare the likeliest tokens of each step, as long as both runs have said the same tokens."""
    worst, compared, where = 0.0, 0, ""
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        for step in range(_common_steps(want, have)):
            for token, gap in _gaps(want.top[step], have.top[step]):
                compared += 1
                if not gap <= worst and worst == worst:  # the first NaN stays
                    worst, where = gap, f"prompt {index}, step {step}, token {token}"
    return Distance(worst, compared, where)


def _common_steps(want: Answer, have: Answer) -> int:
    """Steps that both took after the same tokens: the first different token is still chosen in the same place."""
    pairs = list(zip(want.tokens, have.tokens, strict=False))
    parted = next((step for step, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return min(parted + 1, len(pairs))


def _gaps(want: Top, have: Top) -> list[tuple[int, float]]:
    """For each expected token its difference; one that did not come is at least as far as the least that did."""
    values = dict(have)
    if not values:
        return [(token, math.nan) for token, _ in want]
    least = min(values.values())
    return [(t, abs(p - values[t]) if t in values else abs(max(0.0, p - least))) for t, p in want]
