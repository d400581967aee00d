"""What `inspect` says of models that pool: the head as its class has it, and the files of sentence-transformers."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tfbackend.inspection.document import document
from tfbackend.inspection.examine import Request, inspect_model

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 128, "max_position_embeddings": 64}  # fmt: skip


def inspected(folder):
    return inspect_model(Request(str(folder), dtype="float32", max_model_len=32))


def save(auto, model_type, folder, **fields):
    auto.from_config(CONFIG_MAPPING[model_type](**SMALL, **fields)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_modules(folder, **modules):
    listed = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in ("Transformer", *modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, config in modules.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def test_a_classifier_with_a_pooler_in_its_base_model(tmp_path):
    found = inspected(save(AutoModelForSequenceClassification, "bert", tmp_path, num_labels=3))
    assert found.served.name == "TransformersForSequenceClassification"
    assert found.pooling.lines()[0] == "logits of 3 labels of the first token"
    parts = dict(found.pooling.modules)
    assert parts["classifier"] == "Linear 64 -> 3"
    assert any("64 -> 64" in what for path, what in parts.items() if path.startswith("bert.pooler"))
    assert found.accounts.complete
    assert not found.problems


def test_a_decoder_that_scores(tmp_path):
    found = inspected(save(AutoModelForSequenceClassification, "llama", tmp_path, num_labels=1, pad_token_id=0))
    assert found.pooling.lines()[0] == "logits of 1 labels of the last token that is no padding"
    assert dict(found.pooling.modules) == {"score": "Linear 64 -> 1"}


def test_a_language_model_in_a_folder_of_sentence_transformers_embeds(tmp_path):
    save(AutoModelForCausalLM, "llama", tmp_path)
    write_modules(
        tmp_path,
        Pooling={"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
        Dense={"in_features": 128, "out_features": 16},
        LayerNorm={"dimension": 16},
        Normalize={},
    )
    found = inspected(tmp_path)
    assert found.served.name == "TransformersEmbeddingModel"
    made = document(found)["pooling"]
    assert made["task"] == "embed"
    assert made["of"] == "the mean of all tokens beside the last token"
    assert [part["what"] for part in made["modules"]] == ["Dense 128 -> 16", "LayerNorm"]
    assert made["normalised"] is True


def test_vectors_of_tokens(tmp_path):
    save(AutoModel, "bert", tmp_path)
    write_modules(tmp_path, Dense={"in_features": 64, "out_features": 8, "module_input_name": "token_embeddings"})
    found = inspected(tmp_path)
    assert found.pooling.lines() == ["a vector of each token", "  Dense: Dense 64 -> 8"]


def test_a_folder_that_cannot_be_done_is_a_problem(tmp_path):
    save(AutoModel, "bert", tmp_path)
    write_modules(tmp_path, CNN={})
    found = inspected(tmp_path)
    assert found.pooling is None
    assert found.status == 2
    assert any("sentence-transformers" in finding.what for finding in found.problems)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_that_ranks(tmp_path, tied):
    """The classifier is in no file; it is made of the head, so nothing is missing."""
    save(AutoModelForCausalLM, "llama", tmp_path, tie_word_embeddings=tied)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": ["no", "yes"],
               "method": "from_2_way_softmax"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspected(tmp_path)
    assert found.pooling.labels == 1
    assert found.accounts.complete
    assert not found.problems
