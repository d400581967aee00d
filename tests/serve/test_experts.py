"""Experts spread over two ranks, by their insides and whole, and with copies: the tokens of Transformers."""

from pathlib import Path
from typing import Any

import pytest

from tests.serve import probes
from tests.serve.engine import Harness, Request
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.matrix.attempt import expect
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

WAYS: dict[str, dict[str, Any]] = {
    "insides": {},
    "whole": {"enable_expert_parallel": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_two_ranks(harness: Harness, name: str, way: str) -> None:
    expected = expect(harness, name)
    assert not isinstance(expected, str), expected
    prompts = tuple(map(tuple, make_prompts()))
    folder, args = harness.checkpoint(name), {"tensor_parallel_size": 2, **WAYS[way]}
    outcome = harness.serve(Request(folder, (prompts,), engine_args=args, inspect=probes.parameter_count, timeout=280))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert all("MoE" in served_by for served_by in served.model_class)
    whole = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors")) / 4  # float32
    assert max(served.inspected) < 0.65 * whole, "the ranks hold whole experts"
    batch = served.batches[0]
    verdict = judge(expected.answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict
