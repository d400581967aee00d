"""Gated delta rules served with vLLM's layer: the tokens of Transformers, and shared out among ranks.

There is no GPU here; see delta.py for what stands in for its kernels.
"""

from typing import Any

import pytest

from tests.serve import delta, probes
from tests.serve.engine import Harness, Request, Served
from tests.serve.judge import judge
from tests.serve.oracle import forced
from tests.serve.stating import MIXED, beginning_alike, bound_of, expected, parts, serve_equal, soak
from tests.serve.tiny import make_prompts
from tests.serve.warm import Outcome

pytestmark = pytest.mark.engine

KINDS = {
    "qwen3_next": "what belongs to one key head side by side, in two projections",
    "qwen3_5_text": "query, key and value in one projection, the others each in one",
    "olmo_hybrid+heads-of-64": "six projections",
}
FIRST = "qwen3_next"
KERNELS = ("qwen3_next+heads-of-64", "qwen3_5_text+heads-of-64", "qwen3_5_moe_text+heads-of-64")


def _serve(harness: Harness, name: str, *batches: list[list[int]], **args: Any) -> Served:
    """Serve the batches, one after the other, and check that the answers are Transformers' and the layers vLLM's."""

    def serve(request: Request) -> Outcome:
        return harness.call(delta.serve, request, timeout=request.timeout)

    served = serve_equal(serve, harness, name, batches, args, bound_of(name))
    assert {state.layers for state in served.inspected} == {("DeltaLayer",)}
    return served


@pytest.mark.parametrize("name", KINDS)
def test_more_prompts_of_mixed_lengths_than_seats(harness: Harness, name: str) -> None:
    _serve(harness, name, make_prompts(lengths=MIXED, seed=13), max_num_seqs=4)


@pytest.mark.parametrize("caching", [False, True])
def test_prompts_in_parts(harness: Harness, caching: bool) -> None:
    prompts, args = parts(caching)
    served = _serve(harness, FIRST, prompts, **args)
    assert 0 < served.inspected[0].largest_forward <= 24


def test_prefix_caching(harness: Harness) -> None:
    """A request goes on from the state that another one had at the end of a block."""
    first, second = beginning_alike()
    served = _serve(harness, FIRST, first, second, enable_prefix_caching=True, block_size=32)
    assert served.batches[0].cached == [0]
    assert min(served.batches[1].cached) >= 64


def test_compiled(harness: Harness) -> None:
    served = _serve(harness, FIRST, make_prompts(), enforce_eager=False)
    assert served.inspected[0].graphs >= 1


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks(harness: Harness, name: str) -> None:
    """Each has half of every mixer and of its state."""
    whole = _serve(harness, name, make_prompts())
    served = _serve(harness, name, make_prompts(), tensor_parallel_size=2)
    assert [state.nbytes * 2 for state in served.inspected] == [whole.inspected[0].nbytes] * 2


def test_soak(harness: Harness) -> None:
    """Requests of any length arrive at any time, are cut into parts, put off and begun again."""
    soak(harness, FIRST, 12, bound_of(FIRST), run=delta.step)


@pytest.mark.parametrize(("prepare", "equal"), [(probes.spoil_states, True), (probes.lose_states, False)])
def test_the_judge_sees_states(harness: Harness, prepare: Any, equal: bool) -> None:
    """A request's state starts clean, whatever its pages held; states that are lost between steps do not pass."""
    prompts = make_prompts(lengths=MIXED, seed=13)
    answers = expected(harness, FIRST, prompts)
    request = Request(harness.checkpoint(FIRST), (tuple(map(tuple, prompts)),), prepare=prepare)
    outcome = harness.call(delta.serve, request, timeout=request.timeout)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    batch = outcome.value.batches[0]
    assert judge(answers, batch.tokens, batch.logprobs, within=bound_of(FIRST)).equal == equal


def _apart(harness: Harness, name: str, **more: Any) -> tuple[float, float]:
    """Mean distance from Transformers in float32 of the log-probabilities of the same tokens: of vLLM's kernels in
    bfloat16, and of Transformers in bfloat16."""
    prompts = make_prompts(lengths=(*MIXED, 150), seed=13)
    expected(harness, name, prompts[:1], 1)
    batches = (tuple(map(tuple, prompts)),)
    args = {"dtype": "bfloat16", "max_num_seqs": 4} | more
    request = Request(harness.checkpoint(name), batches, engine_args=args, inspect=probes.states)
    outcome = harness.call(delta.serve_kernels, request, timeout=request.timeout)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.inspected[0].layers == ("DeltaLayer",)
    batch = outcome.value.batches[0]
    exact, rounded = (
        harness.ask_oracle(forced, harness.checkpoint(name), prompts, batch.tokens, dtype)
        for dtype in ("float32", "bfloat16")
    )
    return _distance(batch.logprobs, exact), _distance(rounded, exact)


def _distance(found: list[list[float]], wanted: list[list[float]]) -> float:
    pairs = [(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_for_a_cpu(harness: Harness, name: str) -> None:
    """The layer with vLLM's own kernels is as far from the truth as bfloat16 is, and not farther."""
    ours, transformers = _apart(harness, name)
    assert 0 < ours < 1.5 * transformers


def test_kernels_for_a_cpu_on_two_ranks(harness: Harness) -> None:
    ours, transformers = _apart(harness, KERNELS[1], tensor_parallel_size=2)
    assert 0 < ours < 1.5 * transformers
