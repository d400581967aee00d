"""What a classifier does between hidden states and the logits of labels: which token, and what is done with it."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput

from tests.sites import SIZES, WIDTH, OneSite
from tfbackend.classifier import ClassifierPlan, plan_classifier
from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.observe import observe
from tfbackend.head import runnable
from tfbackend.meta import CLASSIFY, build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec
from tfbackend.unread import unread_parts

LABELS, PADDING, VOCABULARY = 3, 2, 50


class Base(OneSite):
    """Hidden states, and the tanh of a linear of the first as what is pooled."""

    def __init__(self, sites):
        super().__init__(sites)
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids, position_ids=None, use_cache=None):
        h = super().forward(input_ids, position_ids=position_ids)
        return BaseModelOutputWithPooling(last_hidden_state=h, pooler_output=torch.tanh(self.pooler(h[:, 0])))


class Labels(nn.Module):
    """A classifier; the variations say what they do with hidden states `h`, token ids and what was pooled."""

    def __init__(self, padding=PADDING):
        super().__init__()
        text = SimpleNamespace(pad_token_id=padding, vocab_size=VOCABULARY)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.model = Base([nn.Identity()])
        self.dense, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids, use_cache=None):
        output = self.model(input_ids)
        return SequenceClassifierOutput(logits=self.logits(output[0], input_ids, output[1]))


def read(logits, **kwargs) -> tuple[ClassifierPlan, nn.Module]:
    with init_empty_weights(include_buffers=False):
        model = type("Variation", (Labels,), {"logits": logits})(**kwargs).eval()
    meta = SimpleNamespace(model=model, base_path="model", base=model.model)
    return plan_classifier(meta, observe(model.model)), model


def last_of(ids, padding):
    """The place of the last token of each prompt that is no padding."""
    places = torch.arange(ids.shape[1], device=ids.device)
    return ((ids != padding).int() * places).argmax(-1)


def picked(x, places):
    return x[torch.arange(x.shape[0], device=x.device), places]


@pytest.mark.parametrize(
    ("logits", "pick", "modules"),
    [
        (lambda self, h, ids, pooled: self.out(h[:, 0]), "first", ("out",)),
        (lambda self, h, ids, pooled: self.out(h)[:, 0], "first", ("out",)),
        (lambda self, h, ids, pooled: self.out(torch.tanh(self.dense(h[:, 0, :]))), "first", ("dense", "out")),
        (lambda self, h, ids, pooled: self.out(pooled), "first", ("model.pooler", "out")),
        (lambda self, h, ids, pooled: self.out(pooled + h[:, 0]), "first", ("model.pooler", "out")),
        (lambda self, h, ids, pooled: self.out(h[:, -1]), "last", ("out",)),
        (lambda self, h, ids, pooled: picked(self.out(h), last_of(ids, PADDING)), "last_real", ("out",)),
        (lambda self, h, ids, pooled: self.out(picked(h, last_of(ids, PADDING)) * 3), "last_real", ("out",)),
        (lambda self, h, ids, pooled: self.out(torch.tanh(h.mean(1))), "mean", ("out",)),
        (lambda self, h, ids, pooled: torch.tanh(self.out(h)).mean(1), "mean_logits", ("out",)),
        (lambda self, h, ids, pooled: self.out(torch.tanh(h)), "each", ("out",)),
    ],
)
def test_which_token_and_what_is_done_with_it(logits, pick, modules):
    plan, _ = read(logits)
    assert (plan.pick, plan.labels, plan.modules) == (pick, LABELS, modules)
    assert plan.padding == (PADDING if pick == "last_real" else None)


@pytest.mark.parametrize(
    "logits",
    [
        lambda self, h, ids, pooled: self.out(h[:, min(1, h.shape[1] - 1)]),
        lambda self, h, ids, pooled: self.out(h.max(1).values),
        lambda self, h, ids, pooled: self.out(h[:, 0] + h[:, -1]),
        lambda self, h, ids, pooled: self.out(h[:, 0]) * h.shape[1],
        lambda self, h, ids, pooled: self.out(h[:, 0] + ids.float().mean()),
        lambda self, h, ids, pooled: self.out(pooled) + h[:, -1, :LABELS],
        # the token in the middle, which is the only one where there is but one
        lambda self, h, ids, pooled: self.out(h[:, ids.shape[1] // 2]),
        # the token before the first padding, which is not the last that is none
        lambda self, h, ids, pooled: picked(self.out(h), (ids == PADDING).int().argmax(-1) - 1),
    ],
)
def test_anything_else_is_refused(logits):
    with pytest.raises(UnsupportedModelError, match="logits of its labels cannot be read"):
        read(logits)


def test_padding_that_is_not_the_configs_is_refused():
    with pytest.raises(UnsupportedModelError):
        read(lambda self, h, ids, pooled: picked(self.out(h), last_of(ids, 7)))


def _one_at_a_time(self, h, ids, pooled):
    """As the classes of decoders: without a padding token they take one prompt at a time."""
    if self.config.get_text_config().pad_token_id is None and ids.shape[0] != 1:
        raise ValueError("one prompt at a time")
    return picked(self.out(h), ids.shape[1] - 1)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("prompts", [1, 2, 5])
def test_the_graph_runs_over_any_number_of_prompts(prompts, padding):
    plan, _ = read(_one_at_a_time, padding=padding)
    assert (plan.pick, plan.padding) == ("last", None)
    real = nn.ModuleDict({"out": nn.Linear(WIDTH, LABELS)})
    x = torch.randn(prompts, 1, WIDTH)
    assert torch.allclose(runnable(plan.graph, real)(x), real["out"](x[:, 0]))


def tiny(model_type, **more):
    return build(CONFIG_MAPPING[model_type](**SIZES | {"num_labels": LABELS} | more), torch.float32, task=CLASSIFY)


@pytest.mark.parametrize(
    ("model_type", "more", "pick"),
    [
        ("llama", {"pad_token_id": 0}, "last_real"),
        ("llama", {"pad_token_id": None}, "last"),
        ("bert", {}, "first"),
        ("modernbert", {"classifier_pooling": "mean", "pad_token_id": 0}, "mean"),
        ("eurobert", {"classifier_pooling": "late", "pad_token_id": 0}, "mean_logits"),
        ("eurobert", {"classifier_pooling": "bos", "pad_token_id": 0}, "first"),
    ],
)
def test_transformers_own_classes(model_type, more, pick):
    plan = make_plan(tiny(model_type, **more), ServingSpec(whole_prompts=True, max_model_len=64))
    assert plan.classifier is not None and plan.classifier.pick == pick


def test_what_nothing_follows_from_is_left_out():
    """roberta's classifier has no use for a pooler, bert's has; an embedding has none for bert's."""
    serving = ServingSpec(whole_prompts=True, max_model_len=64)
    assert make_plan(tiny("bert"), serving).counts["idle"] == 0
    config = CONFIG_MAPPING["bert"](**SIZES)
    plan = make_plan(build(config, torch.float32, task="embed"), serving)
    assert [r.qualname for r in plan.rewrites if r.fuser == "idle"] == ["pooler"]


@pytest.mark.parametrize(("model_type", "idle"), [("xlnet", frozenset()), ("bert", frozenset({"pooler"}))])
def test_layers_that_give_alike_are_no_idle_parts(model_type, idle):
    """xlnet begins and ends with one dropout, and only one of its layers is run: what they give is one tensor."""
    fields = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 32} if model_type == "xlnet" else SIZES
    base = build(CONFIG_MAPPING[model_type](**fields), torch.float32, task="embed").base
    assert unread_parts(base, observe(base)) == idle


def test_starts_and_ends_of_answers_are_labels_of_tokens():
    config = CONFIG_MAPPING["bert"](**SIZES, num_labels=2)
    config.architectures = ["BertForQuestionAnswering"]
    built = build(config, torch.float32, task=CLASSIFY)
    plan = plan_classifier(built, observe(built.base))
    assert (plan.pick, plan.labels, plan.modules) == ("each", 2, ("qa_outputs",))
