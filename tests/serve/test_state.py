"""Mixers that keep state between calls: the tokens of Transformers, however the engine cuts and mixes the requests."""

import os
from typing import Any

import pytest

from tests.serve import probes, stepping
from tests.serve.engine import MAX_TOKENS, Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.stating import MIXED, beginning_alike, bound_of, expected, parts, serve_equal, soak
from tests.serve.tiny import make_prompts
from tests.serve.warm import Outcome

pytestmark = pytest.mark.engine

KINDS = {
    "lfm2": ("Hybrid", "a short convolution, and attention in other layers"),
    "mamba2": ("AttentionFree", "a state space that goes on from any token"),
    "mamba": ("AttentionFree", "a state space that is fed token by token after the first call"),
    "falcon_h1": ("Hybrid", "a state space beside attention in every layer"),
    "qwen3_next": ("MoEHybrid", "a gated delta rule, and experts"),
    "recurrent_gemma": ("Hybrid", "a recurrence in attributes, which starts anew at position 0"),
    "minimax": ("MoEHybrid", "a linear attention that keeps its state in an object of a class of its own"),
    "rwkv": ("AttentionFree", "a list of tensors for all layers, fed request by request"),
    "xlstm": ("AttentionFree", "states that are handed over and returned"),
    "zaya": ("MoEHybrid", "query, key and value made with the previous token: three tensors from one mixer"),
}
ONCE = {"kimi_linear": ("MoEHybrid", "whole keys and values beside state, of a config that has latents")}
"""Kinds that one test is enough for."""
SHARED_OUT = {"zamba2": ("Hybrid", "a block for several layers, each of which leaves the adapters of the others be")}


AS_WRITTEN = {"TFBACKEND_NATIVE_STATE": "0"}
"""vLLM has layers of its own for some of these; test_native.py tests those."""


def _serve(
    harness: Harness, name: str, *batches: list[list[int]], env: dict[str, str] | None = None, **args: Any
) -> Served:
    """Serve the batches, one after the other, and check that the answers are Transformers'."""

    def serve(request: Request) -> Outcome:
        return harness.serve(request, env=AS_WRITTEN | (env or {}))

    served = serve_equal(serve, harness, name, batches, args, bound_of(name))
    assert set(served.model_class) == {
        f"tfbackend.models.Transformers{(KINDS | ONCE | SHARED_OUT)[name][0]}ForCausalLM"
    }
    return served


@pytest.mark.parametrize("name", KINDS)
def test_more_prompts_of_mixed_lengths_than_seats(harness: Harness, name: str) -> None:
    """Some wait while others decode, and take over the states of those that are done."""
    _serve(harness, name, make_prompts(lengths=MIXED, seed=13), max_num_seqs=4)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_prompts_in_parts(harness: Harness, name: str, caching: bool) -> None:
    """Parts end anywhere, and some are of one token."""
    prompts, args = parts(caching)
    served = _serve(harness, name, prompts, **args)
    assert 0 < served.inspected[0].largest_forward <= 24


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "qwen3_next", *ONCE])
def test_prefix_caching(harness: Harness, name: str) -> None:
    """A request goes on from the state that another one had at the end of a block."""
    first, second = beginning_alike()
    served = _serve(harness, name, first, second, enable_prefix_caching=True, block_size=32)
    assert served.batches[0].cached == [0]
    assert min(served.batches[1].cached) >= 64


def test_prefix_caching_without_attention(harness: Harness) -> None:
    shared, *tails = make_prompts(lengths=(150, 9, 20), seed=12)
    args = {"enable_prefix_caching": True, "block_size": 32}
    served = _serve(harness, "mamba2", [shared + tails[0]], [shared + tails[1]], **args)
    assert served.batches[1].cached[0] >= 64


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_compiled(harness: Harness, name: str) -> None:
    served = _serve(harness, name, make_prompts(), enforce_eager=False)
    assert served.inspected[0].graphs >= 1


