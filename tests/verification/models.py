"""The tiny models that faults are planted in: between them they have all that a fault can take away."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.serve.configs import MIXED, WINDOW, F, S
from tests.verification.planting import Planter
from tfbackend.verification import oracle

_SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1000.0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # Windows, both soft caps, a scale of its own, biases, a tied head.
    "gemma2": ("gemma2", _SIZES | {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 64, "layer_types": MIXED,
        "sliding_window": WINDOW, "rope_parameters": _ROPE, "query_pre_attn_scalar": 24, "attention_bias": True,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    }),
    # As many KV heads as heads, so that q and k are of one shape.
    "llama": ("llama", _SIZES | {
        "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64, "rope_parameters": _ROPE,
        "tie_word_embeddings": False,
    }),
    # Experts.
    "qwen3_moe": (
        "qwen3_moe",
        _SIZES
        | {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": _ROPE,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
    # Sinks.
    "granite_swa": ("granite_swa", _SIZES | {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": WINDOW, "layer_types": [F, S, F, S],
        "layer_rope_theta": [1000.0, 1000.0, 500.0, 0], "attention_multiplier": 0.3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "logits_scaling": 2.0, "tie_word_embeddings": False,
    }),
}  # fmt: skip


def make(name: str, planter: Planter) -> str:
    """The folder of a model's checkpoint, made when it is first asked for."""
    from transformers import AutoConfig

    folder = planter.root / "models" / name
    if not folder.exists():
        model_type, fields = CONFIGS[name]
        config = AutoConfig.for_model(model_type, **fields, dtype="float32")
        made = planter.call_oracle(oracle.make_checkpoint, config, str(folder))
        assert made.ok, made.error
    return str(folder)


def without(folder: str, tensor: str) -> str:
    """A copy of a checkpoint that lacks one tensor."""
    source, copy = Path(folder), Path(f"{folder}-without")
    copy.mkdir()
    (copy / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)
