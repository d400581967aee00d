"""Everything that inspect says of vLLM without importing it, compared with vLLM."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.inspection.golden import CONFIGS
from tfbackend.inspection import classes, layout, memory
from tfbackend.layerspecs import AttentionSpec
from tfbackend.mlaspec import WIDTHS

vllm = pytest.importorskip("vllm")


def test_the_mro_is_the_real_one():
    import tfbackend.models as models

    bases = classes.class_bases()
    ours = [name for name, cls in vars(models).items() if getattr(cls, "__module__", "") == models.__name__]
    assert ours
    for name in ours:
        real = [
            c.__name__ for c in getattr(models, name).__mro__ if c.__name__ not in ("Protocol", "Generic", "object")
        ]
        told = list(classes.linearize(name, bases))
        # Bases of vLLM's own interfaces are not told; whatever is told is in the real order.
        assert [c for c in real if c in told] == told
        assert all(c in told for c in real if c in bases)


def test_every_capability_is_an_interface_of_vllm():
    from vllm.model_executor.models import interfaces

    assert all(hasattr(interfaces, name) or name == "IsAttentionFree" for name in classes.CAPABILITIES)


def test_suffixes_of_architectures():
    from vllm.config.model import iter_architecture_defaults

    theirs = tuple((suffix, convert if runner == "pooling" else "generate")
                   for suffix, (runner, convert) in iter_architecture_defaults())  # fmt: skip
    assert theirs == classes.POOLING_SUFFIXES


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_class_that_vllm_looks_for(path):
    from vllm.config.model import ModelConfig
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = AutoConfig.from_pretrained(path)
    experts = ModelArchConfigConvertorBase(config, config.get_text_config()).get_num_experts()
    asked = SimpleNamespace(hf_config=config, hf_text_config=config.get_text_config(), is_moe=experts > 0,
                            architectures=config.architectures, runner="auto")  # fmt: skip
    assert classes.class_name(config, "") == ModelConfig._get_transformers_backend_cls(asked)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("layers", [8, 26, 30, 61, 126])
def test_layers_of_the_stages(layers, pp):
    from vllm.distributed.utils import get_pp_indices

    assert memory.stages(layers, pp) == [range(*get_pp_indices(layers, rank, pp)) for rank in range(pp)]


@pytest.mark.parametrize("rows", [32000, 32064, 50432, 151936, 256000, 49153])
def test_padding_of_the_vocabulary(rows):
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

    made = layout._vocabulary("t", rows, 8, 2, torch.bfloat16)
    assert made.rank_shape[0] * 2 == pad_vocab_size(rows)


def test_defaults():
    from vllm.config import CacheConfig

    assert CacheConfig.DEFAULT_BLOCK_SIZE == memory.BLOCK
    assert CacheConfig().gpu_memory_utilization == memory.UTILISATION


def test_widths_of_latents_in_the_cache():
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

    assert list(WIDTHS) == MLACommonBackend.get_supported_head_sizes()


def attention(layers, kv_heads, head_dim, windows):
    return [AttentionSpec(kv_heads * 2, kv_heads, head_dim, head_dim, 1.0, window=windows[i % len(windows)])
            for i in range(layers)]  # fmt: skip


CASES = {
    "all layers see everything": attention(30, 3, 64, [None]),
    "all have one window": attention(32, 8, 128, [4096]),
    "alternating": attention(42, 8, 256, [4096, None]),
    "five to one": attention(26, 1, 256, [512] * 5 + [None]),
    "almost as many": attention(12, 8, 64, [128, None]) + attention(1, 8, 64, [None]),
    "widths of two sizes": attention(20, 4, 128, [1024, None]) + attention(4, 8, 128, [None]),
}


@pytest.mark.parametrize("tokens", [1, 100, 4096, 8192, 131072])
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_request(name, tokens):
    """A request takes as many bytes as vLLM reckons from its own groups of the same layers."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs = {}
    for index, spec in enumerate(CASES[name]):
        size = {
            "block_size": 16,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_dim,
            "dtype": torch.bfloat16,
        }
        made = FullAttentionSpec(**size) if spec.window is None else SlidingWindowSpec(
            **size, sliding_window=spec.window, dcp_sharded=False)  # fmt: skip
        specs[f"layers.{index}"] = made
    config = engine_config(tokens)
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    theirs = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
    assert memory.make_cache(CASES[name], 1, 2).request_bytes(tokens) == theirs


def engine_config(tokens):
    """As much of a VllmConfig as these functions read."""
    layout_of_pages = SimpleNamespace(is_block_outermost=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=tokens),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout_of_pages, block_size=16),
        speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        max_in_flight_tokens=memory.BATCHED_TOKENS * memory.IN_FLIGHT_STEPS,
    )
