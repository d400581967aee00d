"""Says whether an engine gave what Transformers gives."""

from dataclasses import dataclass
from typing import Any

from tests.serve.engine import Harness
from tests.serve.matrix.attempt import ENV, PREFIX, failure
from tests.serve.pooling.checkpoint import Case, Expected, make_and_ask
from tests.serve.pooling.engine import Pooled, Request, pool
from tests.serve.tiny import make_prompts

WITHIN = 1e-4
"""Largest difference from Transformers, relative to its largest value for that prompt."""
LENGTHS = (3, 8, 40, 1, 17)
TASKS = {
    "": "token_embed",
    "SequenceClassification": "classify",
    "TokenClassification": "token_classify",
    "QuestionAnswering": "token_classify",
}


@dataclass(frozen=True)
class Verdict:
    """equal, wrong, refused, crashed or untried, and why; of those that were served, what was applied to what."""

    verdict: str
    reason: str = ""
    served_by: str = ""
    classifier: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.reason} {self.classifier}".rstrip()


SHORTEST = {"canine": 16, "funnel": 8}
"""Tokens of the shortest prompt that these can do, themselves, in Transformers."""


ENVIRONMENTS = {"xlnet": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}
"""vLLM takes the -1 that stands for any length there for a length."""


def prompts(shortest: int = 1) -> list[list[int]]:
    """Prompts of mixed lengths, each of two tokens or more with a padding token in it, one with more at its end.

    All begin with the one token that ends a text: some classes of Transformers want exactly one.
    """
    made = make_prompts(lengths=LENGTHS)
    made[1][-2:] = [0, 0]
    return [[2, *prompt[1:], *[3] * (shortest - len(prompt))] for prompt in made]


def attempt(harness: Harness, case: Case, backend: str = "ours", *, timeout: float = 240.0, **request: Any) -> Verdict:
    """Serve the case's checkpoint and judge what it gives, to all prompts in one call and to each alone."""
    folder, asked = harness.checkpoint(case.folder), prompts(SHORTEST.get(case.model_type, 1))
    try:
        expected: Expected = harness.ask_oracle(make_and_ask, case, folder, asked)
    except RuntimeError as error:
        return Verdict("untried", " ".join(str(error).splitlines()[0].split()))
    asking = Request(folder, tuple(map(tuple, asked)), TASKS[case.head], **request)
    environment = ENV[backend] | ENVIRONMENTS.get(case.model_type, {})
    outcome = harness.call(pool, asking, timeout=timeout, env=environment)
    if not outcome.ok:
        failed = failure(outcome, backend)
        return Verdict(failed.verdict, failed.reason)
    pooled: Pooled = outcome.value
    worst = max(farthest(given, expected.answers) for given in (pooled.together, pooled.alone))
    reason = f"off by {worst:.2g} of the largest value"
    if not pooled.model_class.startswith(PREFIX[backend]):
        return Verdict("refused", f"left to {pooled.model_class}")
    return Verdict("equal" if worst <= WITHIN else "wrong", reason, pooled.model_class, pooled.classifier)


def farthest(given: list[Any], wanted: list[Any]) -> float:
    """The largest difference of any prompt, relative to the largest value wanted for it; infinite for other shapes."""
    import torch

    worst = 0.0 if len(given) == len(wanted) else float("inf")
    for one, other in zip(given, wanted, strict=False):
        a, b = torch.tensor(one).double(), torch.tensor(other).double()
        if a.shape != b.shape or not bool(torch.isfinite(a).all()):
            return float("inf")
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return worst
