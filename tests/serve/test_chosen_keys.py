"""Layers that choose among the keys of long contexts: served up to the length of which they choose all, no further."""

import pytest

from tests.serve.configs import MAX_LEN
from tests.serve.engine import Harness, Request
from tests.serve.matrix.attempt import expect
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

BOUND = MAX_LEN // 2


@pytest.mark.parametrize("name", ["doge+whole", "glm_moe_dsa"])
def test_one_token_more_is_refused(harness: Harness, name: str) -> None:
    assert not isinstance(expect(harness, name), str)
    prompts = tuple(map(tuple, make_prompts()))
    outcome = harness.serve(Request(harness.checkpoint(name), (prompts,), engine_args={"max_model_len": BOUND + 1}))
    assert not outcome.ok
    assert "UnsupportedModelError" in outcome.error
    assert f"longer than {BOUND}" in outcome.error
    assert "layers.0.self_attn" in outcome.error
    assert f"--max-model-len {BOUND}" in outcome.error
