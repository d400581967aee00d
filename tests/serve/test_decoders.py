"""Every variant of the table: tokens and log-probabilities are Transformers'."""

import pytest

from tests.serve.engine import Harness
from tests.serve.judge import judge
from tests.serve.tiny import VARIANTS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers(harness: Harness, name: str) -> None:
    expected = harness.expected(name)
    outcome = harness.serve(harness.plain_request(name))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert served.model_class == ["tfbackend.models.TransformersForCausalLM"]
    verdict = judge(expected, served.batches[0].tokens, served.batches[0].logprobs)
    assert verdict.equal, verdict
