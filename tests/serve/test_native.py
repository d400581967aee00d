"""Mixers that keep state, served with vLLM's own layers: the tokens of Transformers, and shared out among ranks."""

from typing import Any

import pytest

from tests.serve import probes
from tests.serve.engine import Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.stating import MIXED, beginning_alike, expected, parts, serve_equal, soak
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

KINDS = {
    "mamba2": ("SSDLayer", "Mamba-2 and nothing else, normed over all groups at once"),
    "falcon_h1": ("SSDLayer", "beside attention in every layer, with factors and no norm"),
    "nemotron_h": ("SSDLayer", "normed by groups, with a time step that is limited in prompts"),
    "lfm2": ("ShortConvLayer", "a short convolution, and attention in other layers"),
    "mamba2+one-group": ("SSDLayer", "one group, which every rank has, and biases"),
}
USUAL = ("mamba2", "falcon_h1", "lfm2")
AS_WRITTEN = {"TFBACKEND_NATIVE_STATE": "0"}


def _serve(harness: Harness, name: str, *batches: list[list[int]], **args: Any) -> Served:
    """Serve the batches, one after the other, and check that the answers are Transformers' and the layers vLLM's."""
    served = serve_equal(harness.serve, harness, name, batches, args, SAME_COMPUTATION)
    assert {state.layers for state in served.inspected} == {(KINDS[name][0],)}
    return served


@pytest.mark.parametrize("name", USUAL)
def test_more_prompts_of_mixed_lengths_than_seats(harness: Harness, name: str) -> None:
    _serve(harness, name, make_prompts(lengths=MIXED, seed=13), max_num_seqs=4)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("name", USUAL)
def test_prompts_in_parts(harness: Harness, name: str, caching: bool) -> None:
    prompts, args = parts(caching)
    served = _serve(harness, name, prompts, **args)
    assert 0 < served.inspected[0].largest_forward <= 24


@pytest.mark.parametrize("name", USUAL)
def test_prefix_caching(harness: Harness, name: str) -> None:
    """A request goes on from the state that another one had at the end of a block."""
    first, second = beginning_alike()
    served = _serve(harness, name, first, second, enable_prefix_caching=True, block_size=32)
    assert served.batches[0].cached == [0]
    assert min(served.batches[1].cached) >= 64


@pytest.mark.parametrize("name", USUAL)
def test_compiled(harness: Harness, name: str) -> None:
    served = _serve(harness, name, make_prompts(), enforce_eager=False)
    assert served.inspected[0].graphs >= 1


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks(harness: Harness, name: str) -> None:
    """Each has half of every mixer and of its state, and all of a group that is the only one."""
    whole = _serve(harness, name, make_prompts())
    served = _serve(harness, name, make_prompts(), tensor_parallel_size=2)
    held, total = [state.nbytes for state in served.inspected], whole.inspected[0].nbytes
    assert held[0] == held[1]
    assert total / 2 < held[0] < total if name == "mamba2+one-group" else held[0] * 2 == total


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_soak(harness: Harness, name: str) -> None:
    """Requests of any length arrive at any time, are cut into parts, put off and begun again."""
    soak(harness, name, 20, SAME_COMPUTATION)


@pytest.mark.parametrize("name", USUAL)
def test_whatever_the_pages_held(harness: Harness, name: str) -> None:
    """A request's state starts clean, be the memory it is given full of what is no number."""
    prompts = make_prompts(lengths=MIXED, seed=13)
    answers = expected(harness, name, prompts)
    batches = (tuple(map(tuple, prompts)),)
    request = Request(harness.checkpoint(name), batches, engine_args={"max_num_seqs": 4}, prepare=probes.spoil_states)
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    batch = outcome.value.batches[0]
    verdict = judge(answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict


def test_lost_state_is_seen(harness: Harness) -> None:
    """The judge says wrong where states are lost between steps, so the tests above can fail."""
    prompts = make_prompts(lengths=MIXED, seed=13)
    answers = expected(harness, "mamba2", prompts)
    batches = (tuple(map(tuple, prompts)),)
    outcome = harness.serve(Request(harness.checkpoint("mamba2"), batches, prepare=probes.lose_states))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    batch = outcome.value.batches[0]
    assert not judge(answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION).equal


def test_as_transformers_wrote_it(harness: Harness) -> None:
    """The user may have no layer of vLLM's."""
    prompts = make_prompts()
    answers = expected(harness, "mamba2", prompts)
    request = Request(harness.checkpoint("mamba2"), (tuple(map(tuple, prompts)),), inspect=probes.states)
    outcome = harness.serve(request, env=AS_WRITTEN)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.inspected[0].layers == ("StateLayer",)
    batch = outcome.value.batches[0]
    assert judge(answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION).equal
