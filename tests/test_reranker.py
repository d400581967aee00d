"""Language models that rank: the rows of their heads that become a classifier, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.sites import SIZES
from tfbackend.errors import ConfigError, UnsupportedModelError
from tfbackend.graph.observe import observe
from tfbackend.meta import CLASSIFY, build
from tfbackend.plan_alone import unplanned
from tfbackend.reranker import Reranker, classifier_weight, head_finder, reranker_of, settle_labels

HEAD = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])
TWO, PLAIN = Reranker(("no", "yes"), True), Reranker(("a", "b"), False)


def config_of(**fields):
    config = SimpleNamespace(num_labels=2, **fields)
    config.get_text_config = lambda: config
    return config


def test_rows():
    assert TWO.rows(HEAD, (2, 1)).tolist() == [[-4.0, -6.0]]
    assert PLAIN.rows(HEAD, (2, 0)).tolist() == [[7.0, 11.0], [1.0, 2.0]]


def test_the_sigmoid_of_the_one_logit_is_the_softmax_over_two():
    x = torch.tensor([0.3, -0.2])
    both = (HEAD[[2, 1]] @ x).softmax(0)[1]
    assert torch.allclose((TWO.rows(HEAD, (2, 1)) @ x).sigmoid()[0], both)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, None),
        ({"method": "of something else"}, None),
        ({"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}, TWO),
        ({"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}, TWO),
        ({"classifier_from_token": ["a", "b"], "method": "no_post_processing"}, PLAIN),
    ],
)
def test_configs(fields, found):
    config = config_of(**fields)
    assert reranker_of(config) == found
    settle_labels(config)
    assert config.num_labels == {None: 2, TWO: 1, PLAIN: 2}[found]


@pytest.mark.parametrize("method", [None, "from_3_way_softmax", "from_2_way_softmax"])
def test_other_configs_are_refused(method):
    with pytest.raises(ConfigError, match="cannot be told from its tokens"):
        reranker_of(config_of(classifier_from_token=["a"], method=method))


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_becomes_the_classifier(tied):
    config = CONFIG_MAPPING["llama"](**SIZES, tie_word_embeddings=tied)
    built = build(config, torch.float32)
    source = "model.embed_tokens.weight" if tied else "lm_head.weight"
    given = [("model.norm.weight", torch.ones(2)), (source, HEAD)]
    made = dict(TWO.convert(given, (2, 1), head_finder(built, unplanned(built)), "score.weight"))
    assert set(made) == {"model.norm.weight", source, "score.weight"}
    assert made["score.weight"].tolist() == [[-4.0, -6.0]]


def test_a_quantized_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="quantized"):
        list(TWO.convert([("h", torch.zeros(3, 2, dtype=torch.int8))], (2, 1), lambda name: True, "score.weight"))


def test_logits_that_are_capped_are_refused():
    built = build(CONFIG_MAPPING["gemma2"](**SIZES, head_dim=16, final_logit_softcapping=3.0), torch.float32)
    with pytest.raises(UnsupportedModelError, match="more than a product"):
        head_finder(built, unplanned(built))


@pytest.mark.parametrize(("model_type", "name"), [("llama", "score.weight"), ("bert", "")])
def test_the_classifier_must_be_one_linear(model_type, name):
    from tfbackend.classifier import plan_classifier

    config = CONFIG_MAPPING[model_type](**{**SIZES, "num_labels": 1})
    built = build(config, torch.float32, task=CLASSIFY)
    plan = plan_classifier(built, observe(built.base))
    if name:
        assert classifier_weight(built.model, plan) == name
    else:
        with pytest.raises(UnsupportedModelError, match="one linear without a bias"):
            classifier_weight(built.model, plan)
