"""Attention sinks: the tensor that is loaded is the one that attention reads, sliced to the heads of each rank."""

import pytest

from tests.serve.engine import MAX_TOKENS, OURS, Harness, Request, Served
from tests.serve.judge import LOGPROB, SAME_COMPUTATION, judge
from tests.serve.oracle import Answer, make_and_ask
from tests.serve.sinks import GRANITE_SWA, logprobs_moved, sinks_of
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def expected(harness: Harness) -> list[Answer]:
    folder = harness.checkpoint(GRANITE_SWA.name)
    return harness.ask_oracle(make_and_ask, GRANITE_SWA, folder, make_prompts(), MAX_TOKENS)


def _serve(harness: Harness, expected: list[Answer], **engine_args: object) -> Served:
    prompts = tuple(map(tuple, make_prompts()))
    request = Request(harness.checkpoint(GRANITE_SWA.name), (prompts,), engine_args=engine_args, inspect=sinks_of)
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert set(served.model_class) == {OURS}
    verdict = judge(expected, served.batches[0].tokens, served.batches[0].logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict
    return served


def test_sinks_show(harness: Harness, expected: list[Answer]) -> None:
    """Or nothing below would tell whether they are used, and whether each rank has its own."""
    folder = harness.checkpoint(GRANITE_SWA.name)
    moved = harness.ask_oracle(logprobs_moved, folder, make_prompts(), expected)
    assert min(moved.values()) > 2 * LOGPROB, moved


def test_one_rank(harness: Harness, expected: list[Answer]) -> None:
    assert _serve(harness, expected).inspected == [[((4,), True)] * 4]


def test_compiled(harness: Harness, expected: list[Answer]) -> None:
    assert _serve(harness, expected, enforce_eager=False).inspected == [[((4,), True)] * 4]


def test_two_ranks(harness: Harness, expected: list[Answer]) -> None:
    assert _serve(harness, expected, tensor_parallel_size=2).inspected == [[((2,), True)] * 4] * 2
