"""Models that number tokens by leaving out padding are told from those that only look tokens up in several tables."""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import SIZES
from tfbackend.graph.numbering import numbers_by_tokens
from tfbackend.meta import build
from tfbackend.plan import draft_plan
from tfbackend.serving import ServingSpec

DECODER = {"is_decoder": True, "max_position_embeddings": 64}


def tiny(model_type, **more):
    return build(CONFIG_MAPPING[model_type](**{**SIZES, **more}), torch.float32)


@pytest.mark.parametrize("model_type", ["roberta", "camembert", "data2vec-text", "xlm-roberta"])
def test_numbering_without_padding_is_refused_by_name(model_type):
    refusals = draft_plan(tiny(model_type, **DECODER), ServingSpec())[1]
    assert ["without those that are padding" in str(r) for r in refusals] == [True]
    assert "position_embeddings" in str(refusals[0])


@pytest.mark.parametrize(("model_type", "more"), [("bert", DECODER), ("gpt2", {}), ("opt", {}), ("llama", {})])
def test_other_tables_are_no_matter(model_type, more):
    assert draft_plan(tiny(model_type, **more), ServingSpec())[1] == ()


class Counts(nn.Module):
    """Counts what `mask` says, of tokens or of ones."""

    def __init__(self, of_tokens):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4, device="meta"), nn.Embedding(9, 4, device="meta")
        self.of_tokens = of_tokens

    def forward(self, input_ids, position_ids=None):
        mask = input_ids.ne(1) if self.of_tokens else torch.ones_like(position_ids)
        if position_ids is None:
            position_ids = mask.long().cumsum(1) * 1
        return self.words(input_ids) + self.places(position_ids)


def test_a_model_of_the_users_own():
    assert numbers_by_tokens(Counts(True), "words") == "places"
    assert numbers_by_tokens(Counts(False), "words") == ""
