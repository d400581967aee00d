"""`verify` catches every planted fault, on the rung that says what is wrong, and passes the model without it."""

import pytest

from tests.verification import models
from tests.verification.planting import RANK_FAULTS, Planter, failed, finding, in_words, verdicts
from tfbackend.verification.rungs import DEFAULT, FAIL, FULL, NOT_RUN, PASS, QUICK, RUNGS, overall

pytestmark = pytest.mark.engine

# Fault, the model it is planted in, the first rung that fails.
QUICK_FAULTS = [
    ("swapped q/k", "llama", "greedy"),
    ("wrong scale", "gemma2", "topk"),
    ("dropped bias", "gemma2", "topk"),
    ("rotated rope", "llama", "greedy"),
    ("off-by-one window", "gemma2", "topk"),
    ("sink ignored", "granite_swa", "greedy"),
    ("tied head not tied", "gemma2", "greedy"),
    ("head never tied", "gemma2", "loads"),
    ("attention soft cap dropped", "gemma2", "greedy"),
    ("logits soft cap dropped", "gemma2", "topk"),
    ("expert order permuted", "qwen3_moe", "greedy"),
    ("not a number", "llama", "finite"),
    ("dead engine", "llama", "loads"),
]


@pytest.mark.parametrize("name", ["llama", "granite_swa", "qwen3_moe"])
def test_an_unplanted_model_passes(planter: Planter, name: str) -> None:
    report = planter.verify(models.make(name, planter))
    assert overall(report.results) == PASS, in_words(report)
    assert {rung.name for rung in RUNGS if rung.level == QUICK} == {n for n, v in verdicts(report).items() if v == PASS}


@pytest.mark.timeout(600)
def test_an_unplanted_model_passes_every_rung(planter: Planter) -> None:
    report = planter.verify(models.make("gemma2", planter), level=FULL)
    assert overall(report.results) == PASS, in_words(report)
    assert set(verdicts(report).values()) == {PASS}


@pytest.mark.parametrize(("fault", "name", "rung"), QUICK_FAULTS)
def test_quick_rungs(planter: Planter, fault: str, name: str, rung: str) -> None:
    report = planter.verify(models.make(name, planter), fault)
    assert failed(report)[:1] == [rung], in_words(report)
    assert overall(report.results) == FAIL
    assert finding(report, rung).detail


def test_missing_norm_weight(planter: Planter) -> None:
    """Known from the headers: nothing is started."""
    missing = "model.layers.1.post_attention_layernorm.weight"
    report = planter.verify(models.without(models.make("llama", planter), missing))
    assert failed(report) == ["ledger"]
    assert missing in finding(report, "ledger").detail
    assert verdicts(report)["loads"] == NOT_RUN


def test_state_leaked_between_requests(planter: Planter) -> None:
    """No prompt that is asked alone shows it."""
    report = planter.verify(models.make("gemma2", planter), "state leaked between requests", DEFAULT)
    assert failed(report)[:1] == ["batch"], in_words(report)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "rung"), RANK_FAULTS.items())
def test_faults_of_several_ranks(planter: Planter, fault: str, rung: str) -> None:
    report = planter.verify(models.make("gemma2", planter), fault, FULL)
    assert failed(report) == [rung], in_words(report)
