"""Linears whose checkpoint has their weight [in, out], Transformers' Conv1D: one rank, two, and quantized."""

import pytest

from tests.serve.configs import Variant
from tests.serve.conv1d import GPT2, SQUARE, linears_of, logprobs_of, make_gptq
from tests.serve.engine import MAX_TOKENS, OURS, Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.oracle import Answer, make_and_ask
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

ONE_RANK = [
    ("attn.c_attn", "QKVParallelLinear", (384, 128)),
    ("attn.c_proj", "RowParallelLinear", (128, 128)),
    ("mlp.c_fc", "ReplicatedLinear", (192, 128)),
    ("mlp.c_proj", "ReplicatedLinear", (128, 192)),
]
TWO_RANKS = [
    ("attn.c_attn", "QKVParallelLinear", (192, 128)),
    ("attn.c_proj", "RowParallelLinear", (128, 64)),
    ("mlp.c_fc", "ColumnParallelLinear", (96, 128)),
    ("mlp.c_proj", "RowParallelLinear", (128, 96)),
]


def _ask(harness: Harness, variant: Variant) -> list[Answer]:
    return harness.ask_oracle(make_and_ask, variant, harness.checkpoint(variant.name), make_prompts(), MAX_TOKENS)


def _serve(
    harness: Harness, expected: list[Answer], name: str, within: float = SAME_COMPUTATION, **engine_args: object
) -> Served:
    prompts = tuple(map(tuple, make_prompts()))
    request = Request(harness.checkpoint(name), (prompts,), engine_args=engine_args, inspect=linears_of, timeout=280)
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert set(served.model_class) == {OURS}
    verdict = judge(expected, served.batches[0].tokens, served.batches[0].logprobs, within=within)
    assert verdict.equal, verdict
    return served


def test_one_rank(harness: Harness) -> None:
    assert _serve(harness, _ask(harness, GPT2), GPT2.name).inspected == [ONE_RANK]


def test_square_weights(harness: Harness) -> None:
    _serve(harness, _ask(harness, SQUARE), SQUARE.name)


@pytest.mark.parametrize("variant", [GPT2, SQUARE], ids=lambda variant: variant.name)
def test_two_ranks(harness: Harness, variant: Variant) -> None:
    served = _serve(harness, _ask(harness, variant), variant.name, tensor_parallel_size=2)
    assert len(served.inspected) == 2
    if variant is GPT2:
        assert served.inspected == [TWO_RANKS] * 2


def test_compiled(harness: Harness) -> None:
    _serve(harness, _ask(harness, GPT2), GPT2.name, enforce_eager=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_quantized(harness: Harness, ranks: int) -> None:
    """What quantizers write of such a linear is packed [in, out] like any other's; nothing of it is transposed."""
    folder, prompts = harness.checkpoint(f"gpt2-gptq-{ranks}"), make_prompts()
    harness.ask_oracle(make_gptq, folder)
    args = {"dtype": "bfloat16", "tensor_parallel_size": ranks}
    request = Request(folder, (tuple(map(tuple, prompts)),), engine_args=args, inspect=linears_of, timeout=280)
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert set(outcome.value.model_class) == {OURS}
    (batch,) = outcome.value.batches
    asked = [(f"{folder}-whole", prompts, batch.tokens, turn) for turn in (False, True)]
    right, turned = (harness.ask_oracle(logprobs_of, *question) for question in asked)
    assert _farthest(batch.logprobs, right) < 0.15, "more than bfloat16 accounts for"
    assert _farthest(batch.logprobs, turned) > 1.0, "a weight the wrong way round would not show"


def _farthest(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
