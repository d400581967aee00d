"""What the ladder makes of its findings, without an engine."""

import math
from dataclasses import replace

import pytest

from tests.serve.matrix.derive import tiny_config
from tfbackend.meta import CLASSIFY, EMBED, GENERATE
from tfbackend.verification.answers import Answer, Rows
from tfbackend.verification.document import document, failure
from tfbackend.verification.judge import LOGPROB, top_distance
from tfbackend.verification.ladder import CHECKPOINT, Report, Request
from tfbackend.verification.prompts import TOGETHER, TOKENS, make_prompts
from tfbackend.verification.rungs import FAIL, NOT_RUN, PASS, QUICK, RUNGS, UNKNOWN, Finding, Result, overall, rungs_of
from tfbackend.verification.shrink import shrink_config
from tfbackend.verification.vectors import gap, texts_of

FIRST = ((5, -1.0), (6, -2.0))
ANSWER = Answer((5, 6), (-1.0, -1.5), (1.0, 0.5), (FIRST, ((6, -1.5), (7, -2.0))))


def _results(**verdicts: str) -> tuple[Result, ...]:
    return tuple(Result(rung, Finding(verdicts.get(rung.name, PASS)), CHECKPOINT) for rung in RUNGS)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({}, PASS),
        ({"pp2": NOT_RUN, "batch": NOT_RUN}, PASS),
        ({"greedy": NOT_RUN}, UNKNOWN),
        ({"topk": UNKNOWN}, UNKNOWN),
        ({"topk": UNKNOWN, "tp2": FAIL}, FAIL),
    ],
)
def test_overall(verdicts: dict[str, str], expected: str) -> None:
    assert overall(_results(**verdicts)) == expected


def test_a_document_has_every_rung_and_no_nan() -> None:
    results = (*_results()[:-1], Result(RUNGS[-1], Finding(FAIL, value=math.nan), CHECKPOINT))
    made = document(Report(Request("here"), "LlamaForCausalLM", CHECKPOINT, results, 1.0))
    assert [rung["name"] for rung in made["rungs"]] == [rung.name for rung in RUNGS]
    assert made["rungs"][-1]["value"] is None
    assert (made["verdict"], made["status"]) == ("fail", 1)
    assert set(failure("here", QUICK, "no such folder")) == set(made)


@pytest.mark.parametrize(
    ("top", "worst"),
    [
        (FIRST, 0.0),
        (((5, -1.0), (6, -2.25)), 0.25),
        (((5, -1.0), (9, -2.75)), 0.75),  # 6 did not come: it is below the least that did
        (((5, math.nan), (6, -2.0)), math.nan),
        ((), math.nan),
    ],
)
def test_top_distance(top: tuple[tuple[int, float], ...], worst: float) -> None:
    found = top_distance([ANSWER], [replace(ANSWER, top=(top, ANSWER.top[1]))])
    assert found.worst == pytest.approx(worst, nan_ok=True)
    assert found.within == (worst <= LOGPROB)


def test_top_distance_stops_after_the_first_different_token() -> None:
    other = replace(ANSWER, tokens=(9, 6), top=(FIRST, ((6, -9.0), (7, -9.0))))
    assert top_distance([ANSWER], [other]).compared == 2
    assert not top_distance([], []).within


def test_prompts_reach_past_the_windows_that_can_be_reached() -> None:
    prompts = make_prompts(500, [16, 100, 4096], 512, 0)
    assert prompts.unreached == (4096,)
    assert max(map(len, prompts.short)) == 105
    assert len((*prompts.short, *prompts.long, *prompts.others)) == TOGETHER
    assert prompts.long[0][:96] == prompts.long[1][:96]
    assert all(0 in prompt for prompt in prompts.short if len(prompt) > 1)


def test_texts_end_as_a_tokenizer_ends_them() -> None:
    texts = texts_of(make_prompts(500, [16], 512, 0), 500, 2, 0, typed=True)
    assert all(text.ids.count(2) == 1 for text in texts.asked)
    assert [text.ids[-1] for text in texts.asked].count(0) == 1
    assert [text.second for text in texts.asked][:4] == [None, 3, None, 23]
    assert texts_of(make_prompts(500, [16], 512), 500, None, None, typed=False).asked[0].second is None


@pytest.mark.parametrize(
    ("other", "apart", "vectors", "labels"),
    [
        (((3.0, 4.0),), 0.0, True, True),
        (((3.001, 4.0),), 1e-3, True, True),
        (((3.0, 4.01),), 1e-2, False, False),
        (((math.nan, 4.0),), math.nan, False, False),
        (((3.0, 4.0), (3.0, 4.0)), math.inf, False, False),
    ],
)
def test_gap(other: Rows, apart: float, vectors: bool, labels: bool) -> None:
    found = gap([((3.0, 4.0),)], [other])
    assert found.apart == pytest.approx(apart, nan_ok=True)
    assert (found.within(vectors=True), found.within(vectors=False)) == (vectors, labels)
    assert not gap([], []).within(vectors=False)


def test_small_vectors_are_told_apart_by_their_directions() -> None:
    found = gap([((1e-3, 0.0),)], [((0.0, 1e-3),)])
    assert found.within(vectors=False)
    assert not found.within(vectors=True)


@pytest.mark.parametrize(("task", "own"), [(EMBED, "cosine"), (CLASSIFY, "logits")])
def test_rungs_of_models_that_pool(task: str, own: str) -> None:
    names = ["meta", "proofs", "ledger", "loads", "finite", own, "batch", "compiled", "tp2"]
    assert [rung.name for rung in rungs_of(task)] == names
    assert rungs_of(GENERATE) == RUNGS


def test_prompts_fit_a_short_context() -> None:
    assert make_prompts(500, [], 40).longest <= 40 + TOKENS - TOKENS


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "gpt_bigcode", "opt", "olmo3", "cohere2"])
def test_what_is_already_tiny_keeps_what_it_computes(model_type: str) -> None:
    config = tiny_config(model_type)
    small, given = shrink_config(config).to_dict(), config.to_dict()
    sizes = {name for name, value in given.items() if small.get(name) != value}
    assert not [name for name in sizes if isinstance(given[name], (bool, str, float)) and name != "dtype"]
