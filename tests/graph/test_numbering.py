"""Models that number tokens by leaving out padding are told from those that only look tokens up in several tables."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import SIZES
from tfbackend.graph.numbering import TokenNumbering, numbers_by_tokens, read_numbering, renumbered
from tfbackend.graph.observe import observe
from tfbackend.graph.token_types import count_types
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


WHOLE = ServingSpec(whole_prompts=True, max_model_len=32)


@pytest.mark.parametrize("model_type", ["roberta", "camembert", "data2vec-text", "xlm-roberta", "xlm-roberta-xl"])
def test_numbering_without_padding_is_read_where_prompts_come_whole(model_type):
    config = CONFIG_MAPPING[model_type](**{**SIZES, "max_position_embeddings": 64, "pad_token_id": 5})
    plan, refusals = draft_plan(build(config, torch.float32, task="embed"), WHOLE)
    assert refusals == () and plan.numbering == TokenNumbering(padding=5, start=6, rows=64)


def test_prompts_longer_than_the_tables_are_refused():
    """Positions begin behind the padding token's, so that the last of the table come too soon."""
    config = CONFIG_MAPPING["roberta"](**{**SIZES, "max_position_embeddings": 34, "pad_token_id": 2})
    built = build(config, torch.float32, task="embed")
    assert draft_plan(built, ServingSpec(whole_prompts=True, max_model_len=31))[1] == ()
    (refusal,) = draft_plan(built, ServingSpec(whole_prompts=True, max_model_len=32))[1]
    assert "--max-model-len 31" in str(refusal)


def test_prompts_side_by_side_are_numbered_as_each_alone():
    """Beside Transformers' own function, prompt by prompt."""
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    prompts = [[7, 8, 1, 9], [1], [1, 1, 6], [4], [5, 1, 1], [3, 1, 2, 1]]
    own = RobertaEmbeddings.create_position_ids_from_input_ids
    wanted = [own(torch.tensor([ids]), padding_idx=1)[0] for ids in prompts]
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    places = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    assert torch.equal(TokenNumbering(1, 2, 64).number(ids, places), torch.cat(wanted))


class Odd(Counts):
    """Counts from the end."""

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = input_ids.ne(1).long().flip(1).cumsum(1)
        return self.words(input_ids) + self.places(position_ids)


def test_numbering_of_another_kind_is_not_known():
    model = Odd(True)
    model.config = SimpleNamespace(_attn_implementation="eager", get_text_config=lambda: model.config)
    assert read_numbering(model, observe(model), "words", 1) == "they are counted in no way that is known"


@pytest.mark.parametrize(
    ("model_type", "fields", "types"),
    [
        ("bert", {}, 2),
        ("albert", {}, 2),
        ("bert", {"type_vocab_size": 1}, 1),  # type 1 would be a row that its table does not have
        ("gpt2", {}, 0),  # looks types up among its words: none is not type 0
        ("llama", {}, 1),  # has none
    ],
)
def test_types_of_tokens(model_type, fields, types):
    base = build(CONFIG_MAPPING[model_type](**SIZES, **fields), torch.float32, task="embed").base
    assert count_types(base, observe(base)) == types


class From(Counts):
    """Begins at `start` where it is given no positions, and counts from what it is given."""

    start = 0

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None] + self.start
        return self.words(input_ids) + self.places(position_ids)


@pytest.mark.parametrize(("start", "found"), [(2, "places"), (0, "")])
def test_positions_that_are_not_the_models_own_are_seen(start, found):
    model = From(False)
    model.start = start
    model.config = SimpleNamespace(_attn_implementation="eager", get_text_config=lambda: model.config)
    assert renumbered(model, observe(model), "words") == found
