"""Verdicts of engines that did not come up, and what is kept between runs."""

from pathlib import Path

import pytest

from tests.serve.matrix.attempt import failure
from tests.serve.matrix.coverage import render
from tests.serve.matrix.results import Result, Store
from tests.serve.warm import Outcome

OURS = 'File "/somewhere/tfbackend/plan.py", line 1'
FORK = 'File "/somewhere/tfbackend/verification/processes.py", line 1'
VLLMS = 'File "/site-packages/vllm/model_executor/models/transformers/base.py", line 1'


@pytest.mark.parametrize(
    ("error", "backend", "verdict"),
    [
        ("UnsupportedModelError: no.", "ours", "refused"),
        ("ConfigError: no.", "ours", "refused"),
        ("MissingTensorError: no.", "ours", "crashed"),
        ("ValueError: no.", "ours", "crashed"),
        ("ValueError: no.", "intree", "refused"),
        ("pydantic_core._pydantic_core.ValidationError: no.", "ours", "refused"),
        ("RuntimeError: no.", "intree", "crashed"),
        ("the child died, signal SIGSEGV", "ours", "crashed"),
        ("no answer within 240 s", "ours", "crashed"),
    ],
)
def test_verdict_of_an_error(error: str, backend: str, verdict: str) -> None:
    assert failure(Outcome(None, error, "", 1.0), backend).verdict == verdict


def test_reason_is_one_line_and_the_error_that_pydantic_wraps() -> None:
    error = "ValidationError: 1 validation error for ModelConfig\n  Value error, It is\nso. [type=value_error, input=1]"
    assert failure(Outcome(None, error, "", 1.0), "ours").reason == "It is so."


def test_reason_names_no_folder_of_this_machine() -> None:
    error = "OSError: no '/tmp/tfbackend-serve-ab_1/models/fuyu', see /opt/lib/site-packages/vllm/x.py"
    assert failure(Outcome(None, error, "", 1.0), "ours").reason == "OSError: no 'models/fuyu', see vllm/x.py"


def test_a_crash_of_the_class_of_vllm_is_said_to_be_that() -> None:
    said = "left to vLLM's own backend, which says: "
    assert failure(Outcome(None, "ValueError: no", FORK + VLLMS, 1.0), "ours").reason == said + "ValueError: no"
    assert failure(Outcome(None, "ValueError: no", VLLMS + OURS, 1.0), "ours").reason == "ValueError: no"
    assert failure(Outcome(None, "ValueError: no", VLLMS, 1.0), "intree").reason == "ValueError: no"


def test_results_survive_and_are_rendered(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    store = Store(path)
    store.put("gpt2", "dense", "GPT2LMHeadModel", "ours", Result("equal", sites={"qkv": 2, "left_linear": 1}))
    store.put("gpt2", "dense", "GPT2LMHeadModel", "intree", Result("wrong", reason="a | b"))
    store.put("bloom", "", "", "ours", Result("unmade", reason="no checkpoint"))
    again = Store(path)
    assert again.rows == store.rows
    assert (again.verdict("gpt2", "ours"), again.verdict("gpt2", "intree"), again.verdict("opt", "ours")) == (
        "equal",
        "wrong",
        "",
    )
    page = render(again)
    assert "| `gpt2` | GPT2LMHeadModel | equal | wrong | 2 / - |" in page
    assert "| `bloom` | no checkpoint |" in page
    assert "| `musicgen` | its tokens are sound" in page


def test_two_runs_at_once_keep_each_others_results(tmp_path: Path) -> None:
    one, other = Store(tmp_path / "matrix.json"), Store(tmp_path / "matrix.json")
    one.put("gpt2", "dense", "GPT2LMHeadModel", "ours", Result("equal"))
    other.put("opt", "dense", "OPTForCausalLM", "ours", Result("equal"))
    assert set(Store(tmp_path / "matrix.json").rows) == {"gpt2", "opt"}
