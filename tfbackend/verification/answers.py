"""What is asked of an engine, and what an engine or the oracle answers: plain values that travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Prompt = tuple[int, ...]
Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Answer:
    """What follows one prompt, greedily.

    Attributes:
        tokens: the ids, one a step.
        logprobs: their log-probabilities (nats).
        margins: how far each led the runner-up (logits).
        top: the likeliest tokens of each step with their log-probabilities, the likeliest first.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    top: tuple[Top, ...] = ()


@dataclass(frozen=True)
class EngineRequest:
    """One engine start and the batches to send it, one `generate` call each.

    Attributes:
        model: folder or Hub id.
        batches: prompts as token ids.
        max_tokens: tokens to generate for each prompt.
        options: keywords of vLLM's LLM, beside the usual ones.
        find_nonfinite: whether to watch every module for values that are not finite; for eager engines of one rank.
    """

    model: str
    batches: tuple[tuple[Prompt, ...], ...]
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    find_nonfinite: bool = False


@dataclass(frozen=True)
class Served:
    """What one engine gave.

    Attributes:
        batches: an answer for each prompt of each batch.
        cached: for each, how many tokens of the prompt came from the prefix cache.
        model_class: full name of the class that served.
        largest_forward: most tokens that one forward was given; 0 where ranks run elsewhere.
        graphs: how many graphs were compiled.
        nonfinite: the first module that gave a value that is not finite, "" for none.
        checked: how many module outputs were looked at for that.
        seconds: from the start to an engine that answers.
    """

    batches: tuple[tuple[Answer, ...], ...]
    cached: tuple[tuple[int, ...], ...]
    model_class: str
    largest_forward: int = 0
    graphs: int = 0
    nonfinite: str = ""
    checked: int = 0
    seconds: float = 0.0

    def answers(self) -> tuple[Answer, ...]:
        """Those of all batches, in order."""
        return tuple(answer for batch in self.batches for answer in batch)


@dataclass(frozen=True)
class Text:
    """What a model that pools is asked about.

    Attributes:
        ids: its tokens.
        second: place of the first token of type 1, as of the second of two texts; None where no types are told.
    """

    ids: Prompt
    second: int | None = None


Rows = tuple[tuple[float, ...], ...]
"""What a model that pools gives for a text: [1, numbers] for all of it, or [tokens, numbers]."""


@dataclass(frozen=True)
class PoolRequest:
    """One start of an engine that pools and the batches to send it, one `encode` call each.

    Attributes:
        model: folder or Hub id.
        batches: texts.
        task: of vLLM's pooling tasks; labels come as logits, vectors as the engine gives them where nothing is said.
        options: keywords of vLLM's LLM, beside the usual ones.
        own_tokenizer: whether the engine needs the tokenizer of the model.
        find_nonfinite: whether to watch every module for values that are not finite; for eager engines of one rank.
    """

    model: str
    batches: tuple[tuple[Text, ...], ...]
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    own_tokenizer: bool = False
    find_nonfinite: bool = False


@dataclass(frozen=True)
class Pooled:
    """What one engine that pools gave.

    Attributes:
        batches: rows for each text of each batch.
        model_class, graphs, nonfinite, checked, seconds: as of Served.
    """

    batches: tuple[tuple[Rows, ...], ...]
    model_class: str
    graphs: int = 0
    nonfinite: str = ""
    checked: int = 0
    seconds: float = 0.0
