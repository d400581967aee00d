"""The judge can say wrong, for each reason it knows, and says where."""

import math

import pytest

from tests.serve.judge import judge
from tests.serve.oracle import Answer

CLEAR = Answer(tokens=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0), margins=(1.0, 1.0, 1.0))
TIED = Answer(tokens=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0), margins=(1.0, 1e-3, 1.0))


def test_equal() -> None:
    verdict = judge([CLEAR], [[5, 6, 7]], [[-1.0, -2.004, -3.0]])
    assert verdict.equal
    assert verdict.compared == 3
    assert verdict.worst_logprob == pytest.approx(0.004)


def test_a_tie_ends_the_comparison_of_its_prompt_only() -> None:
    verdict = judge([TIED, CLEAR], [[5, 9, 9], [5, 6, 7]], [[-1.0, -9.0, -9.0], [-1.0, -2.0, -3.0]])
    assert verdict.equal
    assert verdict.compared == 1 + 3


@pytest.mark.parametrize(
    ("tokens", "logprobs", "fault"),
    [
        ([[5, 9, 7]], [[-1.0, -2.0, -3.0]], "prompt 0, step 1: token 9, Transformers says 6 by 1.000 logits"),
        ([[5, 6, 7]], [[-1.0, -2.1, -3.0]], "prompt 0, step 1: log-probability of token 6 is -2.1000"),
        ([[5, 6, 7]], [[-1.0, math.nan, -3.0]], "prompt 0, step 1: log-probability of token 6 is nan"),
        ([[5, 6]], [[-1.0, -2.0]], "prompt 0, 3 tokens expected, 2 came"),
        ([], [], "1 answers expected, 0 came"),
    ],
)
def test_wrong(tokens: list[list[int]], logprobs: list[list[float]], fault: str) -> None:
    verdict = judge([CLEAR], tokens, logprobs)
    assert not verdict.equal
    assert fault in str(verdict)


def test_a_wrong_logprob_before_a_tie_is_still_wrong() -> None:
    assert not judge([TIED], [[5, 9, 9]], [[-1.5, -2.0, -3.0]]).equal


def test_nothing_compared_is_wrong() -> None:
    tied_at_once = Answer(tokens=(5,), logprobs=(-1.0,), margins=(1e-4,))
    assert not judge([tied_at_once], [[6]], [[-1.0]]).equal
