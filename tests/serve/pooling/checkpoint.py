"""Tiny checkpoints of classifiers and encoders, and what Transformers says with them. vLLM is not imported here."""

import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.serve.matrix.derive import shrunk_fields
from tests.serve.matrix.overrides import OVERRIDES as CAUSAL_OVERRIDES
from tfbackend.verification.oracle import randomise

LABELS = 3
MOST_PARAMETERS = 40_000_000


@dataclass(frozen=True)
class Case:
    """A model to make: its type, the end of its class's name, and fields of its config that no rule knows."""

    model_type: str
    head: str = "SequenceClassification"
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """What Transformers' own class gives for each prompt alone, and its name."""

    class_name: str
    answers: list[list[Any]]


@cache
def architectures() -> tuple[str, ...]:
    """Every ``model_type`` that the installed Transformers has a classifier of texts for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    return tuple(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)


def auto_class(head: str) -> Any:
    import transformers

    return getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")


def make_and_ask(case: Case, folder: str, prompts: list[list[int]]) -> Expected:
    """Write the checkpoint to the folder, unless it is there, and ask Transformers: logits of the prompt, or of each of
    its tokens; hidden states of each token where there is no head."""
    import torch
    from transformers import logging

    logging.set_verbosity_error()
    if not (Path(folder) / "config.json").exists():
        make(case, Path(folder))
    model, info = auto_class(case.head).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    bad = {key: value for key, value in info.items() if value}
    if bad:
        raise ValueError(f"Transformers cannot load {folder} completely: {bad}")
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            output = model.eval()(input_ids=torch.tensor([prompt]))
            answers.append((output.logits if case.head else output[0])[0].tolist())
    return Expected(type(model).__name__, answers)


def make(case: Case, folder: Path) -> None:
    """Write a float32 checkpoint of random weights."""
    import torch

    config = tiny_config(case)
    auto = auto_class(case.head)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the tiny {case.model_type} has {size / 1e6:.0f} million parameters: a rule is missing")
    torch.manual_seed(zlib.crc32(case.model_type.encode()))
    model = auto.from_config(config, attn_implementation="eager")
    randomise(model)
    model.save_pretrained(folder)


def tiny_config(case: Case) -> Any:
    """The config of a case, float32."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[case.model_type]
    known = CAUSAL_OVERRIDES.get(case.model_type, {}) | OVERRIDES.get(case.model_type, {}) | case.fields
    fields = shrunk_fields(config_class, known)
    if "is_decoder" not in known:
        fields.pop("is_decoder", None)
    labels = {"num_labels": LABELS} if "num_labels" not in fields else {}
    return config_class(**fields, **labels, dtype="float32")


OVERRIDES: dict[str, dict[str, Any]] = {}
"""What is another for a classifier than for a language model, by model type."""
