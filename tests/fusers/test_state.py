"""Mixers that keep state: recognised by what they ask of a cache, tried out, and left alone where they go wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import WIDTH, decide, lines
from tfbackend.graph.statecache import ATTENTION_FREE, HYBRID, kept_by
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec
from tfbackend.statespec import CONV, RECURRENT, State, StateSpec

KERNEL = 3


class Convolution(nn.Module):
    """Goes on from any token with any number of tokens."""

    layer_idx = 0

    def __init__(self):
        super().__init__()
        self.into, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH)

    def forward(self, hidden_states, cache=None, mask=None):
        """Sees each token and those before it."""
        x = self.into(hidden_states).transpose(1, 2)
        tokens = x.shape[-1]
        if cache is not None:
            x = cache.update_conv_state(x, self.layer_idx, conv_kernel_size=KERNEL)
        x = self.conv(F.pad(x, (KERNEL - 1, 0)))
        return x[..., -tokens:].transpose(1, 2)


class Decay(nn.Module):
    """An average that fades, with the past in it: one tensor that goes from token to token."""

    starts_anew = False
    spoils = 0.0

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)

    def begin(self, x, cache):
        began = cache is not None and cache.has_previous_state(5)
        if not began or (self.starts_anew and x.shape[1] > 1):
            return torch.zeros_like(x[:, 0], dtype=torch.float32)
        return cache.layers[5].recurrent_states[0]

    def scan(self, x, state):
        given = []
        for token in x.unbind(1):
            state = 0.5 * state + token
            given.append(state)
        return torch.stack(given, 1).to(x.dtype), state

    def forward(self, hidden_states, cache=None):
        x = self.into(hidden_states)
        made, state = self.scan(x, self.begin(x, cache))
        if cache is not None:
            cache.update_recurrent_state(state + self.spoils, 5)
        return made


class StartsAnew(Decay):
    """As Transformers' first state spaces: right with one token at a time, wrong with several."""

    starts_anew = True


class AlmostRight(Decay):
    spoils = 0.003


class Wrong(Decay):
    spoils = 0.3


class Forgetful(Decay):
    """Never reads what it keeps."""

    def begin(self, x, cache):
        return torch.zeros_like(x[:, 0])


class Useless(Forgetful):
    """Keeps what changes nothing."""

    def scan(self, x, state):
        return x, state + x[:, -1]


class OverRequests(Decay):
    """Mixes the requests of a batch."""

    def scan(self, x, state):
        made, state = super().scan(x, state)
        return made + state.mean(0), state


class NoRows(Decay):
    """One state for all requests."""

    def forward(self, hidden_states, cache=None):
        if cache is not None:
            cache.update_recurrent_state(hidden_states.mean((0, 1)).unsqueeze(0), 0)
        return self.into(hidden_states)


class ReturnsState(Decay):
    def forward(self, hidden_states, cache=None):
        made, state = self.scan(self.into(hidden_states), self.begin(hidden_states, cache))
        if cache is not None:
            cache.update_recurrent_state(state, 5)
        return made, state


class Pair(Decay):
    """Two tensors of its tokens, and a place for what it does not give."""

    def forward(self, hidden_states, cache=None):
        x = self.into(hidden_states)
        made, state = self.scan(x, self.begin(x, cache))
        if cache is not None:
            cache.update_recurrent_state(state, 5)
        return made, made.unflatten(-1, (4, -1)), None


class First(nn.Module):
    """Takes the first of several tensors."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Layer(nn.Module):
    """Hands the cache on, and keeps nothing itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Decay()

    def forward(self, x, cache=None):
        return x + self.mixer(self.norm(x), cache=cache)


class Twice(Layer):
    def forward(self, x, cache=None):
        return self.mixer(self.mixer(x, cache=cache), cache=cache)


class Scaled(Decay):
    def forward(self, hidden_states, scale=None, cache=None):
        scale = 1.0 if scale is None else scale
        return Decay.forward(self, hidden_states * scale, cache)


class GivesScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = Scaled()

    def forward(self, x):
        return self.mixer(x, x.mean(-1, keepdim=True))


class HasState(Decay):
    state = "taken"


class KeepsKeys(Decay):
    """Wants keys and values kept as well."""

    def forward(self, hidden_states, cache=None):
        if cache is not None:
            hidden_states, _ = cache.update(hidden_states, hidden_states, 0)
        return super().forward(hidden_states, cache)


def spec(plan, site="site"):
    ((_, found),) = plan.rewrite("state", site).children
    assert isinstance(found, StateSpec)
    return found


