"""Attention with a bias by query and distance: the tokens of Transformers, however the engine cuts and mixes them."""

from typing import Any

import pytest

from tests.serve import probes, stepping
from tests.serve.engine import MAX_TOKENS, Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.matrix.checkpoint import make_and_ask
from tests.serve.oracle import Answer
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

NAME = "inkling_text"
"""Biases that reach less far than these prompts, windows in every other layer, and scores that grow with the place."""


def _expected(harness: Harness, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[Answer]:
    answers: list[Answer] = harness.ask_oracle(
        make_and_ask, NAME, harness.checkpoint(NAME), prompts, max_tokens
    ).answers
    return answers


def _serve(harness: Harness, *batches: list[list[int]], **args: Any) -> Served:
    """Serve the batches, one after the other, and check that the answers are Transformers'."""
    expected = [_expected(harness, prompts) for prompts in batches]
    frozen = tuple(tuple(map(tuple, prompts)) for prompts in batches)
    request = Request(
        harness.checkpoint(NAME), frozen, engine_args=args, prepare=probes.watch_tokens, inspect=probes.distances
    )
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served: Served = outcome.value
    for answers, batch in zip(expected, served.batches, strict=True):
        verdict = judge(answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
        assert verdict.equal, verdict
    return served


def test_prompts_in_parts_beside_others(harness: Harness) -> None:
    """More prompts than seats, some cut into parts while others decode, and pages that one had before are another's."""
    prompts = make_prompts(lengths=(100, 5, 61, 1, 25, 3, 40), seed=11)
    served = _serve(harness, prompts, max_num_seqs=3, max_num_batched_tokens=24, enable_chunked_prefill=True)
    assert 0 < served.inspected[0].largest_forward <= 24
    assert served.inspected[0].layers == {"window 16, 16 distances": 2, "window None, 24 distances": 2}


def test_prefix_caching(harness: Harness) -> None:
    """A request goes on from keys and values that another one wrote."""
    shared, *tails = make_prompts(lengths=(150, 9, 20), seed=12)
    first, second = [shared + tails[0]], [shared + tails[1], shared + tails[0][:3]]
    served = _serve(harness, first, second, enable_prefix_caching=True, block_size=32)
    assert served.batches[0].cached == [0]
    assert min(served.batches[1].cached) >= 64


def test_compiled(harness: Harness) -> None:
    served = _serve(harness, make_prompts(), enforce_eager=False)
    assert served.inspected[0].graphs >= 1


def test_requests_that_are_preempted(harness: Harness) -> None:
    """The pool does not hold what all of them grow to, so some are put off and begin again."""
    prompts, grown = make_prompts(lengths=(30, 29, 31, 28), seed=19), 40
    expected = _expected(harness, prompts, grown)
    args = {"block_size": 32, "enable_prefix_caching": False, "num_gpu_blocks_override": 42, "max_model_len": 96}
    outcome = harness.call(stepping.run, harness.checkpoint(NAME), prompts, grown, args, timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.preempted > 0
    verdict = judge(expected, outcome.value.tokens, outcome.value.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict


def test_a_bias_that_is_lost_would_be_seen(harness: Harness) -> None:
    prompts = make_prompts()
    expected = _expected(harness, prompts)
    frozen = (tuple(map(tuple, prompts)),)
    outcome = harness.serve(Request(harness.checkpoint(NAME), frozen, prepare=probes.lose_distances))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    batch = outcome.value.batches[0]
    assert not judge(expected, batch.tokens, batch.logprobs, within=SAME_COMPUTATION).equal


def test_keys_in_fewer_bits_are_refused(harness: Harness) -> None:
    _expected(harness, make_prompts())
    prompts = tuple(map(tuple, make_prompts()))
    outcome = harness.serve(Request(harness.checkpoint(NAME), (prompts,), engine_args={"kv_cache_dtype": "fp8"}))
    assert not outcome.ok
    assert "cached in fewer bits" in outcome.error
    assert "--kv-cache-dtype auto" in outcome.error
