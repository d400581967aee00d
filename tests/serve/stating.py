"""What the tests of mixers with state have in common: prompts, Transformers' answers, a request, and the comparison."""

from collections.abc import Sequence
from typing import Any

from tests.serve import probes
from tests.serve.engine import MAX_TOKENS, Harness, Request, Served
from tests.serve.judge import judge
from tests.serve.matrix.checkpoint import make_and_ask
from tests.serve.oracle import Answer

MIXED = (3, 40, 1, 17, 64, 2, 33, 9, 50)
"""Lengths of prompts, more than there are seats."""


def expected(harness: Harness, name: str, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[Answer]:
    """Transformers' answers for an architecture of the matrix; makes its checkpoint."""
    found = harness.ask_oracle(make_and_ask, name, harness.checkpoint(name), prompts, max_tokens)
    answers: list[Answer] = found.answers
    return answers


def watched(harness: Harness, name: str, batches: Sequence[list[list[int]]], args: dict[str, Any]) -> Request:
    """A request that tells the largest forward and what the state layers of each rank are."""
    frozen = tuple(tuple(map(tuple, prompts)) for prompts in batches)
    folder = harness.checkpoint(name)
    return Request(folder, frozen, engine_args=args, prepare=probes.watch_tokens, inspect=probes.states)


def check_equal(answers: Sequence[list[Answer]], served: Served, within: float) -> None:
    """Each batch got Transformers' tokens, and their log-probabilities up to `within`."""
    for wanted, batch in zip(answers, served.batches, strict=True):
        verdict = judge(wanted, batch.tokens, batch.logprobs, within=within)
        assert verdict.equal, verdict
