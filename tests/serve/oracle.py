"""The oracle: Transformers itself, greedy, float32, eager attention, the whole sequence recomputed at each step."""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.serve.tiny import Variant, make_checkpoint


@dataclass(frozen=True)
class Answer:
    """What follows one prompt: the tokens, their log-probabilities, and how far each led the runner-up (logits)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


def load(folder: Path, model_class: Any = None) -> Any:
    """Load the checkpoint with Transformers and insist that every tensor found its place.

    ``model_class`` is for a class that Transformers' auto class does not find by the checkpoint's config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, info = (model_class or AutoModelForCausalLM).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    bad = {key: value for key, value in info.items() if value}
    if bad:
        raise ValueError(f"Transformers cannot load {folder} completely: {bad}")
    return model.eval()


def answer(model: Any, prompt: list[int], max_tokens: int, *, cached: bool = False) -> Answer:
    """Greedy continuation of one prompt.

    ``cached`` is for models that by Transformers' own code go on otherwise with a cache than without.
    """
    import torch

    tokens, logprobs, margins, cache = list(prompt), [], [], None
    with torch.inference_mode():
        for _ in range(max_tokens):
            new = tokens[-1:] if cache is not None else tokens
            past = {"past_key_values": cache} if cached else {}
            output = model(input_ids=torch.tensor([new]), use_cache=cached, **past)
            cache, logits = output.past_key_values if cached else None, output.logits[0, -1].double()
            top = logits.topk(2)
            tokens.append(int(top.indices[0]))
            logprobs.append(float(logits.log_softmax(-1)[top.indices[0]]))
            margins.append(float(top.values[0] - top.values[1]))
    return Answer(tuple(tokens[len(prompt) :]), tuple(logprobs), tuple(margins))


def ask(folder: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """Greedy continuations of the prompts by the checkpoint in ``folder``."""
    model = load(Path(folder))
    return [answer(model, prompt, max_tokens) for prompt in prompts]


def make_and_ask(variant: Variant, folder: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """Make the variant's checkpoint in ``folder``, unless it is there, and ask it."""
    if not (Path(folder) / "config.json").exists():
        make_checkpoint(variant, Path(folder))
    return ask(folder, prompts, max_tokens)


def sensitivities(variant: Variant, folder: str, prompts: list[list[int]], answers: list[Answer]) -> dict[str, float]:
    """For each field of ``variant.shows``: how far the answers' log-probabilities move when it takes its trivial value.

    The weights are the checkpoint's; only what is computed with them changes.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    moved = {}
    for name, trivial in variant.shows.items():
        other = type(config).from_dict(config.to_dict() | {name: trivial})
        moved[name] = _farthest(_load_as(folder, other), prompts, answers)
    return moved


def own_rounding(folder: str, prompts: list[list[int]], answers: list[Answer]) -> float:
    """How far the answers' log-probabilities move when Transformers computes in float64: what float32 loses there."""
    with unrounded_bias():
        return _farthest(load(Path(folder)).double(), prompts, answers)


def make_and_ask_unrounded(variant: Variant, folder: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """As `make_and_ask`, but with a bias of ALiBi that is not rounded; see `unrounded_bias`."""
    with unrounded_bias():
        return make_and_ask(variant, folder, prompts, max_tokens)


def unrounded_bias() -> AbstractContextManager[Any]:
    """Let falcon round the slopes of its ALiBi to bfloat16, and not what it makes of them: vLLM's attention multiplies
    slopes and distances by itself, in float32."""
    import torch

    return mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype))


def dropped_vectors(folder: str, prompts: list[list[int]], answers: list[Answer]) -> dict[str, float]:
    """For each kind of one-dimensional parameter: how far the answers' log-probabilities move when all of it are reset.

    Biases are reset to zero; a norm weight to the whole number it was drawn around.
    """
    import torch

    model = load(Path(folder))
    kinds: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(parameter)
    moved = {}
    for kind, parameters in kinds.items():
        kept = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(0.0 if kind.endswith("bias") else parameter.mean().round().item())
            moved[kind] = _farthest(model, prompts, answers)
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
    return moved


def _load_as(folder: str, config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def _farthest(model: Any, prompts: list[list[int]], answers: list[Answer]) -> float:
    """How far, at most, the model puts the log-probability of a token of the answers from where the answers put it."""
    import torch

    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + list(answer.tokens)])
        with torch.inference_mode():
            logprobs = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
        said = logprobs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((said - torch.tensor(answer.logprobs).double()).abs().max()))
    return worst


def forced(folder: str, prompts: list[list[int]], tokens: list[list[int]], dtype: str) -> list[list[float]]:
    """The log-probability of each token behind each prompt, where the model computes in the dtype of this name."""
    import torch

    model, found = load(Path(folder)).to(getattr(torch, dtype)), []
    for prompt, following in zip(prompts, tokens, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + following]), use_cache=False).logits[0]
        logprobs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(logprobs.gather(-1, torch.tensor(following)[:, None])[:, 0].tolist())
    return found
