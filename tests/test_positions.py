"""Models that number their tokens themselves: which ways of counting become positions, and which are left alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import DIM, HEADS, WIDTH, attend, heads
from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.interface import answering, positions_given
from tfbackend.graph.observe import TOKENS, observe
from tfbackend.graph.trial import materialise
from tfbackend.inspection.diffs import forward_diffs
from tfbackend.meta import build
from tfbackend.plan import draft_plan, make_plan
from tfbackend.positions import following_positions
from tfbackend.serving import ServingSpec

ROWS = 40


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * DIM) for _ in range(3))
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x):
        return x + self.out(attend(self, heads(self.q(x)), heads(self.k(x)), heads(self.v(x))))


class Counting(nn.Module):
    """A base model without position_ids; subclasses say how they number."""

    layer = Layer

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.words, self.places = nn.Embedding(9, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.table = nn.Parameter(torch.empty(1, ROWS, WIDTH))
        self.layers = nn.ModuleList(self.layer() for _ in range(3))

    def forward(self, input_ids, use_cache=False):
        x = self.number(self.words(input_ids))
        for layer in self.layers:
            x = layer(x)
        return (x,)


class Arange(Counting):
    def number(self, x):
        return x + self.places(torch.arange(x.shape[1], device=x.device))


class FromTwo(Counting):
    def number(self, x):
        count = x.shape[1]
        places = torch.arange(
            2,
            count + 2,
            dtype=torch.int32,
            device=x.device,
        )
        return x + self.places(places[None].expand(x.shape[0], -1))


class AfterThePast(Counting):
    def number(self, x, past=0):
        return x + self.places((torch.arange(x.size(1), device=x.device) + past)[None] + 1)


class Waves(Counting):
    def number(self, x):
        steps = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)[:, None]
        rates = 2.0 ** -torch.arange(WIDTH // 2, device=x.device)
        return x + torch.cat(((steps * rates).sin(), (steps * rates).cos()), -1)


class Rows(Counting):
    def number(self, x):
        return x + self.table[:, : x.shape[1], :]


class LaterRows(Counting):
    def number(self, x, past=0):
        return x + self.places.weight[past + 3 : past + 3 + x.shape[1]]


class OwnTable(nn.Embedding):
    """Its forward says super(), as those of Transformers do."""

    def forward(self, shape, past=0):
        return super().forward(torch.arange(past, past + shape[1], device=self.weight.device) + 2)


class InItsTable(Counting):
    def __init__(self):
        super().__init__()
        self.places = OwnTable(ROWS, WIDTH)

    def number(self, x):
        return x + self.places(x.shape[:2])


class Turning(Layer):
    """Each layer counts for itself."""

    def forward(self, x):
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * 0.3
        q, k, v = heads(self.q(x)) * angle.cos(), heads(self.k(x)) * angle.sin(), heads(self.v(x))
        return x + self.out(attend(self, q, k, v))


class InEveryLayer(Counting):
    layer = Turning

    def number(self, x):
        return x


class TwoWays(InEveryLayer):
    def number(self, x):
        return x + self.places(torch.arange(x.shape[1], device=x.device)) + self.table[:, : x.shape[1]]


class AfterAttention(Counting):
    """No query, key or value knows of it."""

    def number(self, x):
        return x

    def forward(self, input_ids, use_cache=False):
        x = super().forward(input_ids)[0]
        return (x * (1 + self.places(torch.arange(x.shape[1], device=x.device))),)


FOLLOW = (Arange, FromTwo, AfterThePast, Waves, Rows, LaterRows, InItsTable, InEveryLayer, TwoWays, AfterAttention)


def made(cls):
    with init_empty_weights(include_buffers=False):
        return cls().eval()


def run(model, ids):
    """Query, key and value of each layer and the output, rows of [tokens, ...]; each token attends to itself."""
    seen = []

    def alone(module, q, k, v, mask=None, **_):
        seen.extend(x[0].transpose(0, 1) for x in (q, k, v))
        return v.transpose(1, 2)

    with torch.no_grad(), answering(alone):
        output = model(ids)[0]
    return [*seen, output[0]]


@pytest.mark.parametrize("cls", FOLLOW, ids=lambda cls: cls.__name__)
def test_each_token_follows_its_position(cls, tmp_path):
    """Three requests side by side, one of them in its middle, are what each is when it comes alone and from its
    start."""
    base = made(cls)
    before = type(base.layers[1])
    requests = [(torch.tensor([1, 5, 3, 8]), 0), (torch.tensor([2, 2, 7, 1, 4, 6]), 3), (torch.tensor([3]), 0)]
    with following_positions(base, observe(base), tmp_path) as numbered:
        assert not numbered.problem
        assert not numbered.observation.counting
        edited = materialise(base, torch.Generator().manual_seed(5))
    assert type(base) is cls and type(base.layers[1]) is before
    original = materialise(base, torch.Generator().manual_seed(5))
    assert type(original) is cls
    wanted = [[x[past:] for x in run(original, ids[None])] for ids, past in requests]
    positions = torch.cat([torch.arange(past, len(ids)) for ids, past in requests])
    batch = torch.cat([ids[past:] for ids, past in requests])[None]
    with positions_given(positions):
        got = run(edited, batch)
    assert len(got) == 10
    for whole, *parts in zip(got, *wanted, strict=True):
        torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-5)
    uninformed = run(edited, batch)
    assert not all(torch.allclose(a, b) for a, b in zip(got, uninformed, strict=True)), "positions are without effect"


class AddsAMask(Counting):
    def number(self, x):
        return x + self.places(torch.ones(x.shape[:2], dtype=torch.long, device=x.device).cumsum(-1))


class Backwards(Counting):
    def number(self, x):
        return x + self.places(torch.arange(x.shape[1] - 1, -1, -1, device=x.device))


class EverySecond(Counting):
    def number(self, x):
        return x + self.places(torch.arange(0, 2 * x.shape[1], 2, device=x.device))


class FromTheEnd(Counting):
    """Where a token stands depends on how many come after it."""

    def number(self, x):
        return x + self.places(x.shape[1] - torch.arange(x.shape[1], device=x.device))


class ShareOfTheWhole(Counting):
    def number(self, x):
        return x * (1 + torch.arange(x.shape[1], device=x.device)[:, None] / x.shape[1])


class StartsByLength(Counting):
    def number(self, x):
        return x + self.places(torch.arange(x.shape[1], 2 * x.shape[1], device=x.device))


def numbers_of(x):
    return torch.arange(x.shape[1], device=x.device)


class Elsewhere(Counting):
    def number(self, x):
        return x + self.places(numbers_of(x))


class LastRows(Counting):
    """The rows that are taken depend on how many there are."""

    def number(self, x):
        return x + self.table[:, -x.shape[1] :]


class NewAxis(Counting):
    def number(self, x):
        return x + self.places.weight[None, : x.shape[1]]


class Narrow(Counting):
    def number(self, x):
        return x + self.table.narrow(1, 0, x.shape[1])


class MadeTable(Counting):
    def number(self, x):
        return x + (self.table * 2)[:, : x.shape[1]]


class Squeezed(Counting):
    """As many rows as there are tokens, of a table that is stretched to the call first."""

    def number(self, x):
        return x + F.interpolate(self.table.transpose(1, 2), size=x.shape[1]).transpose(1, 2)


LEFT = {
    AddsAMask: "another way than 0, 1, 2",
    Backwards: "another way than 0, 1, 2",
    EverySecond: "another way than 0, 1, 2",
    FromTheEnd: "it does not run on other positions: IndexError",
    ShareOfTheWhole: "does not follow from its position alone",
    StartsByLength: "does not follow from its position alone",
    Elsewhere: "in no method of the module",
    LastRows: "it does not run on other positions: RuntimeError",
    NewAxis: "another way than 0, 1, 2",
    Narrow: "another way than 0, 1, 2",
    MadeTable: "rows of what it has just made",
    Squeezed: "another way than 0, 1, 2",
}


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_near_misses_say_why(cls, tmp_path):
    base = made(cls)
    with following_positions(base, observe(base), tmp_path) as numbered:
        assert LEFT[cls] in numbered.problem
        assert not numbered.observation.problem
    assert type(base) is cls


class OnlyForItsMask(Counting):
    """What it counts decides who sees whom, which is the attention layer's to know."""

    def number(self, x):
        steps = torch.arange(x.shape[1], device=x.device)
        self.hidden = steps[:, None] < steps[None, :]
        return x


