"""Several calls of the attention interface by one module in one forward: a layer for each, counted on meta."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GPTNeoConfig

from tests.sites import DIM, HEADS, KV_HEADS, WIDTH, OneSite, attend, decide, heads
from tfbackend.graph.interface import LAYERS, attention_interface
from tfbackend.graph.observe import observe
from tfbackend.meta import build

Q, KV = HEADS * DIM, KV_HEADS * DIM


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, Q), nn.Linear(WIDTH, KV), nn.Linear(WIDTH, KV)
        self.out = nn.Linear(Q, WIDTH)

    def forward(self, x):
        return self.out(attend(self, heads(self.q(x)), heads(self.k(x)), heads(self.v(x))))


class Twice(Once):
    """Values of the second call are others, and so is its scale."""

    def forward(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        return self.out(attend(self, q, k, v) - attend(self, q, k, v.flip(1), scaling=0.1))


class WithSinks(Twice):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        return self.out(attend(self, q, k, v, s_aux=self.sinks) + attend(self, q, k, v))


class Taken(Twice):
    def __init__(self):
        super().__init__()
        self.attn_2 = nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Once()

    def forward(self, x, cycle=0):
        return x + self.inner(x)


class Looped(OneSite):
    """Two layers, run three times over; the layer is told which time it is, or is not."""

    def __init__(self, told):
        super().__init__([nn.Identity()])
        self.layers, self.told = nn.ModuleList([Layer(), Layer()]), told

    def forward(self, input_ids, position_ids=None, use_cache=False):
        x = self.embed(input_ids)
        for cycle in range(3):
            for layer in self.layers:
                x = layer(x, cycle=cycle * self.told)
        return x


def test_each_call_is_a_layer_with_its_own_numbers():
    rewrite = decide(Twice).rewrite("attention")
    specs = dict(rewrite.children)
    assert [(name, spec.scale) for name, spec in specs.items()] == [("attn", DIM**-0.5), ("attn_2", 0.1)]
    assert dict(rewrite.attributes) == {"tfb_attention_layers": ("attn", "attn_2"), "tfb_attention_calls": 0}
    assert rewrite.summary.endswith(", a layer for each of 2 calls")


def test_one_call_needs_no_counting():
    assert decide(Once).rewrite("attention").attributes == ()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (WithSinks, "calls the attention interface 2 times in one forward, with sinks"),
        (Taken, "already has an attribute called attn_2"),
    ],
)
def test_what_cannot_be_told_apart_is_a_miss(build, reason):
    assert decide(build).reason("attention") == reason


def test_on_ranks_it_is_a_miss():
    assert decide(Twice, tp_size=2).reason("qkv") == "calls the attention interface more than once"


@pytest.mark.parametrize("told", [0, 1])
def test_layers_that_are_run_in_cycles_count_every_call(told):
    with torch.device("meta"):
        seen = observe(Looped(told).eval())
    assert not seen.problem
    assert {path: len(calls) for path, calls in seen.attention.items()} == {
        "layers.0.inner": 3,
        "layers.1.inner": 3,
    }
    for path in ("layers.0", "layers.1", "layers.0.inner", "layers.1.inner.q"):
        assert len(seen.calls[path]) == 3, path


class Layers(nn.Module):
    """Two stand-ins for attention layers that give back what tells them apart."""

    def __init__(self):
        super().__init__()
        self.tfb_attention_layers, self.tfb_attention_calls = ("attn", "attn_2"), 0
        self.attn, self.attn_2 = (lambda q, k, v: q + 1), (lambda q, k, v: q + 2)


def test_calls_go_to_the_layers_in_turn_and_one_too_many_is_an_error():
    module, x = Layers(), torch.zeros(1, 1, 3, 4)
    ask = SimpleNamespace(run=lambda: attention_interface(module, x, x, x)[0].unique().tolist())
    assert [ask.run(), ask.run()] == [[1.0], [2.0]]
    with pytest.raises(RuntimeError, match="more than the 2 times"):
        ask.run()
    module.tfb_attention_calls = 0
    assert ask.run() == [1.0]


def test_a_class_may_have_a_list_called_attention_layers():
    """GPT-Neo's do: it says which of them are local."""
    config = GPTNeoConfig(
        hidden_size=64, num_layers=2, num_heads=4, vocab_size=64, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    )  # fmt: skip
    base = build(config, torch.float32).base
    assert any(hasattr(module, "attention_layers") for module in base.modules())
    assert not any(hasattr(module, LAYERS) for module in base.modules())
