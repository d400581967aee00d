"""Mixers that keep state outside Transformers' cache: in attributes, in what they are given, in what they return."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.serve.matrix.derive import tiny_config
from tests.sites import WIDTH, decide_keeping, lines
from tfbackend.graph.statepass import keep
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec
from tfbackend.statespec import KEPT, State, StateSpec

LAYERS = 2


def fade(x, state):
    """An average that fades: (what it is at each token, and after the last)."""
    given = []
    for token in x.unbind(1):
        state = 0.5 * state + token
        given.append(state)
    return torch.stack(given, 1), state


class Mixer(nn.Module):
    def __init__(self, layer=0):
        super().__init__()
        self.layer, self.into = layer, nn.Linear(WIDTH, WIDTH)


class InAttribute(Mixer):
    """Starts anew at position 0, whatever it holds."""

    past = None

    def __init__(self, layer=0):
        super().__init__(layer)
        self.past = None

    def forward(self, x, places, keeps=True):
        y = self.into(x) * (1 + (places == 0)[..., None])
        if not keeps:
            self.past = None
        made, past = fade(y, torch.zeros_like(y[:, 0]) if self.past is None else self.past)
        if keeps:
            self.past = past
        return made


class InListOfLayers(Mixer):
    """Writes into its part of tensors [requests, width, layers]."""

    def forward(self, x, state=None):
        y = self.into(x)
        begin = torch.full_like(y[:, 0], -3.0) if state is None else state[0][..., self.layer]
        made, after = fade(y, begin)
        if state is not None:
            state[0][..., self.layer] = after
        return made, state


class OneRequest(InListOfLayers):
    """Goes wrong with single tokens of several requests: adds [requests, width] to [requests, 1, width]."""

    def forward(self, x, state=None):
        y = self.into(x)
        if state is None or x.shape[1] > 1:
            return InListOfLayers.forward(self, x, state)
        made = 0.5 * state[0][..., self.layer] + y
        state[0][..., self.layer] = made[:, -1]
        return made, state


class Returning(Mixer):
    def forward(self, x, state=None):
        y = self.into(x)
        made, after = fade(y, torch.zeros_like(y[:, 0]) if state is None else state[0])
        return made, (after,)


class Memory:
    def __init__(self):
        self.kept = {}

    def recall(self, layer):
        return self.kept.get(layer)

    def hold(self, layer, tensor):
        self.kept[layer] = tensor


class InObject(Mixer):
    def forward(self, x, memory=None):
        y = self.into(x)
        past = None if memory is None else memory.recall(self.layer)
        made, after = fade(y, torch.zeros_like(y[:, 0]) if past is None else past)
        if memory is not None:
            memory.hold(self.layer, after)
        return made


class Thankless(Mixer):
    """Is given something to keep state in, and keeps none."""

    def forward(self, x, memory=None):
        return self.into(x)


class TwoDecays(InObject):
    """Has a decay for whole texts and one for steps, each saved, which agree as they are made and not if drawn."""

    def __init__(self, layer=0):
        super().__init__(layer)
        self.register_buffer("rate", torch.tensor([0.5]))
        self.register_buffer("rates", 0.5 ** torch.arange(16.0).flip(0))

    def forward(self, x, memory=None):
        y = self.into(x)
        past = None if memory is None else memory.recall(self.layer)
        if past is None:
            tokens = y.shape[1]
            made = torch.stack([(y[:, : t + 1] * self.rates[-t - 1 :, None]).sum(1) for t in range(tokens)], 1)
        else:
            made = [past]
            for token in y.unbind(1):
                made.append(self.rate * made[-1] + token)
            made = torch.stack(made[1:], 1)
        if memory is not None:
            memory.hold(self.layer, made[:, -1])
        return made


class HandsOn(nn.Module):
    """A layer that keeps nothing itself."""

    def __init__(self, inner):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), inner

    def forward(self, x, state=None):
        made, state = self.mixer(self.norm(x), state)
        return x + made, state


class Base(nn.Module):
    def __init__(self, cls):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(cls(layer) for layer in range(LAYERS))
        self.config, self._tp_plan = None, {}


class Attributes(Base):
    def forward(self, input_ids, position_ids=None, use_cache=False):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, use_cache)
        return x


class Lists(Base):
    begin = -3.0

    def forward(self, input_ids, position_ids=None, use_cache=False):
        x = self.embed(input_ids)
        state = [torch.zeros(*x[:, 0].shape, LAYERS, device=x.device)] if use_cache else None
        if state is not None:
            state[0] += self.begin
        for layer in self.layers:
            x, state = layer(x, state)
        return x


class UnknownLists(Base):
    """Begins with numbers that it draws."""

    def forward(self, input_ids, position_ids=None, use_cache=False):
        x = self.embed(input_ids)
        state = [torch.randn(*x[:, 0].shape, LAYERS, device=x.device)] if use_cache else None
        for layer in self.layers:
            x, state = layer(x, state)
        return x


class Tuples(Base):
    def forward(self, input_ids, position_ids=None, use_cache=False):
        x = self.embed(input_ids)
        for layer in self.layers:
            x, _ = layer(x, (torch.zeros_like(x[:, 0]),) if use_cache else None)
        return x


class ReadingTuples(Base):
    """Does something with what the mixers return beside what they make of the tokens."""

    def forward(self, input_ids, position_ids=None, use_cache=False):
        x = self.embed(input_ids)
        for layer in self.layers:
            x, (state,) = layer(x, (torch.zeros_like(x[:, 0]),) if use_cache else None)
            x = x + state.mean()
        return x


class Objects(Base):
    def forward(self, input_ids, position_ids=None, use_cache=False):
        x, memory = self.embed(input_ids), Memory() if use_cache else None
        for layer in self.layers:
            x = layer(x, memory)
        return x


def spec(plan, site):
    ((_, found),) = plan.rewrite("state", site).children
    assert isinstance(found, StateSpec)
    return found


ONE = (State(KEPT, 0, (WIDTH,), torch.float32),)
BEGUN = (State(KEPT, 0, (WIDTH,), torch.float32, -3.0),)


@pytest.mark.parametrize(
    ("base", "mixer", "argument", "states", "separate"),
    [
        (Attributes, InAttribute, "", ONE, False),
        (Lists, InListOfLayers, "state", BEGUN, False),
        (Lists, OneRequest, "state", BEGUN, True),
        (Tuples, Returning, "state", ONE, False),
        (Objects, InObject, "memory", ONE, False),
        (Objects, TwoDecays, "memory", ONE, False),
    ],
)
def test_where_state_is_kept(base, mixer, argument, states, separate):
    plan = decide_keeping(lambda: base(mixer))
    for layer in range(LAYERS):
        found = spec(plan, f"layers.{layer}")
        assert found.holder.argument == argument
        assert (found.states, found.separate, found.stepwise) == (states, separate, False)


def test_positions_are_handed_on():
    plan = decide_keeping(lambda: Attributes(InAttribute))
    assert spec(plan, "layers.0").positions == "places"
    assert lines(plan.text("layers.0")) == ["return self.state(x, places)"]


def test_one_layer_of_a_tensor_for_all():
    assert spec(decide_keeping(lambda: Lists(InListOfLayers)), "layers.1").holder.axes == ((2, LAYERS),)


def test_the_innermost_module_that_takes_state_is_the_mixer():
    plan = decide_keeping(lambda: Lists(lambda layer: HandsOn(InListOfLayers(layer))))
    spec(plan, "layers.0.mixer")
    assert plan.reason("state", "layers.0") == "silent"


@pytest.mark.parametrize(
    ("base", "mixer"),
    [(UnknownLists, InListOfLayers), (ReadingTuples, Returning), (Objects, Thankless)],
)
def test_left_alone(base, mixer):
    assert decide_keeping(lambda: base(mixer)).reason("state", "layers.0") == "silent"


def test_a_model_is_left_as_it_was():
    with torch.device("meta"):
        base = Attributes(InAttribute)
    before = [dict(vars(module)) for module in base.modules()]
    assert keep(base).attributes == {"layers.0": ("past",), "layers.1": ("past",)}
    assert [dict(vars(module)) for module in base.modules()] == before


def by_transformers(model_type, config):
    """Shapes of what Transformers keeps of one request for layer 1, from a run of its own."""
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=True)
    if model_type == "rwkv":
        return [x[0, :, 1] for x in output.state]
    if model_type == "xlstm":
        return [x[0] for x in output.cache_params.rnn_state[1]]
    if model_type == "minimax":
        return [output.past_key_values.linear_cache[1][0]]
    block = model.model.layers[2].temporal_block
    return [block.conv1d_state[0], block.rg_lru.recurrent_states[0]]


@pytest.mark.parametrize(
    ("model_type", "sites", "fed"),
    [
        ("rwkv", ["blocks.1.feed_forward", "blocks.1.attention"], (False, True, "")),
        ("xlstm", ["blocks.1.mlstm_layer"], (False, False, "")),
        ("minimax", ["layers.1.self_attn"], (False, False, "")),
        ("recurrent_gemma", ["layers.2.temporal_block"], (True, False, "position_ids")),
    ],
)
def test_as_transformers_keeps_it(model_type, sites, fed):
    """The shapes are those of a run of its own. RecurrentGemma forgets the inputs of its convolution where it is given
    several tokens later on; Rwkv adds up requests where it is given one token of each."""
    config = tiny_config(model_type)
    plan = make_plan(build(config, torch.float32), ServingSpec())
    found = dict(plan.state)
    kept = [state for site in sites for state in found[site].states]
    expected = [(tuple(x.shape), x.dtype) for x in by_transformers(model_type, config)]
    assert [(state.shape, state.dtype) for state in kept] == expected
    assert {(spec.stepwise, spec.separate, spec.positions) for spec in found.values()} == {fed}
