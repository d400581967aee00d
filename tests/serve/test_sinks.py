"""Attention sinks: the tensor that is loaded is the one that attention reads, sliced to the heads of each rank."""

import pytest

from tests.serve.configs import WINDOW
from tests.serve.engine import MAX_TOKENS, OURS, Harness, Request, Served
from tests.serve.judge import LOGPROB, SAME_COMPUTATION, judge
from tests.serve.oracle import Answer, make_and_ask
from tests.serve.sinks import GRANITE_SWA, attention_of, logprobs_moved, make_remote
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def expected(harness: Harness) -> list[Answer]:
    folder = harness.checkpoint(GRANITE_SWA.name)
    return harness.ask_oracle(make_and_ask, GRANITE_SWA, folder, make_prompts(), MAX_TOKENS)


def _serve(harness: Harness, expected: list[Answer], folder: str, **engine_args: object) -> Served:
    prompts = tuple(map(tuple, make_prompts()))
    request = Request(folder, (prompts,), engine_args=engine_args, inspect=attention_of)
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
    served = _serve(harness, expected, harness.checkpoint(GRANITE_SWA.name))
    assert served.inspected == [[((4,), True, -1), ((4,), True, WINDOW)] * 2]


def test_two_ranks(harness: Harness, expected: list[Answer]) -> None:
    served = _serve(harness, expected, harness.checkpoint(GRANITE_SWA.name), tensor_parallel_size=2)
    assert served.inspected == [[((2,), True, -1), ((2,), True, WINDOW)] * 2] * 2


def test_remote_code(harness: Harness) -> None:
    """Its config names a window and no layer types: vLLM would give the window to the layers that have none."""
    folder = harness.checkpoint("sunken")
    answers = harness.ask_oracle(make_remote, folder, make_prompts(), MAX_TOKENS)
    args = {"trust_remote_code": True}
    served = _serve(harness, answers, folder, **args)
    assert served.inspected == [[((4,), True, -1), ((4,), True, WINDOW)] * 2]