def test_a_count_that_nothing_is_computed_from_is_left(tmp_path):
    base = made(OnlyForItsMask)
    with following_positions(base, observe(base), tmp_path) as numbered:
        assert (numbered.methods, numbered.problem) == ({}, "")
        assert type(base) is OnlyForItsMask


class TwoTables(nn.Module):
    """One class that numbers tokens in one place and its own rows in another."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(ROWS, WIDTH))

    def forward(self, x):
        return self.weight[torch.arange(self.rows or x.shape[1], device=x.device)]


class CountsHeadsToo(Counting):
    def __init__(self):
        super().__init__()
        self.first, self.second = TwoTables(None), TwoTables(4)

    def number(self, x):
        return x + self.first(x) + self.second(x).sum(0)


def test_a_count_of_other_things_is_not_taken_for_tokens(tmp_path):
    base = made(CountsHeadsToo)
    with following_positions(base, observe(base), tmp_path) as numbered:
        assert "it counts 4 things where there are 7 tokens" in numbered.problem


SIZES = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "vocab_size": 128}
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHERE = {
    "bart": "decoder",
    "bigbird_pegasus": "decoder",
    "blenderbot": "decoder",
    "blenderbot-small": "decoder",
    "marian": "decoder",
    "mbart": "decoder",
    "mvp": "decoder.embed_positions",
    "pegasus": "decoder",
    "plbart": "decoder",
    "trocr": "decoder.embed_positions",
}
"""The module of each decoder that counts, as its source has it."""


def decoder_of(model_type, **more):
    return build(CONFIG_MAPPING[model_type](**SIZES, **TOKEN_IDS, **more), torch.float32)


@pytest.mark.parametrize("model_type", WHERE)
def test_decoders_of_sequence_to_sequence_models_follow_positions(model_type):
    meta = decoder_of(model_type)
    plan = make_plan(meta, ServingSpec())
    assert plan.numbered == (WHERE[model_type],)
    texts = [text for table in (plan.forwards, plan.methods) for path, text in table.items() if path in plan.numbered]
    assert sum(text.count("tfb_token_positions(self, torch.arange(") for text in texts) == 1
    shown = next(diff for diff in forward_diffs(meta, plan) if plan.numbered[0] in diff.sites)
    assert "+" in shown.text and "tfb_token_positions" in shown.text


def test_positions_made_of_the_token_ids_are_refused():
    """TrOCR with sinusoidal positions leaves padding out, wherever it stands in a prompt."""
    with pytest.raises(UnsupportedModelError, match=r"numbers its tokens itself.*another way than 0, 1, 2"):
        make_plan(decoder_of("trocr", use_learned_position_embeddings=False), ServingSpec())


def test_positions_in_a_rotation_that_a_model_writes_out():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = CONFIG_MAPPING["roformer"](**sizes, **TOKEN_IDS, vocab_size=128, is_decoder=True)
    plan, refusals = draft_plan(build(config, torch.float32), ServingSpec())
    assert refusals == ()
    assert plan.numbered == ("encoder.embed_positions",)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "xglm", "biogpt", "llama"])
def test_models_that_take_positions_are_told_nothing_else(model_type):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_layers": 2}
    config = CONFIG_MAPPING[model_type](**sizes, **TOKEN_IDS, vocab_size=128)
    assert make_plan(build(config, torch.float32), ServingSpec()).numbered == ()


def test_the_shuffled_positions_are_as_many_as_tokens():
    from tfbackend.positions import _SHUFFLED

    assert len(_SHUFFLED) == TOKENS
