"""The part of the matrix that every test run serves: architectures that configs.py has not, and why each."""

import pytest

from tests.serve.engine import ENGINE_TIMEOUT, Harness
from tests.serve.matrix.attempt import attempt, expect

SUBSET = {
    "bert": "a head inside a module of its own, its bias beside the linear",
    "bitnet": "norms inside attention and feed-forward",
    "cohere_compass_text": "layers without positions between layers with them",
    "ctrl": "sinusoidal positions computed by the model",
    "cwm": "llama3 rotary embedding with windows on some layers",
    "deepseek_v32": "keys that are chosen, in a model whose config vLLM reads as another's",
    "doge+whole": "a bias for each key, from the values, and keys that are chosen",
    "electra": "an encoder used as a decoder, with a narrower embedding and a head that has a norm before it",
    "gemma4_text": "layers that share keys and values, head sizes by layer, an embedding for each layer",
    "gpt_oss": "experts with biases, transposed and interleaved, and sinks",
    "granite_swa": "sinks and windows on some layers, a rotary base for each layer",
    "hy_v4": "keys that are chosen once for several layers, and sinks",
    "granitemoehybrid": "a state space in some layers, attention without positions in others, experts in all",
    "hyperclovax": "norms after attention and feed-forward, every multiplier",
    "minimax_m2": "a router that vLLM's kernels refuse on a CPU",
    "minicpm3": "attention over a cache of latents",
    "minicpm3+padded": "value heads narrower than query heads, from latents of a width without a kernel",
    "ministral3": "queries scaled by their position beyond the original maximum",
    "modernbert-decoder": "a head that is called decoder, with a dense layer and a norm before it",
    "nanochat": "norms without weights, logits with a soft cap",
    "olmo": "layer norms without weights",
    "olmo_hybrid": "a delta rule whose mixer asks whether there is a past without saying in which layer",
    "qwen2_moe": "shared experts beside those that are chosen, a window that vLLM takes away",
    "phi4_multimodal": "a text model inside a multimodal class",
    "zamba2": "one attention block for several layers; state that goes on otherwise than it begins",
    "youtu": "latents as in minicpm3; loading it zeroes the row of the padding token",
}


@pytest.mark.engine
@pytest.mark.parametrize("name", SUBSET)
def test_served_as_transformers_does(harness: Harness, name: str) -> None:
    expected = expect(harness, name)
    assert not isinstance(expected, str), expected
    result = attempt(harness, name, expected, "ours", ENGINE_TIMEOUT)
    assert result.verdict == "equal", result.reason
