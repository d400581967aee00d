"""Models that are called with one prompt at a time, in Transformers' own code, and what their prompts have to be.

An engine calls a model with the tokens of many prompts side by side. Where a layer cannot tell them apart, as a Fourier
transform or a relative bias over all tokens, each prompt of a model that only pools can still be run by itself: it is
whole in one call, and nothing of it is needed later. What the class gives then is what it gives in Transformers.

    rows = alone(ids)         [tokens] -> [tokens, labels or hidden]; what is said of the whole prompt is in each row

That a prompt gets the same answer whatever came before it is tried, with the true weights, before the first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tfbackend.classifier import inputs_of, logits_of
from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.token_types import TYPES, takes_types
from tfbackend.graph.trial import apart
from tfbackend.refusals import NATIVE

_LENGTHS = (*range(1, 18), 23, 31, 32, 33, 63, 64, 65)
"""Tokens of prompts that are tried, beside the longest."""
_SHORTEST = 64
_SAME = {torch.float32: 1e-4, torch.float64: 1e-4}
_SAME_ELSE = 3e-2


@dataclass(frozen=True)
class Limits:
    """What a request may ask of a model.

    Attributes:
        shortest: tokens of the shortest prompt.
        needs: id of a token that each prompt must have; None for any prompt.
        types: how many types of tokens it can be told: 0 where having types of 0 is not the same as having none.
    """

    shortest: int = 1
    needs: int | None = None
    types: int = 2

    def problem(self, ids: Sequence[int], first_of_type_1: int | None) -> str:
        """Why a prompt cannot be served, "" if it can.

        Args:
            first_of_type_1: place of the first token of type 1, that behind the last where all are of type 0; None
                where the prompt has no types.
        """
        if len(ids) < self.shortest:
            return f"the model takes prompts of {self.shortest} tokens or more, and this one has {len(ids)}"
        if self.needs is not None and self.needs not in ids:
            return f"the model takes prompts that have the token {self.needs}, as its tokenizer adds it"
        if first_of_type_1 is not None and not self.types:
            return "the model cannot be told types of tokens"
        if first_of_type_1 is not None and first_of_type_1 < len(ids) and self.types < 2:
            return "the model has no type 1 of tokens"
        return ""


class Alone:
    """Calls a whole model with one prompt at a time.

    Args:
        model: a class with a head, or a base model.
        labels: whether logits of labels are asked for; else hidden states.
        tokenwise: whether they are of each token.
    """

    def __init__(self, model: nn.Module, *, labels: bool, tokenwise: bool) -> None:
        self.model, self.labels, self.tokenwise = model, labels, tokenwise or not labels

    def __call__(self, ids: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids [tokens], and their types -> [tokens, labels or hidden].

        Raises:
            ValueError: the model gives something else.
        """
        inputs: dict[str, Any] = inputs_of(self.model, ids[None])
        output = self.model(**inputs, **({} if types is None else {TYPES: types[None]}))
        found = logits_of(output) if self.labels else output[0]
        if not self.tokenwise and found.dim() == 2:
            found = found[:, None].expand(-1, ids.shape[0], -1)
        elif not self.tokenwise:
            raise ValueError(f"it gives {tuple(found.shape)} where a text has one row of labels")
        if found.dim() != 3 or found.shape[:2] != (1, ids.shape[0]):
            raise ValueError(f"it gives {tuple(found.shape)} for a prompt of {ids.shape[0]} tokens")
        return found[0]


def limits_of(alone: Alone, longest: int, device: torch.device) -> Limits:
    """Run the model on prompts of many lengths, of up to `longest` tokens.

    Raises:
        UnsupportedModelError: it cannot do the longest prompts, or what it gives follows from more than the prompt.
    """
    with torch.no_grad(), _RowsChecked():
        trial = _Trial(alone, longest, device)
        limits = trial.shortest()
        trial.check(limits)
        return replace(limits, types=trial.types(limits))


