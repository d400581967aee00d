"""Checkpoints whose modelling code lies beside them, in tests/serve/remote/."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.serve.oracle import Answer, answer

_SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA = {
    "intermediate_size": 192,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
REMOTES: dict[str, dict[str, Any]] = {
    "packed": _SIZES | _LLAMA,
    "parallel": _SIZES,
    "oddnorm": _SIZES | _LLAMA | {"tie_word_embeddings": True},
    "written": _SIZES,
    "shifted": _SIZES,
    "handtied": _SIZES | {"tie_word_embeddings": True},
    "sloped": _SIZES,
    "counting": _SIZES,
}


def make_remote(name: str, folder: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """Make a checkpoint of ``remote/<name>.py`` in ``folder``, unless it is there, and ask it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from tfbackend.verification.oracle import randomise

    path, stem = Path(folder), name.capitalize()
    if not path.exists():
        path.mkdir(parents=True)
        shutil.copy(Path(__file__).parent / "remote" / f"{name}.py", path)
        classes = {"AutoConfig": f"{name}.{stem}Config", "AutoModel": f"{name}.{stem}Model"}
        classes["AutoModelForCausalLM"] = f"{name}.{stem}ForCausalLM"
        about = {"architectures": [f"{stem}ForCausalLM"], "auto_map": classes, "model_type": name, "dtype": "float32"}
        (path / "config.json").write_text(json.dumps(about | REMOTES[name]))
        config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        torch.manual_seed(17)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="eager")
        randomise(model)
        tied = {"lm_head.weight"} if REMOTES[name]["tie_word_embeddings"] else set()
        kept = {key: value.contiguous() for key, value in model.state_dict().items() if key not in tied}
        save_file(kept, path / "model.safetensors", {"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=True, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
    )
    bad = {key: value for key, value in info.items() if value}
    if bad:
        raise ValueError(f"Transformers cannot load {folder} completely: {bad}")
    return [answer(model.eval(), prompt, max_tokens) for prompt in prompts]
