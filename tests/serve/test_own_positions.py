"""Models that number their tokens themselves, where a call holds a later part of a prompt or parts of several."""

import pytest

from tests.serve.engine import MAX_TOKENS, OURS, Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.matrix.attempt import expect
from tests.serve.probes import numbered_modules
from tests.serve.remotes import make_remote
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

WHERE = {
    "bart": ["decoder"],
    "trocr": ["decoder.embed_positions"],
    "roformer": ["encoder.embed_positions"],
    "counting": ["blocks.0.attention", "blocks.1.attention", ""],
}
"""What counts: the decoder, for its table; the table itself; the same for a rotation; a model and its layers."""


def _serve(harness: Harness, name: str, times: int = 1, **engine_args: object) -> Served:
    prompts, folder = make_prompts(), harness.checkpoint(name)
    if name == "counting":
        answers = harness.ask_oracle(make_remote, name, folder, prompts, MAX_TOKENS)
        engine_args["trust_remote_code"] = True
    else:
        expected = expect(harness, name)
        assert not isinstance(expected, str), expected
        answers = expected.answers
    batches = (tuple(map(tuple, prompts)),) * times
    request = Request(folder, batches, engine_args=engine_args, inspect=numbered_modules, timeout=280)
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert set(served.model_class) == {OURS}
    assert len(served.batches) == times
    for batch in served.batches:
        verdict = judge(answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
        assert verdict.equal, verdict
    return served


@pytest.mark.parametrize("name", WHERE)
def test_chunked_prefill(harness: Harness, name: str) -> None:
    """A call then begins in the middle of one prompt and ends in the middle of another."""
    served = _serve(harness, name, max_num_batched_tokens=16, enable_chunked_prefill=True)
    assert sorted(served.inspected[0]) == sorted(WHERE[name])


@pytest.mark.parametrize("name", ["bart", "counting"])
def test_prefix_caching(harness: Harness, name: str) -> None:
    """The second time a call begins where the cache ends."""
    _serve(harness, name, times=2, enable_prefix_caching=True)


def test_two_ranks(harness: Harness) -> None:
    """The other two write their attention out, which is refused on several ranks."""
    _serve(harness, "bart", tensor_parallel_size=2)


@pytest.mark.parametrize("name", WHERE)
def test_compiled(harness: Harness, name: str) -> None:
    _serve(harness, name, enforce_eager=False)