class _Trial:
    def __init__(self, alone: Alone, longest: int, device: torch.device) -> None:
        self.alone, self.longest, self.device = alone, longest, device
        config = getattr(alone.model, "config", None)
        text = config.get_text_config() if config is not None else None
        end = getattr(text, "eos_token_id", None)
        self.end = end[0] if isinstance(end, list) else end
        self.vocabulary = getattr(text, "vocab_size", None) or 256
        special = [getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "decoder_start")] + [self.end]
        self.plain = [n for n in range(min(self.vocabulary, 1000)) if n not in special] or [0]
        self.lengths = [n for n in _LENGTHS if n < longest]

    def prompt(self, tokens: int, limits: Limits, seed: int = 0) -> torch.Tensor:
        """Token ids [tokens], the last of which is what each prompt needs, if anything."""
        generator = torch.Generator().manual_seed(tokens + 1000 * seed)
        drawn = torch.randint(0, len(self.plain), (tokens,), generator=generator).tolist()
        ids = [self.plain[n] for n in drawn]
        if limits.needs is not None:
            ids[-1] = limits.needs
        return torch.tensor(ids, device=self.device)

    def shortest(self) -> Limits:
        """The least that a prompt has to be."""
        problem = ""
        for needs in (None, self.end) if isinstance(self.end, int) else (None,):
            limits = Limits(needs=needs)
            for tokens in range(1, min(_SHORTEST, self.longest) + 1):
                found = self._problem(self.prompt(tokens, limits))
                if not found:
                    return replace(limits, shortest=tokens)
                problem = problem or found
        raise self._refusal(f"prompts of up to {min(_SHORTEST, self.longest)} tokens: {problem}")

    def check(self, limits: Limits) -> None:
        """Run the longest prompt on both sides of all others, which must not change what it gets."""
        long, short = self.prompt(self.longest, limits), self.prompt(limits.shortest, limits)
        first = [self._answer(ids) for ids in (long, short)]
        for tokens in (n for n in self.lengths if n >= limits.shortest):
            self._answer(self.prompt(tokens, limits, seed=1))
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(25)
            again = [self._answer(ids) for ids in (short, long)][::-1]
        for one, other in zip(first, again, strict=True):
            if not apart(one.float(), other.float()) <= _SAME.get(one.dtype, _SAME_ELSE):
                raise UnsupportedModelError(
                    "What the model gives for a prompt follows from chance, or from the prompts before it.",
                    where=type(self.alone.model).__name__,
                    found=f"two answers to one prompt of {one.shape[0]} tokens, others having come in between",
                    remedy=NATIVE,
                )

    def types(self, limits: Limits) -> int:
        """See Limits.types; a model that takes none is told of no type but 0, and so of none."""
        if not takes_types(self.alone.model):
            return 1
        ids = self.prompt(max(limits.shortest, 8), limits)
        plain, zeros = self.alone(ids), torch.zeros_like(ids)
        try:
            if apart(plain.float(), self.alone(ids, zeros).float()) > _SAME.get(plain.dtype, _SAME_ELSE):
                return 0
            self.alone(ids, torch.ones_like(ids))
        except RUN_ERRORS:
            return 1
        return 2

    def _answer(self, ids: torch.Tensor) -> torch.Tensor:
        try:
            return self.alone(ids).clone()
        except RUN_ERRORS as error:
            raise self._refusal(f"a prompt of {ids.shape[0]} tokens: {type(error).__name__}: {error}") from error

    def _problem(self, ids: torch.Tensor) -> str:
        try:
            self.alone(ids)
        except RUN_ERRORS as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _refusal(self, found: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            "The model fails on prompts that it may be asked for, also by itself.",
            where=type(self.alone.model).__name__,
            found=found,
            remedy=f"Serve it with a smaller --max-model-len than {self.longest}, if it is the length",
        )


class _RowsChecked(TorchFunctionMode):
    """While entered, looking up a row that a table does not have is an IndexError on every device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
        if getattr(func, "__name__", "") == "embedding" and {"input", "weight"} <= given.keys():
            rows, size = given["input"], given["weight"].shape[0]
            if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= size):
                raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of a table of {size}")
        return func(*args, **(kwargs or {}))
