"""Where layers can be cut into pipeline stages, and what keeps others from it."""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from tests.sites import SIZES
from tfbackend.graph.stages import find_stages
from tfbackend.meta import build
from tfbackend.plan import draft_plan
from tfbackend.serving import ServingSpec

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device="meta")

    def forward(self, hidden, *others):
        hidden = self.linear(hidden)
        for other in others:
            hidden = hidden + other
        return hidden


class Pair(Layer):
    def forward(self, hidden, *others):
        hidden = super().forward(hidden, *others)
        return hidden, hidden * 2


class Stack(nn.Module):
    """Three layers in a row."""

    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, device="meta")
        self.layers = nn.ModuleList(self.layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH, device="meta")

    def forward(self, input_ids):
        return (self.norm(self.run(self.embed(input_ids))),)

    def run(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Pairs(Stack):
    layer = Pair

    def run(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return hidden


class FirstAgain(Stack):
    """The last layer is given what the first one made, too."""

    def run(self, hidden):
        first = self.layers[0](hidden)
        return self.layers[2](self.layers[1](first), first)


class SecondOutput(Pairs):
    """What a layer returns beside the hidden states goes to the next one."""

    def run(self, hidden):
        hidden, more = self.layers[0](hidden)
        hidden, more = self.layers[1](hidden, more)
        return self.layers[2](hidden, more)[0]


class Between(Stack):
    def run(self, hidden):
        return self.layers[2](self.layers[1](self.layers[0](hidden)) * 2)


class SkipsToTheEnd(Stack):
    def run(self, hidden):
        first = self.layers[0](hidden)
        return self.layers[2](self.layers[1](first)) + first


class Twice(Stack):
    def run(self, hidden):
        return super().run(super().run(hidden))


class TooFew(Stack):
    def run(self, hidden):
        return self.layers[1](self.layers[0](hidden))


class Embeddings(Stack):
    """Each layer is given the embeddings, too."""

    def run(self, hidden):
        rows = hidden
        for layer in self.layers:
            hidden = layer(hidden, rows)
        return hidden


class Wider(Stack):
    def run(self, hidden):
        return super().run(hidden[None])[0]


@pytest.mark.parametrize(("model", "returned"), [(Stack, 0), (Pairs, 2)])
def test_layers_in_a_row(model, returned):
    found = find_stages(model(), "layers")
    assert not found.problem
    assert (found.count, found.width, found.returned, found.embeds) == (3, WIDTH, (returned,) * 3, False)


def test_layers_that_look_at_the_embeddings():
    found = find_stages(Embeddings(), "layers")
    assert not found.problem
    assert found.embeds


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (FirstAgain, "what layers.0 made is used in layers.2"),
        (SecondOutput, "what layers.0 made is used in layers.1"),
        (Between, "what layers.1 made is used outside of the layers"),
        (SkipsToTheEnd, "what layers.0 made is used outside of the layers"),
        (Twice, "layers.0 is called when 3 layers have run"),
        (TooFew, "what layers.1 made is used outside of the layers"),
        (Wider, "layers.0 returns no hidden states [1, tokens, width]"),
    ],
)
def test_what_goes_between_other_layers(model, problem):
    assert find_stages(model(), "layers").problem == problem


def test_a_model_without_layers():
    assert find_stages(nn.Linear(2, 2, device="meta"), "").problem == "it has no list of layers"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon", "gemma2", "cohere", "bloom", "opt", "qwen3_moe"])
def test_real_models(model_type):
    built = build(CONFIG_MAPPING[model_type](**SIZES), torch.float32)
    plan, refusals = draft_plan(built, ServingSpec(pp_size=2))
    assert refusals == ()
    assert plan.stages is not None
    assert plan.stages.count == len(plan.stages.returned) == SIZES["num_hidden_layers"]
    assert not plan.stages.embeds


def test_layers_that_repeat_are_refused_by_name():
    config = CONFIG_MAPPING["albert"](**SIZES, embedding_size=16)
    refusals = draft_plan(build(config, torch.float32, task="embed"), ServingSpec(pp_size=2, whole_prompts=True))[1]
    assert [str(r) for r in refusals if "pipeline stages" in str(r)]
