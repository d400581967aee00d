"""Several ranks: the tokens of Transformers, and each head on one rank. `ranks.py` serves the rest."""

import pytest

from tests.serve import ranks
from tests.serve.engine import Harness, Request
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.matrix.attempt import expect
from tests.serve.tiny import make_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CASES = [
    ("gpt_bigcode", "TP 2"),  # one KV head, which both ranks have
    ("falcon", "TP 2"),  # attention written out, which counts the heads of all
    ("cohere", "TP 2"),  # a norm for each head
    ("gpt2", "PP 2"),  # positions added to the embedding, on the first stage alone
    ("gemma2", "PP 2"),  # a scaled embedding, and a table that the last stage has too, for its head
    ("qwen3_moe", "TP 2 x PP 2"),
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_equals_transformers(harness: Harness, name: str, way: str) -> None:
    served, verdict = ranks.serve(harness, name, way)
    assert verdict is not None, served
    assert not isinstance(served, str)
    assert verdict.equal, verdict
    assert all(model.startswith("tfbackend.models.") for model in served.model_class)
    assert len(served.inspected) == (4 if " x " in way else 2)
    alone, _ = ranks.serve(harness, name, "one rank")
    assert not isinstance(alone, str)
    assert sum(served.inspected) == alone.inspected[0], "each head of each layer is on one rank"
    assert len(set(served.inspected)) == 1


def test_a_stage_in_the_middle(harness: Harness) -> None:
    """It is handed hidden states, and hands some on; chunks of prompts and single tokens travel together."""
    expected = expect(harness, "gemma3_text")
    assert not isinstance(expected, str)
    prompts = tuple(map(tuple, make_prompts()))
    args = {**ranks.TRACED, "pipeline_parallel_size": 3, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    outcome = harness.serve(Request(harness.checkpoint("gemma3_text"), (prompts,), engine_args=args, timeout=280))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    batch = outcome.value.batches[0]
    assert len(outcome.value.model_class) == 3
    verdict = judge(expected.answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict


def test_stages_that_vllm_would_crash_at_are_refused(harness: Harness) -> None:
    """On a CPU vLLM makes no room for what a stage is handed where nothing is compiled."""
    assert not isinstance(expect(harness, "gpt2"), str)
    prompts = tuple(map(tuple, make_prompts()))
    outcome = harness.serve(Request(harness.checkpoint("gpt2"), (prompts,), engine_args={"pipeline_parallel_size": 2}))
    assert not outcome.ok
    assert "runs pipeline stages on a CPU only where it compiles the model" in outcome.log
