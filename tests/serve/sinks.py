"""A tiny decoder whose attention has sinks, and what its tests ask of it in other processes."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.serve.configs import WINDOW, F, S, Variant
from tests.serve.oracle import Answer, _farthest, answer, load

FIELDS: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
    "layer_types": [F, S, F, S],
    "layer_rope_theta": [1000.0, 1000.0, 500.0, 0],
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "tie_word_embeddings": False,
}

GRANITE_SWA = Variant("granite_swa", "granite_swa", FIELDS)


def logprobs_moved(folder: str, prompts: list[list[int]], answers: list[Answer]) -> dict[str, float]:
    """How far the answers' log-probabilities move without sinks, and with each pair of ranks' heads exchanged."""
    import torch

    model = load(Path(folder))
    sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
    kept = [p.detach().clone() for p in sinks]
    changes = {"dropped": lambda p: torch.full_like(p, -1e4), "exchanged": lambda p: p.roll(len(p) // 2)}
    moved = {}
    with torch.no_grad():
        for name, change in changes.items():
            for parameter, value in zip(sinks, kept, strict=True):
                parameter.copy_(change(value))
            moved[name] = _farthest(model, prompts, answers)
    return moved


def attention_of(model: Any) -> list[tuple[tuple[int, ...], bool, int]]:
    """For each layer of a live model: the shape of its sinks, whether its attention holds that very tensor, and the
    window of its attention, -1 for none."""
    attention = [layer.self_attn for layer in model.model.layers]
    return [(tuple(a.sinks.shape), a.attn.impl.sinks is a.sinks, a.attn.impl.sliding_window) for a in attention]


REMOTE_FIELDS: dict[str, Any] = (
    {
        "architectures": ["SunkenForCausalLM"],
        "auto_map": {"AutoConfig": "sunken.SunkenConfig", "AutoModelForCausalLM": "sunken.SunkenForCausalLM"},
        "model_type": "sunken",
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }
    | {name: FIELDS[name] for name in list(FIELDS)[:11]}
    | {"head_dim": 64, "sliding_window": WINDOW}
)


def make_remote(folder: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """Make a checkpoint with code of its own in ``folder`` and ask it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tfbackend.verification.oracle import randomise

    path = Path(folder)
    path.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "remote" / "sunken.py", path)
    (path / "config.json").write_text(json.dumps(REMOTE_FIELDS))
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    torch.manual_seed(17)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="eager").eval()
    randomise(model)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    return [answer(model, prompt, max_tokens) for prompt in prompts]