@pytest.mark.parametrize("name", ["falcon_h1", "mamba", *SHARED_OUT])
def test_two_ranks(harness: Harness, name: str) -> None:
    """Each has all of every mixer and its state."""
    served = _serve(harness, name, make_prompts(), tensor_parallel_size=2)
    assert len(served.inspected) == 2
    assert served.inspected[0].nbytes == served.inspected[1].nbytes > 0


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_requests_aborted_half_way(harness: Harness, name: str) -> None:
    """Others get their places, whatever state they left there."""
    prompts, doomed = make_prompts(lengths=MIXED, seed=17), (1, 4, 5)
    kept = [prompt for index, prompt in enumerate(prompts) if index not in doomed]
    answers = expected(harness, name, kept)
    folder = harness.checkpoint(name)
    outcome = harness.call(
        stepping.run, folder, prompts, MAX_TOKENS, {"max_num_seqs": 3}, doomed, env=AS_WRITTEN, timeout=240
    )
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.aborted == len(doomed)
    verdict = judge(answers, outcome.value.tokens, outcome.value.logprobs, within=bound_of(name))
    assert verdict.equal, verdict


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "qwen3_next"])
def test_requests_that_are_preempted(harness: Harness, name: str) -> None:
    """The pool does not hold what all of them grow to, so some are put off and begin again."""
    prompts, grown = make_prompts(lengths=(118, 120, 121, 115), seed=19), 40
    answers = expected(harness, name, prompts, grown)
    args = {"block_size": 64, "enable_prefix_caching": False, "max_num_seqs": 4, "num_gpu_blocks_override": 11}
    outcome = harness.call(stepping.run, harness.checkpoint(name), prompts, grown, args, env=AS_WRITTEN, timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.preempted > 0
    verdict = judge(answers, outcome.value.tokens, outcome.value.logprobs, within=bound_of(name))
    assert verdict.equal, verdict


@pytest.mark.parametrize("name", ["falcon_h1", "jamba"])
def test_soak(harness: Harness, name: str) -> None:
    """Requests of any length arrive at any time, are cut into parts, put off and begun again."""
    count = int(os.environ.get("TFBACKEND_SOAK", "30"))
    soak(harness, name, count, bound_of(name), seeds=(23, 29), env=AS_WRITTEN)


def test_speculative_decoding_is_refused(harness: Harness) -> None:
    """A token that is taken back would have to be taken out of the state."""
    args = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}
    expected(harness, "lfm2", make_prompts())
    prompts = tuple(map(tuple, make_prompts()))
    outcome = harness.serve(Request(harness.checkpoint("lfm2"), (prompts,), engine_args=args))
    assert not outcome.ok
    assert "UnsupportedModelError" in outcome.error
    assert "speculative decoding takes back tokens" in outcome.error
    assert "layers.0.conv" in outcome.error


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_whatever_the_pages_held(harness: Harness, name: str) -> None:
    """A request's state starts clean, be the memory it is given full of what is no number."""
    prompts = make_prompts(lengths=MIXED, seed=13)
    answers = expected(harness, name, prompts)
    request = Request(
        harness.checkpoint(name),
        (tuple(map(tuple, prompts)),),
        engine_args={"max_num_seqs": 4},
        prepare=probes.spoil_states,
    )
    outcome = harness.serve(request, env=AS_WRITTEN)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    batch = outcome.value.batches[0]
    verdict = judge(answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict


def test_lost_state_is_seen(harness: Harness) -> None:
    """The judge says wrong where states are lost between steps, so the tests above can fail."""
    prompts = make_prompts(lengths=MIXED, seed=13)
    answers = expected(harness, "mamba2", prompts)
    batches = (tuple(map(tuple, prompts)),)
    request = Request(harness.checkpoint("mamba2"), batches, prepare=probes.lose_states)
    outcome = harness.serve(request, env=AS_WRITTEN)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    batch = outcome.value.batches[0]
    assert not judge(answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION).equal
