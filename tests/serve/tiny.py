"""Makes tiny random checkpoints: Transformers' own classes, loud weights, nothing left at its initial value."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.serve.configs import ARCHITECTURES, VARIANTS, WINDOW, Variant

__all__ = ["ARCHITECTURES", "VARIANTS", "Variant", "make_checkpoint", "make_prompts", "with_fields"]

PROMPT_LENGTHS = (1, 7, 2 * WINDOW + 5, 3 * WINDOW - 2)


def with_fields(variant: Variant, **fields: Any) -> Variant:
    """Return the variant with some config fields replaced, the seed of its weights kept."""
    return replace(variant, fields=variant.fields | fields)


def make_prompts(vocab_size: int = 500, lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 7) -> list[list[int]]:
    """Return random prompts of the given lengths; each of two tokens or more holds token 0, the padding token.

    Transformers' embeddings give padding a row of its own, which a backend may wrongly zero.
    """
    import random

    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    for prompt in prompts:
        if len(prompt) > 1:
            prompt[len(prompt) // 2] = 0
    return prompts


def make_checkpoint(variant: Variant, folder: Path, *, max_shard_size: str = "50GB") -> Path:
    """Write a float32 safetensors checkpoint of the variant to ``folder`` and return ``folder``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tfbackend.verification.oracle import randomise

    config = AutoConfig.for_model(variant.model_type, **variant.fields, dtype="float32")
    _refuse_unknown_fields(variant, config)
    torch.manual_seed(zlib.crc32(variant.name.encode()))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _refuse_unknown_fields(variant: Variant, config: Any) -> None:
    """A misspelt field would be kept by Transformers and change nothing."""
    known = set(type(config)().to_dict()) | set(config.attribute_map) | set(dir(type(config)))
    unknown = set(variant.fields) - known
    if unknown:
        raise ValueError(f"{variant.name}: {type(config).__name__} has no {sorted(unknown)}")
