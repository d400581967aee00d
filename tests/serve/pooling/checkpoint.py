"""Tiny checkpoints of classifiers and encoders, and what Transformers says with them. vLLM is not imported here."""

import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.serve.matrix.derive import shrunk_fields
from tests.serve.matrix.overrides import OVERRIDES as CAUSAL_OVERRIDES
from tests.serve.matrix.rules import HEADS, HIDDEN, VOCAB
from tfbackend.verification.oracle import randomise

LABELS = 3
MOST_PARAMETERS = 40_000_000


@dataclass(frozen=True)
class Case:
    """A model to make: its type, the end of its class's name, and fields of its config that no rule knows."""

    model_type: str
    head: str = "SequenceClassification"
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """A name for its checkpoint."""
        return f"{self.model_type}-{self.head or 'Model'}-{zlib.crc32(repr(self.fields).encode())}"


@dataclass(frozen=True)
class Expected:
    """What Transformers' own class gives for each prompt alone, and its name."""

    class_name: str
    answers: list[list[Any]]


MAPPINGS = {
    "SequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "QuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
"""Where Transformers lists the classes with each head; what has a classifier of texts has a base model that embeds."""


@cache
def architectures(head: str = "SequenceClassification") -> tuple[str, ...]:
    """Every ``model_type`` that the installed Transformers has a class with this head for."""
    from transformers.models.auto import modeling_auto

    return tuple(getattr(modeling_auto, MAPPINGS[head]))


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
    model = _load(case, folder)
    return _ask(case, model, [{"input_ids": torch.tensor([prompt])} for prompt in prompts])


def ask_with_types(case: Case, folder: str, prompts: list[list[int]], types: tuple[int | None, ...]) -> Expected:
    """Likewise of a checkpoint that is there, with type 1 for the tokens of each prompt from a place on, if any."""
    import torch

    inputs = []
    for prompt, start in zip(prompts, types, strict=True):
        ids = torch.tensor([prompt])
        kinds = torch.arange(len(prompt))[None] >= (len(prompt) if start is None else start)
        inputs.append({"input_ids": ids, "token_type_ids": kinds.long()})
    return _ask(case, _load(case, folder), inputs)


def hidden_states(case: Case, folder: str, prompts: list[list[int]]) -> list[Any]:
    """Hidden states [tokens, hidden] of each prompt, of the base model of a class with a head."""
    import torch

    make(case, Path(folder))
    base = _load(case, folder).base_model
    with torch.inference_mode():
        return [base(input_ids=torch.tensor([prompt]), use_cache=False)[0][0].tolist() for prompt in prompts]


def next_logits(case: Case, folder: str, prompts: list[list[int]]) -> list[Any]:
    """Logits [vocabulary] of the token after each prompt, of a language model."""
    import torch

    make(case, Path(folder))
    model = _load(case, folder)
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt])).logits[0, -1].tolist() for prompt in prompts]


def mean_vectors(folder: str, texts: list[str]) -> list[list[float]]:
    """The mean of the hidden states of each text of a real encoder, of length one, with its own tokenizer."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    vectors = []
    with torch.inference_mode():
        for text in texts:
            mean = model(**tokenizer(text, return_tensors="pt"))[0][0].mean(0)
            vectors.append((mean / mean.norm()).tolist())
    return vectors


def _load(case: Case, folder: str) -> Any:
    import torch

    model, info = auto_class(case.head).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    bad = {key: value for key, value in info.items() if value}
    if bad:
        raise ValueError(f"Transformers cannot load {folder} completely: {bad}")
    model.config.use_cache = False  # some have no cache that a class of theirs asks for
    model.warn_if_padding_and_no_attention_mask = lambda *_: None  # funnel's config has not the fields that it reads
    model.base_model.warn_if_padding_and_no_attention_mask = lambda *_: None
    return model.eval()


def _ask(case: Case, model: Any, inputs: list[dict[str, Any]]) -> Expected:
    import torch

    with torch.inference_mode():
        outputs = [model(**given) for given in inputs]
    answers = [_answer(case, output)[0].tolist() for output in outputs]
    return Expected(type(model).__name__, answers)


def _answer(case: Case, output: Any) -> Any:
    import torch

    if case.head == "QuestionAnswering":
        return torch.stack((output.start_logits, output.end_logits), -1)
    return output.logits if case.head else output[0]


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
    _tokenizer(VOCAB).save_pretrained(folder)


def _tokenizer(size: int) -> Any:
    """One that spells each token as its number; the engine wants one for embeddings, prompts do not go through it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0")


def tiny_config(case: Case) -> Any:
    """The config of a case, float32."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[case.model_type]
    known = CAUSAL_OVERRIDES.get(case.model_type, {}) | OVERRIDES.get(case.model_type, {}) | case.fields
    fields = shrunk_fields(config_class, known)
    if "is_decoder" not in known:
        fields.pop("is_decoder", None)
    labels = {"num_labels": 2 if case.head == "QuestionAnswering" else LABELS} if "num_labels" not in fields else {}
    return config_class(**fields, **labels, dtype="float32")


OVERRIDES: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": VOCAB, "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": HEADS, "head_dim": HIDDEN // HEADS},
    "flaubert": {"emb_dim": HIDDEN},
    "helium": {"head_dim": HIDDEN // HEADS},
    "layoutlmv3": {"coordinate_size": 20, "shape_size": 24, "visual_embed": False},  # together as wide as the rest
    "lilt": {"hidden_size": 384},  # divisible by six
    "mt5": {"decoder_start_token_id": 0},
    "perceiver": {"d_latents": 64, "num_latents": 16, "d_model": 64, "num_self_attends_per_block": 2},
    "squeezebert": {"embedding_size": HIDDEN},
    "t5": {"decoder_start_token_id": 0},
    "umt5": {"decoder_start_token_id": 0},
}
"""What is another for a classifier than for a language model, by model type."""
