"""Decoders that write their attention out by themselves, one for each way in which they do; see tfbackend/inline.py."""

from typing import Any

import pytest

from tests.serve import probes
from tests.serve.engine import MAX_TOKENS, OURS, Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, Verdict, judge
from tests.serve.matrix.checkpoint import make_and_ask
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

WAYS = {
    "bloom": "baddbmm onto an ALiBi bias",
    "codegen": "a helper, scores divided after the mask, one linear for q, v and k of four groups",
    "falcon": "one key and value for all heads, scores divided in place",
    "falcon+alibi": "an ALiBi bias that is scaled with the scores, in another branch of the same forward",
    "falcon+grouped": "keys and values repeated for the heads that share them",
    "gpt_neo": "no scale, windows on every other layer in masks of the module's own",
    "gpt_neox_japanese": "baddbmm onto zeros, a bias on the last layer",
    "gptj": "a helper, in float32",
    "mpt": "a mask that the model cannot go without",
    "openai-gpt": "keys transposed beforehand, a mask that is multiplied, a list as result",
    "xglm": "queries scaled beforehand, bmm, positions from a table",
}

BLOCK = 32


def _prompts(*batches: list[list[int]]) -> tuple[Any, ...]:
    return tuple(tuple(map(tuple, prompts)) for prompts in batches)


def _serve(harness: Harness, name: str, *batches: list[list[int]], **options: Any) -> tuple[Served, list[Verdict]]:
    """What an engine says to each batch, and what Transformers says to that."""
    folder = harness.checkpoint(name)
    expected = [harness.ask_oracle(make_and_ask, name, folder, prompts, MAX_TOKENS).answers for prompts in batches]
    outcome = harness.serve(Request(folder, _prompts(*batches), **options))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served: Served = outcome.value
    assert set(served.model_class) == {OURS}
    pairs = zip(expected, served.batches, strict=True)
    return served, [judge(e, b.tokens, b.logprobs, within=SAME_COMPUTATION) for e, b in pairs]


@pytest.mark.parametrize("name", WAYS)
def test_served_as_transformers_does(harness: Harness, name: str) -> None:
    _, (verdict,) = _serve(harness, name, make_prompts())
    assert verdict.equal, verdict


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo", "mpt", "openai-gpt", "xglm"])
def test_compiled(harness: Harness, name: str) -> None:
    args = {"enforce_eager": False}
    served, (verdict,) = _serve(
        harness, name, make_prompts(), engine_args=args, inspect=probes.compiled_graphs, timeout=280
    )
    assert verdict.equal, verdict
    assert served.inspected[0] >= 1


@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
def test_prefix_caching_and_chunks(harness: Harness, name: str) -> None:
    """Parts of a prompt come in calls of their own, from its middle, beside those of others: positions and ALiBi
    distances are those of the engine, not of the call."""
    shared, *tails = make_prompts(lengths=(3 * BLOCK + 5, 9, 20), seed=12)
    args = {"enable_prefix_caching": True, "block_size": BLOCK, "max_num_batched_tokens": BLOCK + 8}
    first, second = [shared + tails[0], *tails], [shared + tails[1], shared, tails[0]]
    served, verdicts = _serve(harness, name, first, second, engine_args=args)
    assert all(verdict.equal for verdict in verdicts), verdicts
    assert served.batches[1].cached[:2] == [3 * BLOCK, 3 * BLOCK]


@pytest.mark.parametrize(("name", "fault"), [("bloom", probes.lose_slopes), ("gpt_neo", probes.lose_windows)])
def test_a_lost_number_shows(harness: Harness, name: str, fault: Any) -> None:
    """Or nothing above would tell whether slopes and windows are used at all."""
    _, (verdict,) = _serve(harness, name, make_prompts(), prepare=fault)
    assert not verdict.equal
