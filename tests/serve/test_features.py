"""The engine's features on top of our models; expected values are Transformers', as everywhere."""

from pathlib import Path

import pytest

from tests.serve import probes
from tests.serve.engine import OURS, Harness, Request, Served
from tests.serve.judge import judge
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

BLOCK = 32
Prompts = list[list[int]]


def _serve(harness: Harness, name: str, *batches: Prompts, **options: object) -> Served:
    """Serve the batches, check that it is ours and that each batch is what Transformers answers."""
    expected = [harness.expected(name, prompts) for prompts in batches]
    frozen = tuple(tuple(map(tuple, prompts)) for prompts in batches)
    outcome = harness.serve(Request(harness.checkpoint(name), frozen, **options))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert set(served.model_class) == {OURS}
    for answers, batch in zip(expected, served.batches, strict=True):
        verdict = judge(answers, batch.tokens, batch.logprobs)
        assert verdict.equal, verdict
    return served


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo3"])
def test_chunked_prefill(harness: Harness, name: str) -> None:
    limit = 24
    prompts = make_prompts(lengths=(100, 5, 61), seed=11)
    args = {"max_num_batched_tokens": limit, "enable_chunked_prefill": True}
    served = _serve(
        harness, name, prompts, engine_args=args, prepare=probes.watch_tokens, inspect=probes.largest_forward
    )
    assert 0 < served.inspected[0] <= limit


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prefix_caching(harness: Harness, name: str) -> None:
    shared, *tails = make_prompts(lengths=(3 * BLOCK + 5, 9, 20), seed=12)
    first, second = [shared + tails[0]], [shared + tails[1], shared]
    args = {"enable_prefix_caching": True, "block_size": BLOCK}
    served = _serve(harness, name, first, second, engine_args=args)
    assert served.batches[0].cached == [0]
    assert served.batches[1].cached == [3 * BLOCK, 3 * BLOCK]


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
def test_more_prompts_of_mixed_lengths_than_seats(harness: Harness, name: str) -> None:
    """Some wait while others decode, so prefills and decodes share a forward."""
    lengths = (3, 40, 1, 17, 64, 2, 33, 9, 50)
    _serve(harness, name, make_prompts(lengths=lengths, seed=13), engine_args={"max_num_seqs": 4})


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "gpt_neox"])
def test_compiled(harness: Harness, name: str) -> None:
    args = {"enforce_eager": False}
    served = _serve(harness, name, make_prompts(), engine_args=args, inspect=probes.seen_as_compiled, timeout=280)
    graphs, found = served.inspected[0]
    assert graphs >= 1
    assert found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_two_tensor_parallel_ranks(harness: Harness, name: str) -> None:
    """Each holds its part of every matrix."""
    args = {"tensor_parallel_size": 2}
    served = _serve(harness, name, make_prompts(), engine_args=args, inspect=probes.parameter_count, timeout=280)
    whole = (Path(harness.checkpoint(name)) / "model.safetensors").stat().st_size / 4  # float32
    assert len(served.inspected) == 2
    assert max(served.inspected) < 0.6 * whole, "the ranks hold whole matrices"
