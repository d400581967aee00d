"""Weights that a model changes in its first forward are changed once after each loading."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tfbackend.apply import settle
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec


def test_weights_that_a_model_changes_once():
    """Rwkv halves weights of later layers before it runs, for good."""
    config = CONFIG_MAPPING["rwkv"](
        hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, rescale_every=1, vocab_size=50
    )
    plan = make_plan(build(config, torch.float32), ServingSpec())
    assert plan.settling == (("", "_rescale_layers"),)
    base = AutoModelForCausalLM.from_config(config).eval().rwkv
    weights = [block.attention.output.weight for block in base.blocks]
    drawn = [weight.detach().clone() for weight in weights]
    for _ in range(2):  # as after each loading of weights
        with torch.no_grad():
            for weight, value in zip(weights, drawn, strict=True):
                weight.copy_(value)
        settle(base, plan.settling)
        for number, (weight, value) in enumerate(zip(weights, drawn, strict=True)):
            torch.testing.assert_close(weight, value / (1, 2)[number])
    assert base.layers_are_rescaled
