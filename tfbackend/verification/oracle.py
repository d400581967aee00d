"""The oracle: Transformers itself, greedy, float32, eager attention, the whole sequence recomputed at each step.

Runs in a process that never imports vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from tfbackend.errors import CheckpointError
from tfbackend.verification.answers import Answer, Prompt

TOP = 5
"""How many of the likeliest tokens are kept of each step."""
WEIGHT_STD = 0.15
VECTOR_STD = 0.25
_SEED = 20
_MOST_PARAMETERS = 40_000_000


def ask(model: str, prompts: Sequence[Prompt], max_tokens: int, trust_remote_code: bool = False) -> list[Answer]:
    """Greedy continuations of the prompts.

    Raises:
        CheckpointError: Transformers does not find a place for every tensor, or a tensor for every place.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = load(model, trust_remote_code)
    return [answer(loaded, prompt, max_tokens) for prompt in prompts]


def load(model: str, trust_remote_code: bool = False) -> Any:
    """Load with Transformers in float32, and insist that every tensor found its place."""
    loaded, info = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        trust_remote_code=trust_remote_code,
    )
    bad = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if bad:
        raise CheckpointError("Transformers cannot load the checkpoint completely.", where=model, found=str(bad))
    return loaded.eval()


def answer(model: Any, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Greedy continuation of one prompt."""
    ids, logprobs, margins, top = list(prompt), [], [], []
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
            best = logits.log_softmax(-1).topk(TOP)
            ids.append(int(best.indices[0]))
            logprobs.append(float(best.values[0]))
            margins.append(float(best.values[0] - best.values[1]))
            top.append(tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
    return Answer(tuple(ids[len(prompt) :]), tuple(logprobs), tuple(margins), tuple(top))


def make_checkpoint(config: PretrainedConfig, folder: str, trust_remote_code: bool = False) -> int:
    """Write a float32 checkpoint of random weights to `folder`, and return the number of its parameters.

    Raises:
        CheckpointError: the model is too large to be called tiny.
    """
    return write_random(AutoModelForCausalLM, config, folder, trust_remote_code)


def write_random(auto: Any, config: PretrainedConfig, folder: str, trust_remote_code: bool = False) -> int:
    """Likewise of one of Transformers' automatic classes.

    Raises:
        CheckpointError: the model is too large to be called tiny.
    """
    logging.set_verbosity_error()
    config._attn_implementation = "eager"
    with torch.device("meta"):
        empty = auto.from_config(config, trust_remote_code=trust_remote_code)
    count: int = sum(parameter.numel() for parameter in empty.parameters())
    if count > _MOST_PARAMETERS:
        raise CheckpointError(
            "The config could not be shrunk to a tiny one.",
            where=type(config).__name__,
            found=f"{count / 1e6:.0f} million parameters",
            remedy="Give a folder with weights",
        )
    torch.manual_seed(_SEED)
    model = auto.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
    randomise(model)
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return count


def randomise(model: nn.Module) -> None:
    """Give matrices a standard deviation that avoids ties, and move vectors off their initial values.

    Vectors keep their initial value as mean, so that a norm centred on one and one centred on zero stay what they are.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, WEIGHT_STD)
            else:
                parameter.add_(torch.randn_like(parameter) * VECTOR_STD)