def test_convolution():
    plan = decide(Convolution)
    found = spec(plan)
    assert found.states == (State(CONV, 0, (WIDTH, KERNEL), torch.float32),)
    assert (found.hidden, found.cache, found.stepwise, found.apart) == ("hidden_states", "cache", False, 0.0)
    assert found.nbytes == WIDTH * KERNEL * 4
    body = lines(plan.text())
    assert body == ['"""Sees each token and those before it."""', "return self.state(hidden_states)"]


def test_nothing_inside_is_rewritten():
    plan = decide(Convolution)
    assert [(r.fuser, r.qualname) for r in plan.rewrites if r.qualname.startswith("site")] == [("state", "site")]


@pytest.mark.parametrize(("mixer", "stepwise"), [(Decay, False), (StartsAnew, True)])
def test_how_a_mixer_may_be_fed(mixer, stepwise):
    found = spec(decide(mixer))
    assert found.states == (State(RECURRENT, 0, (WIDTH,), torch.float32),)
    assert found.stepwise == stepwise


def test_own_difference_is_named():
    """A mixer that decodes otherwise than it prefills is served as it decodes, and that is said."""
    plan = decide(AlmostRight)
    assert 1e-4 < spec(plan).apart < 1e-2
    assert "decoded as Transformers decodes" in plan.rewrite("state").summary


def test_several_tensors():
    found = spec(decide(lambda: First(Pair())), "site.inner")
    assert found.tupled
    assert found.outputs == ((WIDTH,), (4, WIDTH // 4), None)
    assert found.widths == (WIDTH, WIDTH)


def test_the_module_that_asks_is_the_mixer():
    plan = decide(Layer)
    spec(plan, "site.mixer")
    assert plan.reason("state") == "silent"


@pytest.mark.parametrize(
    ("mixer", "site", "reason"),
    [
        (Wrong, "site", "what it gives token by token differs by"),
        (Forgetful, "site", "what it gives token by token differs by"),
        (Useless, "site", "nothing shows whether its recurrent state 0 is kept"),
        (OverRequests, "site", "what it gives token by token differs by"),
        (NoRows, "site", "has no row for each of 3 requests"),
        (lambda: First(ReturnsState()), "site.inner", "beside what it makes of its tokens"),
        (Twice, "site.mixer", "it is called 2 times in one forward of the model"),
        (GivesScale, "site.mixer", "what it gives depends on more than its tokens and its state"),
        (HasState, "site", "already has an attribute called state"),
        (KeepsKeys, "site", "silent"),
        (lambda: nn.Linear(WIDTH, WIDTH), "site", "silent"),
    ],
)
def test_near_misses(mixer, site, reason):
    assert reason in decide(mixer).reason("state", site)


def test_engine_that_keeps_no_state():
    assert decide(Decay, stateless="it has no pages").reason("state") == "it has no pages"


def test_states_lie_apart_in_a_page():
    states = (State(CONV, 0, (3, 5), torch.bfloat16), State(RECURRENT, 0, (2, 2), torch.float32))
    found = StateSpec("x", "cache", (), states, ((4,),), False)
    assert found.offsets == (0, 32)
    assert found.nbytes == 48


@pytest.mark.parametrize(
    ("model_type", "fields", "kept"),
    [
        ("llama", {}, ""),
        ("gemma2", {}, ""),
        ("mamba", {}, ATTENTION_FREE),
        ("falcon_h1", {}, HYBRID),
        ("qwen3_next", {}, HYBRID),
        ("rwkv", {}, ATTENTION_FREE),
        ("xlstm", {}, ATTENTION_FREE),
        ("recurrent_gemma", {}, HYBRID),
    ],
)
def test_what_transformers_keeps(model_type, fields, kept):
    assert kept_by(CONFIG_MAPPING[model_type](**fields)) == kept


def test_state_is_of_the_dtype_that_the_mixer_gave_it():
    """Transformers keeps the recurrence of Mamba in float32 whatever the model is in."""
    config = CONFIG_MAPPING["mamba"](hidden_size=64, num_hidden_layers=1, vocab_size=128, state_size=8)
    ((path, found),) = make_plan(build(config, torch.bfloat16), ServingSpec(dtype=torch.bfloat16)).state
    assert path == "layers.0.mixer"
    assert found.states == (
        State(CONV, 0, (128, 4), torch.bfloat16),
        State(RECURRENT, 0, (128, 8), torch.float32),
    )


def test_layers_that_repeat_are_tried_once(monkeypatch):
    from tfbackend.fusers import state

    seen = []
    monkeypatch.setattr(state, "tried", lambda module, call, spec: seen.append(module.layer_idx) or spec)
    config = CONFIG_MAPPING["mamba2"](
        hidden_size=64, num_hidden_layers=4, vocab_size=128, num_heads=4, head_dim=32, n_groups=1
    )
    plan = make_plan(build(config, torch.float32), ServingSpec())
    assert plan.counts["state"] == 4
    assert seen == [0]
