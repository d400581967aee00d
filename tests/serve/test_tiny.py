"""The checkpoints can tell right from wrong: whatever a backend might drop would move a log-probability."""

from pathlib import Path

import pytest

from tests.serve.configs import VARIANTS, WINDOW
from tests.serve.engine import Harness
from tests.serve.judge import MARGIN, SAME_COMPUTATION
from tests.serve.oracle import dropped_vectors, sensitivities
from tests.serve.tiny import make_checkpoint, make_prompts, with_fields

# A key bias adds the same to all of a query's scores, which softmax takes out again, unless a rotation follows.
UNSEEN_KEY_BIASES = {"opt": "k_proj.bias", "biogpt": "k_proj.bias"}


@pytest.mark.parametrize("name", VARIANTS)
def test_dropping_anything_would_show(harness: Harness, name: str) -> None:
    answers = harness.expected(name)
    prompts = make_prompts()
    folder = harness.checkpoint(name)
    moved = harness.ask_oracle(sensitivities, VARIANTS[name], folder, prompts, answers)
    moved |= harness.ask_oracle(dropped_vectors, folder, prompts, answers)
    unseen = UNSEEN_KEY_BIASES.get(VARIANTS[name].model_type, "none")
    hidden = {what: by for what, by in moved.items() if by < 1.5 * SAME_COMPUTATION and not what.endswith(unseen)}
    assert not hidden
    ties = sum(margin < MARGIN for answer in answers for margin in answer.margins)
    assert ties <= 3
    assert len({token for answer in answers for token in answer.tokens}) >= 4


def test_every_prompt_set_crosses_the_sliding_window() -> None:
    assert max(map(len, make_prompts())) > 2 * WINDOW
    assert min(map(len, make_prompts())) < WINDOW


def test_checkpoints_are_the_same_every_time(harness: Harness, tmp_path: Path) -> None:
    harness.expected("llama")
    first = (Path(harness.checkpoint("llama")) / "model.safetensors").read_bytes()
    again = harness.ask_oracle(make_checkpoint, VARIANTS["llama"], tmp_path)
    assert (again / "model.safetensors").read_bytes() == first


def test_a_field_that_transformers_does_not_know_is_refused(harness: Harness, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"LlamaConfig has no \['atention_bias'\]"):
        harness.ask_oracle(make_checkpoint, with_fields(VARIANTS["llama"], atention_bias=True), tmp_path)
