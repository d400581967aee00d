"""Says whether an engine computed what Transformers computes.

A token may differ only where the oracle's top two logits are closer than ``MARGIN``; from there on the sequences are
different ones and that prompt is compared no further. Log-probabilities of equal tokens agree within ``LOGPROB``:
greedy tokens alone cannot see a scaled or uncapped logit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.serve.oracle import Answer

MARGIN = 2e-3
LOGPROB = 5e-3
# Two float32 runs of one computation agree within 2e-5. Here is room for ten times that, and no more: a GELU taken for
# its tanh form moves the log-probabilities of a tiny model by about 1e-3, which the rule alone would let pass.
SAME_COMPUTATION = 2e-4


@dataclass(frozen=True)
class Verdict:
    """Whether all is equal, how many tokens were compared, the worst log-probability difference, the first fault."""

    equal: bool
    compared: int
    worst_logprob: float
    fault: str = ""

    def __str__(self) -> str:
        head = "equal" if self.equal else "WRONG"
        tail = f": {self.fault}" if self.fault else ""
        return f"{head} ({self.compared} tokens, log-probabilities within {self.worst_logprob:.1e}){tail}"


def judge(
    expected: Sequence[Answer],
    tokens: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    within: float = LOGPROB,
) -> Verdict:
    """Compare an engine's greedy tokens and their log-probabilities with the oracle's."""
    compared, worst, faults = 0, 0.0, []
    if not len(expected) == len(tokens) == len(logprobs):
        return Verdict(False, 0, 0.0, f"{len(expected)} answers expected, {len(tokens)} came")
    for index, answer in enumerate(expected):
        count, difference, fault = _judge_one(answer, tokens[index], logprobs[index], within)
        compared, worst = compared + count, max(worst, difference)
        if fault:
            faults.append(f"prompt {index}, {fault}")
    if not faults and compared == 0:
        faults.append("nothing could be compared")
    return Verdict(not faults, compared, worst, faults[0] if faults else "")


def _judge_one(
    answer: Answer, tokens: Sequence[int], logprobs: Sequence[float], within: float
) -> tuple[int, float, str]:
    """Compare one prompt: tokens compared, worst difference, and the first fault or ''."""
    worst, fault, step = 0.0, "", 0
    if not len(answer.tokens) == len(tokens) == len(logprobs):
        return 0, 0.0, f"{len(answer.tokens)} tokens expected, {len(tokens)} came"
    for step, (want, got) in enumerate(zip(answer.tokens, tokens, strict=True)):
        if want != got:
            if answer.margins[step] < MARGIN:
                return step, worst, fault
            lead = answer.margins[step]
            return step, worst, fault or f"step {step}: token {got}, Transformers says {want} by {lead:.3f} logits"
        difference = abs(answer.logprobs[step] - logprobs[step])
        if not difference <= within and not fault:  # "not <=": a NaN must fail
            fault = (
                f"step {step}: log-probability of token {got} is {logprobs[step]:.4f}, "
                f"Transformers says {answer.logprobs[step]:.4f}"
            )
        worst = max(worst, difference) if difference == difference else float("nan")
    return step + 1, worst, fault
