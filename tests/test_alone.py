"""Models that are run prompt by prompt: when they are, what their prompts have to be, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.sites import SIZES
from tfbackend.alone import Alone, Limits, limits_of
from tfbackend.errors import UnsupportedModelError
from tfbackend.meta import CLASSIFY, EMBED, build
from tfbackend.plan import draft_plan, make_plan
from tfbackend.serving import ServingSpec

CPU = torch.device("cpu")
LABELS = 3


class Labels(nn.Module):
    """Logits of the mean of the embedded tokens; `special` has its way with ids and rows."""

    def __init__(self, special=lambda model, ids, rows: rows):
        super().__init__()
        self.table, self.special, self.before = nn.Embedding(20, LABELS), special, 0
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=20, eos_token_id=9))

    def forward(self, input_ids):
        rows = self.special(self, input_ids, self.table(input_ids))
        return SimpleNamespace(logits=rows.mean(1))


def limits(special=lambda model, ids, rows: rows, longest=80):
    return limits_of(Alone(Labels(special), labels=True, tokenwise=False), longest, CPU)


def test_a_model_that_takes_anything():
    assert limits() == Limits(shortest=1, needs=None, types=1)


def pooled(model, ids, rows):
    return rows[:, [4]]


def test_the_shortest_prompt_is_found():
    assert limits(pooled).shortest == 5


def ended(model, ids, rows):
    return rows[:, [int((ids[0] == 9).nonzero()[-1])]]


def test_the_token_that_prompts_must_have_is_found():
    assert limits(ended).needs == 9


def drawn(model, ids, rows):
    return rows + torch.randn(LABELS)


def remembering(model, ids, rows):
    model.before += ids.shape[1]
    return rows * model.before


@pytest.mark.parametrize("special", [drawn, remembering])
def test_answers_that_follow_from_more_than_the_prompt_are_refused(special):
    with pytest.raises(UnsupportedModelError, match="from chance, or from the prompts before"):
        limits(special)


def far(model, ids, rows):
    return rows + torch.nn.functional.embedding(torch.arange(ids.shape[1]), torch.ones(64, LABELS))


def test_prompts_longer_than_a_table_are_refused():
    assert limits(far, longest=64).shortest == 1
    with pytest.raises(UnsupportedModelError, match="rows 0 to 64 of a table of 64"):
        limits(far, longest=65)


def test_labels_of_tokens_are_not_taken_for_those_of_a_text():
    model = AutoModelForTokenClassification.from_config(CONFIG_MAPPING["bert"](**SIZES, num_labels=LABELS)).eval()
    ids = torch.tensor([3, 4, 5])
    assert Alone(model, labels=True, tokenwise=True)(ids).shape == (3, LABELS)
    with pytest.raises(ValueError, match="one row of labels"):
        Alone(model, labels=True, tokenwise=False)(ids)


@pytest.mark.parametrize(("types", "found"), [(2, 2), (1, 1)])
def test_types_are_counted(types, found):
    config = CONFIG_MAPPING["bert"](**SIZES, num_labels=LABELS, type_vocab_size=types)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    assert limits_of(Alone(model, labels=True, tokenwise=False), 20, CPU).types == found


@pytest.mark.parametrize(
    ("limits", "ids", "told", "problem"),
    [
        (Limits(), [1], None, ""),
        (Limits(), [1, 2], 0, ""),
        (Limits(shortest=3), [1, 2], None, "3 tokens or more"),
        (Limits(needs=7), [1, 2], None, "the token 7"),
        (Limits(needs=7), [7, 2], None, ""),
        (Limits(types=1), [1, 2], 1, "no type 1"),
        (Limits(types=1), [1, 2], 2, ""),  # all of type 0
        (Limits(types=0), [1, 2], 2, "cannot be told"),
        (Limits(types=0), [1, 2], None, ""),
    ],
)
def test_what_a_request_may_ask(limits, ids, told, problem):
    assert problem in limits.problem(ids, told) and bool(problem) == bool(limits.problem(ids, told))


WHOLE = ServingSpec(whole_prompts=True, max_model_len=32)


def classifier(model_type, task=CLASSIFY, **fields):
    config = CONFIG_MAPPING[model_type](**SIZES, num_labels=LABELS, **fields)
    config.architectures = ["ForSequenceClassification"]
    return build(config, torch.float32, task=task)


@pytest.mark.parametrize("model_type", ["fnet", "mpnet", "convbert"])
def test_what_cannot_tell_prompts_apart_is_run_prompt_by_prompt(model_type):
    plan = make_plan(classifier(model_type), WHOLE)
    assert plan.alone and not plan.rewrites and "prompt by itself" not in plan.alone[0]
    assert "each prompt by itself" in plan.summary
    assert len(plan.alone) == len(set(plan.alone))


@pytest.mark.parametrize(
    "serving", [ServingSpec(max_model_len=32), ServingSpec(whole_prompts=True, max_model_len=32, tp_size=2)]
)
def test_it_is_refused_where_prompts_are_not_whole_or_shared_out(serving):
    with pytest.raises(UnsupportedModelError):
        make_plan(classifier("fnet"), serving)


def test_what_an_option_would_help_is_refused_and_says_so():
    """roberta runs side by side, up to the positions that it has."""
    serving = ServingSpec(whole_prompts=True, max_model_len=64)
    plan, refusals = draft_plan(classifier("roberta", max_position_embeddings=64), serving)
    assert not plan.alone and "--max-model-len" in str(refusals[0])


def test_the_pooler_of_a_classifier_stays_and_that_of_an_embedding_goes():
    assert not make_plan(classifier("mpnet"), WHOLE).rewrites
    (gone,) = make_plan(classifier("mpnet", EMBED), WHOLE).rewrites
    assert gone.qualname == "pooler"


def test_models_with_an_encoder_are_built_as_the_checkpoint_names_them():
    config = CONFIG_MAPPING["t5"](d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=1, vocab_size=50)
    config.architectures = ["T5EncoderModel"]
    assert type(build(config, torch.float32, task=EMBED).model).__name__ == "T5EncoderModel"
