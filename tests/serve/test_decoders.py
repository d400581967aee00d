"""Every variant of the table: tokens and log-probabilities are Transformers'."""

import pytest

from tests.serve.engine import OURS, Harness
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.tiny import VARIANTS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers(harness: Harness, name: str) -> None:
    expected = harness.expected(name)
    outcome = harness.serve(harness.plain_request(name))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert served.model_class == [OURS]
    verdict = judge(expected, served.batches[0].tokens, served.batches[0].logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict
