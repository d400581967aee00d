"""Bytes of state of models that keep it, by the published sizes."""

import json

import pytest
from transformers import CONFIG_MAPPING

from tfbackend.inspection.document import document
from tfbackend.inspection.examine import Request, inspect_model
from tfbackend.inspection.facts import memory_lines

GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Config files, each for an architecture."""
    path = tmp_path_factory.mktemp("stateful")
    configs = {
        # state-spaces/mamba2-2.7b
        "mamba2": ("Mamba2ForCausalLM", {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "n_groups": 1}),
        # LiquidAI/LFM2-350M
        "lfm2": (
            "Lfm2ForCausalLM",
            {
                "hidden_size": 1024,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
            },
        ),
    }
    for name, (architecture, fields) in configs.items():
        config = CONFIG_MAPPING[name](**fields, architectures=[architecture], dtype="bfloat16")
        (path / f"{name}.json").write_text(json.dumps(config.to_dict(), default=str))
    return path


def test_state_in_place_of_attention(folder):
    """64 layers: the last 3 inputs of a convolution over 5120 + 2 * 128 channels in bfloat16, and 80 heads of 64 times
    128 in float32."""
    found = inspect_model(Request(str(folder / "mamba2.json"), gpu=80 * GB))
    expected = 64 * ((5120 + 2 * 128) * 3 * 2 + 80 * 64 * 128 * 4)
    assert found.served.name == "TransformersAttentionFreeForCausalLM"
    assert found.served.ours
    memory = document(found)["memory"]
    assert memory["state_bytes_per_request"] == expected
    assert memory["kv_bytes_per_token"] == 0
    assert memory["fit"]["requests"] == round(memory["fit"]["available_bytes"] / expected, 2)
    lines = memory_lines(found)
    assert f"{expected:,} B of state a request, however long it is" in lines
    assert not any("KV cache not known" in line for line in lines)


def test_state_beside_attention(folder):
    """10 of 16 layers keep the last 2 inputs of a convolution over 1024 channels; 6 keep 8 KV heads of 64."""
    found = inspect_model(Request(str(folder / "lfm2.json")))
    assert found.served.name == "TransformersHybridForCausalLM"
    assert found.memory.state_bytes_per_request == 10 * 1024 * 2 * 2
    assert found.memory.kv_bytes_per_token == 6 * 2 * 8 * 64 * 2
    summaries = [r.summary for r in found.plan.rewrites if r.fuser == "short_conv"]
    assert summaries == ["short convolution of 1024 channels over 3"] * 10


def test_ranks_share_the_state_of_layers_of_the_engine(folder):
    found = inspect_model(Request(str(folder / "lfm2.json"), tp=2))
    assert found.memory.state_bytes_per_request == 10 * 1024 * 2 * 2 // 2
