"""Modules that call attention several times in one forward of the model: each call has a KV cache of its own."""

import pytest

from tests.serve.engine import OURS, Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.matrix.attempt import expect
from tests.serve.probes import attention_layers
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

CALLS = {
    "diffllama": ("layers.1.self_attn", 2),  # from two places of one forward
    "hrm_text": ("H_module.layers.1.self_attn", 2),  # from one place, the stacks being run in cycles
}


def _serve(harness: Harness, name: str, **engine_args: object) -> Served:
    expected = expect(harness, name)
    assert not isinstance(expected, str), expected
    prompts = tuple(map(tuple, make_prompts()))
    request = Request(
        harness.checkpoint(name), (prompts,), engine_args=engine_args, inspect=attention_layers, timeout=280
    )
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert set(served.model_class) == {OURS}
    (batch,) = served.batches
    verdict = judge(expected.answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict
    return served


@pytest.mark.parametrize("name", CALLS)
def test_each_call_has_its_cache(harness: Harness, name: str) -> None:
    (names,) = _serve(harness, name).inspected
    path, calls = CALLS[name]
    assert names[path] == [f"model.{path}.attn", *(f"model.{path}.attn_{n}" for n in range(2, calls + 1))]


@pytest.mark.parametrize("name", CALLS)
def test_chunked_prefill(harness: Harness, name: str) -> None:
    """A forward that counts on from the last one would read another call's cache."""
    _serve(harness, name, max_num_batched_tokens=16, enable_chunked_prefill=True)


@pytest.mark.parametrize("name", CALLS)
def test_compiled(harness: Harness, name: str) -> None:
    _serve(harness, name, enforce_eager=False)
