"""What the tests of mixers with state have in common: prompts, Transformers' answers, a request, and the comparison."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.serve import probes, stepping
from tests.serve.engine import MAX_TOKENS, Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.matrix.checkpoint import make_and_ask
from tests.serve.oracle import Answer
from tests.serve.tiny import make_prompts
from tests.serve.warm import Outcome

MIXED = (3, 40, 1, 17, 64, 2, 33, 9, 50)
"""Lengths of prompts, more than there are seats."""


WITHIN = {"qwen3_next": 1e-3}
"""Transformers with its cache, fed in parts of 24 tokens, is 5e-4 away from Transformers without one."""


def bound_of(name: str) -> float:
    """How far log-probabilities of an architecture may be from Transformers'."""
    return WITHIN.get(name, SAME_COMPUTATION)


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


def serve_equal(
    serve: Callable[[Request], Outcome],
    harness: Harness,
    name: str,
    batches: Sequence[list[list[int]]],
    args: dict[str, Any],
    within: float,
) -> Served:
    """Have `serve` send the batches to one engine, one after the other; the answers are Transformers'."""
    answers = [expected(harness, name, prompts) for prompts in batches]
    outcome = serve(watched(harness, name, batches, args))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served: Served = outcome.value
    check_equal(answers, served, within)
    return served


def parts(caching: bool) -> tuple[list[list[int]], dict[str, Any]]:
    """Prompts, and what an engine needs to read them in parts of up to 24 tokens."""
    prompts = make_prompts(lengths=(100, 5, 61, 25), seed=11)
    return prompts, {"max_num_batched_tokens": 24, "enable_chunked_prefill": True, "enable_prefix_caching": caching}


def beginning_alike() -> tuple[list[list[int]], list[list[int]]]:
    """Two batches, of which each prompt of the second begins as the one of the first does."""
    shared, *tails = make_prompts(lengths=(150, 9, 20), seed=12)
    return [shared + tails[0]], [shared + tails[1], shared + tails[0][:3]]


def soak(
    harness: Harness,
    name: str,
    count: int,
    within: float,
    *,
    run: Callable[..., stepping.Stepped] = stepping.run,
    seeds: tuple[int, int] = (31, 37),
    env: dict[str, str] | None = None,
) -> None:
    """Requests of any length arrive at any time, are cut into parts, put off and begun again."""
    rng, grown = random.Random(seeds[0]), 30
    prompts = make_prompts(lengths=tuple(rng.randint(1, 200) for _ in range(count)), seed=seeds[1])
    arrivals = tuple(sorted(rng.randint(0, 3 * count) for _ in range(count)))
    answers = expected(harness, name, prompts, grown)
    args = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 10}
    outcome = harness.call(run, harness.checkpoint(name), prompts, grown, args, (), arrivals, env=env, timeout=580)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.preempted > 0
    verdict = judge(answers, outcome.value.tokens, outcome.value.logprobs, within=within)
    assert verdict.equal, verdict
