"""The oracle for models that pool: Transformers' own class with its head, or its base model with the modules that a
folder of sentence-transformers lists, in plain torch. Float32, eager attention, one text at a time.

Runs in a process that never imports vLLM. It reads config.json and the folder's files by itself: what the planner has
read from them is what is to be judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging

from tfbackend.errors import CheckpointError
from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.verification import oracle
from tfbackend.verification.answers import Rows, Text
from tfbackend.verification.sentence_oracle import Files, apply_modules

_TRIAL = (7, 5, 9, 4, 6)
_QUESTION = ("ForQuestionAnswering", "ForQuestionAnsweringSimple")


@dataclass(frozen=True)
class Judged:
    """What Transformers says to each text.

    Attributes:
        answers: rows, None where it cannot run the text.
        problems: why not, of each that it cannot.
        how: what was made of hidden states, in words; "" for logits.
    """

    answers: tuple[Rows | None, ...]
    problems: tuple[str, ...]
    how: str = ""


def ask_pooled(model: str, texts: Sequence[Text], labels: bool, trust_remote_code: bool = False) -> Judged:
    """Logits of labels, or vectors, of each text.

    Raises:
        CheckpointError: Transformers does not find a place for every tensor, or a tensor for what an answer needs.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    asking = _Labels(model, config, trust_remote_code) if labels else _Vectors(model, config, trust_remote_code)
    answers: list[Rows | None] = []
    problems = []
    for text in texts:
        try:
            with torch.inference_mode():
                rows = asking(text).double()
            answers.append(tuple(tuple(row) for row in rows.tolist()))
        except RUN_ERRORS as error:
            answers.append(None)
            problems.append(f"{len(text.ids)} tokens: {type(error).__name__}: {error}")
    return Judged(tuple(answers), tuple(problems), asking.how)


def _inputs(model: Any, text: Text) -> dict[str, Any]:
    """Keywords of a call over one text."""
    ids = torch.tensor([text.ids])
    if text.second is None:
        return {"input_ids": ids}
    return {"input_ids": ids, "token_type_ids": (torch.arange(len(text.ids)) >= text.second).long()[None]}


class _Labels:
    """Raw logits of the class that config.json names; of a language model that ranks, those of the tokens that its
    config names, after the last token."""

    how = ""

    def __init__(self, model: str, config: PretrainedConfig, trust: bool) -> None:
        self.tokens: list[int] = []
        names = getattr(config, "classifier_from_token", None)
        auto = transformers.AutoModelForCausalLM if names else labelling_class(config)
        self.model, missing = _load(auto, model, trust)
        _insist(model, missing)
        if names:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
            self.tokens = tokenizer.convert_tokens_to_ids(list(names))
            softmax = "from_2_way_softmax"
            two_way = getattr(config, "method", None) or (
                softmax if getattr(config, "is_original_qwen3_reranker", False) else ""
            )
            self.two_way = two_way == softmax

    def __call__(self, text: Text) -> torch.Tensor:
        output = self.model(**_inputs(self.model, text))
        if self.tokens:
            named: torch.Tensor = output.logits[:, -1, self.tokens]
            return named[:, 1:] - named[:, :1] if self.two_way else named
        start = getattr(output, "start_logits", None)
        logits: torch.Tensor = output.logits if start is None else torch.stack((start, output.end_logits), -1)
        return logits[0] if logits.dim() == 3 else logits


class _Vectors:
    """The base model's hidden states with the folder's modules; without any, those of the last token where tokens see
    only what is before them, else of the first, of length one."""

    def __init__(self, model: str, config: PretrainedConfig, trust: bool) -> None:
        self.model, missing = _load(_base_class(config), model, trust)
        self.files = Files(model)
        if missing:
            self._insist_that_nothing_follows(model, missing)
        self.place = 0 if self._both_ways() else -1
        modules = " -> ".join(self.files.names)
        self.how = modules or f"the {'first' if self.place == 0 else 'last'} token, of length one"

    def __call__(self, text: Text) -> torch.Tensor:
        hidden = self._hidden(text)
        if self.files.names:
            return apply_modules(self.files, hidden)
        return nn.functional.normalize(hidden[[self.place]], dim=-1)

    def _hidden(self, text: Text) -> torch.Tensor:
        output: torch.Tensor = self.model(**_inputs(self.model, text))[0][0]
        return output

    def _both_ways(self) -> bool:
        """Whether what the first token gives follows from the last."""
        first = [self._hidden(Text((*_TRIAL[:-1], last)))[0] for last in _TRIAL[-2:]]
        return not torch.equal(*first)

    def _insist_that_nothing_follows(self, model: str, missing: list[str]) -> None:
        """What the checkpoint lacks may hold anything; nothing that is asked for may follow from it."""
        before = self._hidden(Text(_TRIAL)).clone()
        state = self.model.state_dict()
        with torch.no_grad():
            for name in missing:
                state[name].normal_()
        if not torch.equal(before, self._hidden(Text(_TRIAL))):
            _insist(model, missing)


def labelling_class(config: PretrainedConfig) -> Any:
    """Transformers' class for the architecture that config.json names."""
    named = (getattr(config, "architectures", None) or [""])[0]
    if named.endswith(_QUESTION):
        return transformers.AutoModelForQuestionAnswering
    if named.endswith("ForTokenClassification"):
        return transformers.AutoModelForTokenClassification
    return transformers.AutoModelForSequenceClassification


def _base_class(config: PretrainedConfig) -> Any:
    """Likewise without a head; of a model that has an encoder too, the part that config.json names."""
    named = (getattr(config, "architectures", None) or [""])[0]
    known = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
    encoder = type(config) in known and known[type(config)].__name__ == named
    return transformers.AutoModelForTextEncoding if encoder else transformers.AutoModel


def _load(auto: Any, model: str, trust: bool) -> tuple[Any, list[str]]:
    """(the model, names of parameters that the checkpoint lacks); a base model may leave tensors of a head alone."""
    loaded, info = auto.from_pretrained(
        model,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        trust_remote_code=trust,
    )
    base = auto in (transformers.AutoModel, transformers.AutoModelForTextEncoding)
    allowed = ("missing_keys", "unexpected_keys") if base else ("missing_keys",)
    bad = {key: sorted(map(str, value)) for key, value in info.items() if value and key not in allowed}
    if bad:
        raise CheckpointError("Transformers cannot load the checkpoint completely.", where=model, found=str(bad))
    loaded.config.use_cache = False
    return loaded.eval(), sorted(info["missing_keys"])


def _insist(model: str, missing: list[str]) -> None:
    if missing:
        raise CheckpointError("The checkpoint lacks what Transformers' class needs.", where=model, found=str(missing))


def make_checkpoint(config: PretrainedConfig, folder: str, labels: bool, trust_remote_code: bool = False) -> int:
    """Write a float32 checkpoint of random weights to `folder`, and return the number of its parameters.

    Raises:
        CheckpointError: the model is too large to be called tiny, or its weights are those of a language model.
    """
    if getattr(config, "classifier_from_token", None):
        raise CheckpointError("A language model that ranks needs its tokenizer.", remedy="Give a folder with weights")
    auto = labelling_class(config) if labels else _base_class(config)
    return oracle.write_random(auto, config, folder, trust_remote_code)
