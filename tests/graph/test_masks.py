"""What a mask function lets a token see, recovered by asking it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Llama4TextConfig, LlamaConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.masks import MaskWindow, mask_window
from tfbackend.graph.observe import observe
from tfbackend.meta import build

LONGEST = 1 << 21


@given(st.integers(1, LONGEST - 1))
@settings(max_examples=40, deadline=None)
def test_any_window_is_recovered(window):
    assert mask_window(lambda b, h, q, kv: (kv <= q) & (q - kv < window)) == MaskWindow(window)


@given(st.integers(1, 3000), st.integers(0, 4000))
@settings(max_examples=25, deadline=None)
def test_a_hole_anywhere_near_is_found(window, at):
    """One distance that is hidden within the window, or seen beyond it."""
    with pytest.raises(UnsupportedModelError):
        mask_window(lambda b, h, q, kv: (kv <= q) & ((q - kv < window + 300) ^ (q - kv == min(at, window + 298))))


@given(st.integers(2, LONGEST // 2))
@settings(max_examples=40, deadline=None)
def test_any_chunk_is_recovered(size):
    found = mask_window(chunked_causal_mask_function(size, torch.tensor([0])))
    assert found == MaskWindow(chunk=size)
    q, kv = torch.tensor([size, size, 2 * size - 1]), torch.tensor([size, size - 1, size])
    assert found.sees(q, kv).tolist() == [True, False, True]


def test_transformers_own_functions():
    assert mask_window(causal_mask_function) == MaskWindow(None)
    assert mask_window(sliding_window_causal_mask_function(37)) == MaskWindow(37)


def test_masks_on_both_sides():
    """Transformers counts the distance that is still seen, a MaskWindow the first that is not."""
    assert mask_window(bidirectional_mask_function) == MaskWindow(both=True)
    found = mask_window(sliding_window_bidirectional_mask_function(37))
    assert found == MaskWindow(38, both=True)
    q, kv = torch.tensor([50, 50, 50, 50]), torch.tensor([13, 12, 87, 88])
    assert found.sees(q, kv).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, kv: (q - kv < 20) & (kv - q < 21),  # further ahead than back
        lambda b, h, q, kv: (q - kv < 20) & (kv - q < 3),
        lambda b, h, q, kv: q // 8 == kv // 8,  # chunks, seen from both ends
        lambda b, h, q, kv: (q != kv + 5) & (q != kv - 5),
        lambda b, h, q, kv: kv <= q + 1,
    ],
)
def test_what_is_no_window_on_both_sides(function):
    with pytest.raises(UnsupportedModelError):
        mask_window(function)


def _prefix(b, h, q, kv):
    return (kv <= q) | (kv < 5)


def _sinks(b, h, q, kv):
    return (kv <= q) & ((q - kv < 64) | (kv < 4))


def _strided(b, h, q, kv):
    return (kv <= q) & ((q - kv) % 2 == 0)


def _dilated_window(b, h, q, kv):
    return (kv <= q) & ((q - kv) % 2 == 0) & (q - kv < 256)


def _distant_hole(b, h, q, kv):
    return (kv <= q) & ~((q - kv > 100) & (q - kv < 200))


def _grows(b, h, q, kv):
    return (kv <= q) & (q - kv < q // 2 + 1)


def _strict(b, h, q, kv):
    return kv < q


def _two_ahead(b, h, q, kv):
    return (kv <= q) | (kv == q + 2)


def _early_tokens_alone(b, h, q, kv):
    return (kv <= q) & ((q > 20) | (q == kv))


def _chunks_that_see_one_back(b, h, q, kv):
    return (kv <= q) & ((q // 32 == kv // 32) | (q - kv == 1))


def _chunks_that_grow(b, h, q, kv):
    size = torch.where(torch.as_tensor(q) < 5000, 32, 64)
    return (kv <= q) & (q // size == kv // size)


def _chunked_window(b, h, q, kv):
    return (kv <= q) & (q // 64 == kv // 64) & (q - kv < 16)


@pytest.mark.parametrize(
    "function",
    [
        chunked_causal_mask_function(8, torch.tensor([3])),
        chunked_causal_mask_function(8192, torch.tensor([4096])),
        _chunks_that_see_one_back,
        _chunks_that_grow,
        _chunked_window,
        _prefix,
        _sinks,
        _strided,
        _dilated_window,
        _distant_hole,
        _grows,
        _strict,
        _two_ahead,
        _early_tokens_alone,
    ],
    ids=lambda f: f.__name__,
)
def test_other_masks_are_refused(function):
    with pytest.raises(UnsupportedModelError, match="mask"):
        mask_window(function)


def test_function_that_branches_is_asked_pair_by_pair():
    def branching(b, h, q, kv):
        return bool(kv <= q)

    assert mask_window(branching) == MaskWindow(None)


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def test_each_layer_has_the_window_of_its_own_mask():
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    config = Gemma2Config(**SMALL, head_dim=16, num_hidden_layers=4, layer_types=kinds, sliding_window=11)
    seen = observe(build(config, torch.float32).base)
    assert not seen.problem
    windows = [seen.attention[f"layers.{i}.self_attn"][0].mask for i in range(4)]
    assert windows == [MaskWindow(11), MaskWindow(None), MaskWindow(None), MaskWindow(11)]


def test_chunks_of_a_model_are_read():
    config = Llama4TextConfig(
        **SMALL,
        head_dim=16,
        num_hidden_layers=2,
        intermediate_size_mlp=96,
        num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"],
        attention_chunk_size=24,
        attn_temperature_tuning=False,
    )
    seen = observe(build(config, torch.float32).base)
    assert not seen.problem
    assert [seen.attention[f"layers.{i}.self_attn"][0].mask for i in range(2)] == [MaskWindow(chunk=24), MaskWindow()]


def test_the_observed_run_leaves_nothing_behind():
    import transformers.masking_utils as masking_utils
    from torch import nn

    def patched():
        return masking_utils.find_packed_sequence_indices, masking_utils.chunked_overlay, nn.Module.__call__

    before = patched()
    base = build(LlamaConfig(**SMALL, num_hidden_layers=1), torch.float32).base
    buffers = {name: buffer.device.type for name, buffer in base.named_buffers()}
    observe(base)
    assert patched() == before
    assert {name: buffer.device.type for name, buffer in base.named_buffers()} == buffers
    assert set(buffers.values()) == {"cpu"}
