"""A tiny checkpoint of an architecture and what Transformers says with it. Runs where vLLM is not imported."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serve.matrix.derive import model_type_of, tiny_config
from tests.serve.matrix.kinds import BIDIRECTIONAL, classify
from tests.serve.matrix.overrides import CACHED
from tests.serve.oracle import Answer, answer, load
from tfbackend.verification.oracle import randomise

MOST_PARAMETERS = 40_000_000
"""An architecture whose tiny model is larger has a size that no rule caught."""
_CAUSAL_WITHIN = 1e-3


@dataclass(frozen=True)
class Expected:
    """The kind of an architecture, its class in Transformers, and the oracle's answers."""

    kind: str
    class_name: str
    answers: list[Answer]


def make_and_ask(model_type: str, folder: str, prompts: list[list[int]], max_tokens: int) -> Expected:
    """Write the architecture's checkpoint to the folder, unless it is there, and ask Transformers."""
    from transformers import logging

    logging.set_verbosity_error()
    if not (Path(folder) / "config.json").exists():
        _make(model_type, Path(folder))
    model = load(Path(folder), _class_of(Path(folder)))
    kind = classify(model_type, model) if _is_causal(model, max(prompts, key=len)) else BIDIRECTIONAL
    cached = model_type_of(model_type) in CACHED
    answers = [answer(model, prompt, max_tokens, cached=cached) for prompt in prompts]
    return Expected(kind, type(model).__name__, answers)


def _make(model_type: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the tiny {model_type} has {size / 1e6:.0f} million parameters: a rule is missing")
    torch.manual_seed(zlib.crc32(model_type.encode()))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model)
    model.save_pretrained(folder)


def _class_of(folder: Path) -> Any:
    """The class that the checkpoint names: some multimodal configs save a text config that the auto class rejects."""
    import transformers

    return getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])


def _is_causal(model: Any, prompt: list[int]) -> bool:
    """Whether no token sees the last one: without that, nothing can be generated token by token."""
    import torch

    other = [*prompt[:-1], 3 if prompt[-1] != 3 else 4]
    with torch.inference_mode():
        before, after = (model(input_ids=torch.tensor([ids]), use_cache=False).logits for ids in (prompt, other))
    return bool((before - after)[0, :-1].abs().max() < _CAUSAL_WITHIN)
