"""Why a model is not served, where its plan alone says so."""

from __future__ import annotations

from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.stages import Stages

NATIVE = "Serve it with TFBACKEND_DISABLE=1 if vLLM has a class of its own for the architecture"
"""The remedy where nothing about the way of serving would help."""


def nameless_refusal(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "The model names no input embedding.",
        where=name,
        needed="get_input_embeddings() to return a module of the model",
        remedy="Define get_input_embeddings in the modelling file",
    )


def positions_refusal(path: str, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "The model numbers its tokens itself, instead of using the positions that it is given.",
        where=path or "the base model",
        found=f"{'query, key or value' if path else 'what it gives'} computed from a count of the tokens; {problem}",
        needed="position_ids: a call holds tokens of many requests, from anywhere in them",
        remedy=NATIVE,
    )


def padding_refusal(path: str, why: str = "") -> UnsupportedModelError:
    return UnsupportedModelError(
        "The model numbers its tokens without those that are padding, which an engine does not look for.",
        where=path,
        found="positions computed from the token ids where none are given" + (f"; {why}" if why else ""),
        needed="positions that do not depend on which tokens there are",
        remedy=NATIVE,
    )


def places_refusal(path: str, longest: int, wanted: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model has positions for prompts of up to {longest} tokens: its first have none of their own.",
        where=path,
        found=f"prompts of up to {wanted} tokens",
        remedy=f"Serve it with --max-model-len {longest}",
    )


def mixing_refusal(path: str, found: str, reason: str) -> UnsupportedModelError:
    """`reason` says why its state cannot be kept, "" where it was not seen to ask for any."""
    return UnsupportedModelError(
        "A module lets tokens see each other outside attention, so it needs a state that is not kept for it.",
        where=path,
        found=f"{found}; {reason}" if reason else found,
        remedy=NATIVE,
    )


def settling_refusal(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "The model changes its own weights while it runs.",
        where=name,
        needed="a method without arguments, called by the forward, that makes the change",
        remedy=NATIVE,
    )


def inline_refusal(found: tuple[str, str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        "A layer writes its attention out by itself, in a way that cannot be put into an attention layer.",
        where=found[0],
        found=found[1],
        remedy=NATIVE,
    )


def context_refusal(path: str, bound: int, wanted: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"A layer leaves out some of the tokens of contexts longer than {bound}, and can be served up to there only.",
        where=path,
        found=f"contexts of up to {wanted} tokens",
        remedy=f"Serve it with --max-model-len {bound}",
    )


def looped_refusal(path: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "The model goes through the experts of a layer in a way that cannot be put into a layer.",
        where=path,
        found=found,
        remedy=NATIVE,
    )


def stages_refusal(stages: Stages) -> UnsupportedModelError:
    return UnsupportedModelError(
        "The layers of the model cannot be shared out to pipeline stages.",
        where=stages.layers or "the base model",
        found=stages.problem,
        needed="layers of which each takes what the one before it returned",
        remedy="Serve it with --tensor-parallel-size in place of --pipeline-parallel-size",
    )


def unobserved_refusal(name: str, problem: str, *, reads_values: bool) -> UnsupportedModelError:
    return UnsupportedModelError(
        "What the model computes depends on values that it reads on the way, which an engine cannot plan ahead."
        if reads_values
        else "The model does not run on meta tensors, so nothing about it can be known.",
        where=name,
        found=problem,
        remedy="Serve it with TFBACKEND_DISABLE=1, or report the architecture",
    )
