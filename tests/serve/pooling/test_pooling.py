"""Classifiers and encoders in a real engine: what Transformers' own class gives for each prompt alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.engine import Harness
from tests.serve.pooling.checkpoint import Case, ask_with_types, hidden_states, make_and_ask, next_logits
from tests.serve.pooling.engine import (
    Request,
    pool,
    pool_after_refusals,
    pool_after_refused_types,
    rank,
    reward_steps,
)
from tests.serve.pooling.judge import WITHIN, attempt, farthest, prompts

pytestmark = pytest.mark.engine

OURS = "tfbackend.models.Transformers"
CLASSIFIERS = ("ForSequenceClassification", "MoEForSequenceClassification")
EXPECTED = {
    "SequenceClassification": CLASSIFIERS,
    "TokenClassification": CLASSIFIERS,
    "QuestionAnswering": CLASSIFIERS,
    "": ("EmbeddingModel",),
}

CASES = [
    Case("llama"),  # the last token that is no padding
    Case("qwen2_moe", fields={"pad_token_id": None}),  # the last token, through experts
    Case("bert"),  # a pooler inside the base model
    Case("roberta"),  # positions that leave out padding
    Case("albert"),  # one layer, called again and again
    Case("modernbert"),  # windows on both sides, of every other layer
    Case("modernbert", fields={"classifier_pooling": "mean"}),
    Case("eurobert", fields={"classifier_pooling": "late"}),  # the mean of the logits
    Case("rembert"),  # attention that the model writes out
    Case("layoutlm"),  # a mask that the model computes, and that hides nothing
    Case("distilbert", "TokenClassification"),
    Case("llama", "TokenClassification"),
    Case("convbert"),  # prompt by prompt: a convolution over tokens
    Case("llama", "QuestionAnswering"),
    Case("bert", ""),  # hidden states; the checkpoint has a pooler that is not read
    Case("xlm-roberta", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder.rpartition("-")[0])
def test_equals_transformers(harness: Harness, case: Case) -> None:
    verdict = attempt(harness, case)
    assert verdict.verdict == "equal", verdict
    assert verdict.served_by.removeprefix(OURS) in EXPECTED[case.head]


@pytest.mark.parametrize("model_type", ["roberta", "modernbert"])
def test_compiled(harness: Harness, model_type: str) -> None:
    verdict = attempt(harness, Case(model_type), engine_args={"enforce_eager": False})
    assert verdict.verdict == "equal", verdict


def _pooled(harness: Harness, case: Case, **request: Any) -> tuple[list[Any], list[Any]]:
    """(what the engine gives in one call, what Transformers gives)."""
    folder, asked = harness.checkpoint(case.folder), prompts()
    expected = harness.ask_oracle(make_and_ask, case, folder, asked)
    outcome = harness.call(pool, Request(folder, tuple(map(tuple, asked)), **request), timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    return outcome.value.together, expected.answers


@pytest.mark.parametrize(
    ("problem", "activation"),
    [
        (None, lambda x: x.softmax(-1)),
        ("single_label_classification", lambda x: x.softmax(-1)),
        ("multi_label_classification", torch.sigmoid),
        ("regression", lambda x: x),
    ],
)
def test_activations_follow_the_problem_type(harness: Harness, problem: str | None, activation: Any) -> None:
    case = Case("bert", fields={"problem_type": problem, "num_labels": 2})
    given, logits = _pooled(harness, case, use_activation=True)
    assert farthest(given, activation(torch.tensor(logits)).tolist()) <= WITHIN


def test_types_of_tokens_are_used(harness: Harness) -> None:
    """As for the pair of a cross-encoder; one batch has prompts with and without types."""
    case, types = Case("bert", fields={"num_labels": 1}), (None, 4, 11, None, 0)
    folder, asked = harness.checkpoint(case.folder), prompts()
    harness.ask_oracle(make_and_ask, case, folder, asked)
    expected = harness.ask_oracle(ask_with_types, case, folder, asked, types)
    outcome = harness.call(pool, Request(folder, tuple(map(tuple, asked)), types=types), timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert farthest(outcome.value.together, expected.answers) <= WITHIN
    plain = harness.ask_oracle(make_and_ask, case, folder, asked)
    assert farthest(expected.answers, plain.answers) > 100 * WITHIN


def test_language_models_embed_the_last_token(harness: Harness) -> None:
    """As the many embedding models that are published as language models."""
    case = Case("qwen3", "CausalLM")
    folder, asked = harness.checkpoint(case.folder), prompts()
    hidden = harness.ask_oracle(hidden_states, case, folder, asked)
    outcome = harness.call(pool, Request(folder, tuple(map(tuple, asked)), "embed"), timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert "tfbackend" in outcome.value.model_class or "ForEmbedding" in outcome.value.model_class
    assert farthest(outcome.value.together, [h[-1] for h in hidden]) <= WITHIN


POOLED = {
    "pooling_mode_cls_token": lambda h: h[0],
    "pooling_mode_mean_tokens": lambda h: h.mean(0),
    "pooling_mode_mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    "pooling_mode_max_tokens": lambda h: h.amax(0),
}


@pytest.mark.parametrize("mode", POOLED)
def test_sentence_transformers_folders(harness: Harness, mode: str) -> None:
    """Pooling, a Dense with an activation, and Normalize, as their files say."""
    case = Case("roberta", "", {"layer_norm_eps": 1e-5 + 1e-7 * [*POOLED].index(mode)})
    folder, asked = harness.checkpoint(case.folder), prompts()
    hidden = harness.ask_oracle(make_and_ask, case, folder, asked).answers
    dense = _write_sentence_files(Path(folder), mode, len(hidden[0][0]))
    outcome = harness.call(pool, Request(folder, tuple(map(tuple, asked)), "embed", use_activation=True), timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    wanted = [torch.nn.functional.normalize(torch.tanh(dense(POOLED[mode](torch.tensor(h)))), dim=-1) for h in hidden]
    assert farthest(outcome.value.together, [w.tolist() for w in wanted]) <= WITHIN


def _write_sentence_files(folder: Path, mode: str, width: int) -> torch.nn.Linear:
    from safetensors.torch import save_file

    dense = torch.nn.Linear(width, 24).requires_grad_(False)
    names = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(names.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path in names.values():
        (folder / path).mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, mode: True}))
    sizes = {"in_features": width, "out_features": 24, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(sizes | activation))
    save_file({"linear.weight": dense.weight, "linear.bias": dense.bias}, folder / "2_Dense" / "model.safetensors")
    return dense


def test_requests_that_a_model_cannot_do_are_refused_and_others_go_on(harness: Harness) -> None:
    """bart takes no types of tokens, and pools the token that ends a text."""
    case = Case("bart")
    folder, asked = harness.checkpoint(case.folder), prompts()[:2]
    wanted = harness.ask_oracle(make_and_ask, case, folder, asked).answers
    outcome = harness.call(pool_after_refusals, folder, asked, timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    refusals, given = outcome.value
    assert "prompts that have the token 2" in refusals[0]
    assert "no type 1 of tokens" in refusals[1]
    assert farthest(given, wanted) <= WITHIN


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_refuse_them_too(harness: Harness, apart: bool) -> None:
    """Tokens are of one type here; on two ranks the model is in other processes than the engine, and the engine may be
    in another than its user, to whom vLLM then does not say why a request has ended."""
    case = Case("roberta", fields={"type_vocab_size": 1})
    folder, asked = harness.checkpoint(case.folder), prompts()[:2]
    wanted = harness.ask_oracle(make_and_ask, case, folder, asked).answers
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart))}
    outcome = harness.call(pool_after_refused_types, folder, asked, timeout=240, env=env)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    refusal, given = outcome.value
    assert refusal
    assert "no type 1 of tokens" in (outcome.log if apart else refusal)
    assert farthest(given, wanted) <= WITHIN


def test_rewards_of_an_outcome(harness: Harness) -> None:
    """One number for a text, as it is."""
    given, logits = _pooled(harness, Case("qwen2", fields={"num_labels": 1}))
    assert {len(row) for row in logits} == {1}
    assert farthest(given, logits) <= WITHIN


def test_rewards_of_the_steps_of_a_process(harness: Harness) -> None:
    """Of one label, at the tokens that end a step."""
    case, end, label = Case("qwen2", "TokenClassification", fields={"num_labels": 2}), 5, 1
    folder = harness.checkpoint(case.folder)
    asked = [[2, 9, 5, 8, 7, 5], [2, 5], [2, 30, 31, 32, 5, 33, 5, 5]]
    logits = harness.ask_oracle(make_and_ask, case, folder, asked).answers
    wanted = [
        [[row[label]] for row, token in zip(rows, ids, strict=True) if token == end]
        for rows, ids in zip(logits, asked, strict=True)
    ]
    outcome = harness.call(reward_steps, folder, asked, end, label, timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert farthest(outcome.value, wanted) <= WITHIN


QUERY, DOCUMENTS = "7 8 2 ", ["5 6 7 8", "9", "4 1 4 2 4 3 9"]  # of single digits, as which Qwen reads numbers


@pytest.mark.parametrize("tied", [True, False])
def test_language_models_rank_by_the_logits_of_two_tokens(harness: Harness, tied: bool) -> None:
    """Through the score API: the probability of the second token against that of the first, after the last token."""
    case = Case("qwen3", "CausalLM", fields={"tie_word_embeddings": tied})
    folder = harness.checkpoint(case.folder)
    pairs = [[*map(int, f"{QUERY}{document}".split())] for document in DOCUMENTS]
    logits = harness.ask_oracle(next_logits, case, folder, pairs)
    wanted = [[torch.tensor([row[11], row[13]]).softmax(0)[1].item()] for row in logits]
    outcome = harness.call(rank, folder, ["11", "13"], QUERY, DOCUMENTS, timeout=240)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert farthest([[score] for score in outcome.value], wanted) <= WITHIN
