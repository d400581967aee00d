"""`verify` catches every fault planted in a model that pools, and passes the models without it."""

import pytest

from tests.verification import pooling_models
from tests.verification.planting import Planter, failed, finding, in_words, verdicts
from tfbackend.meta import CLASSIFY, EMBED
from tfbackend.verification.rungs import DEFAULT, FAIL, FULL, PASS, QUICK, overall, rungs_of

pytestmark = pytest.mark.engine

LABELS = ("bert", "tokens", "answers", "reward", "ranks")
VECTORS = ("plain", "sentence", "colbert")

# Fault, the model it is planted in, the first rung that fails.
FAULTS = [
    ("pooler dropped", "bert", "logits"),
    ("wrong pooling position", "bert", "logits"),
    ("types off", "bert", "logits"),
    ("classifier bias dropped", "bert", "logits"),
    ("not a number in the classifier", "bert", "finite"),
    ("padding taken for a token", "reward", "logits"),
    ("labels swapped", "ranks", "logits"),
    ("wrong mode of pooling", "sentence", "cosine"),
    ("module of a folder dropped", "sentence", "cosine"),
    ("texts pooled together", "sentence", "cosine"),
    ("module of a folder dropped", "colbert", "cosine"),
]


@pytest.mark.parametrize("name", [*LABELS, *VECTORS])
def test_an_unplanted_model_passes(planter: Planter, name: str) -> None:
    report = planter.verify(pooling_models.make(name, planter))
    assert overall(report.results) == PASS, in_words(report)
    rungs = rungs_of(CLASSIFY if name in LABELS else EMBED)
    assert {rung.name for rung in rungs if rung.level == QUICK} == {n for n, v in verdicts(report).items() if v == PASS}


@pytest.mark.timeout(600)
def test_an_unplanted_model_passes_every_rung(planter: Planter) -> None:
    report = planter.verify(pooling_models.make("sentence", planter), level=FULL)
    assert overall(report.results) == PASS, in_words(report)
    assert [rung.name for rung in rungs_of(EMBED)] == [n for n, v in verdicts(report).items() if v == PASS]


def test_without_weights(planter: Planter) -> None:
    """A tiny checkpoint with the head stands in for them."""
    report = planter.verify(f"{pooling_models.make('bert', planter)}/config.json")
    assert overall(report.results) == PASS, in_words(report)
    assert report.architecture == "BertForSequenceClassification"


@pytest.mark.parametrize(("fault", "name", "rung"), FAULTS)
def test_faults(planter: Planter, fault: str, name: str, rung: str) -> None:
    report = planter.verify(pooling_models.make(name, planter), fault)
    assert failed(report)[:1] == [rung], in_words(report)
    assert overall(report.results) == FAIL
    assert finding(report, rung).detail


def test_texts_pooled_together_are_right_alone(planter: Planter) -> None:
    report = planter.verify(pooling_models.make("sentence", planter), "texts pooled together", DEFAULT)
    assert failed(report) == ["cosine", "batch"], in_words(report)
    assert finding(report, "cosine").detail.endswith("in a batch")
