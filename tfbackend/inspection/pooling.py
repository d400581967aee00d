"""What a model that pools gives, and what comes after its base model: the head's modules, the pooling, the files of
sentence-transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tfbackend.errors import UnsupportedModelError
from tfbackend.inspection.classes import task_of
from tfbackend.inspection.target import json_reader
from tfbackend.meta import CLASSIFY, EMBED, GENERATE, MetaModel
from tfbackend.plan import Plan
from tfbackend.pooling import MEAN_LOGITS, PICKS
from tfbackend.sentence import sentence_plan


@dataclass(frozen=True)
class Pooling:
    """The way from hidden states to what is given.

    Attributes:
        task: "classify" or "embed".
        which: what is taken of the tokens of a text, in words.
        labels: logits there are; None for embeddings, or where only the class knows.
        modules: (path, what it is) of the head, in the full model or a folder of sentence-transformers.
        alone: why each prompt is run by itself; empty where prompts run side by side.
        normalised: whether vectors have length one where a request says nothing of it.
    """

    task: str
    which: str
    labels: int | None
    modules: tuple[tuple[str, str], ...]
    alone: tuple[str, ...] = ()
    normalised: bool = True

    def lines(self) -> list[str]:
        """Sentences, for the terminal and the page alike."""
        gives = f"logits of {self.labels} labels" if self.labels is not None else "logits"
        head = f"{gives if self.task == CLASSIFY else 'a vector'} of {self.which}"
        parts = [f"  {path}: {what}" for path, what in self.modules]
        unit = ["  of length one"] if self.normalised and self.task != CLASSIFY else []
        lone = [f"each prompt is run by itself, in Transformers' own code: {why}" for why in self.alone[:1]]
        return [head, *parts, *unit, *lone]


def pooling_of(built: MetaModel, plan: Plan, model: str) -> Pooling:
    """What is known of a model that was built to classify or to embed.

    Args:
        model: MODEL as it was written, for the files of sentence-transformers.

    Raises:
        UnsupportedModelError: the files of sentence-transformers list something that cannot be done.
    """
    if plan.task != CLASSIFY:
        return _of_embedding(plan, model)
    classifier = plan.classifier
    if classifier is None:
        which = "each token" if built.tokenwise else "the text, as the class itself pools"
        return Pooling(plan.task, which, None, _outside(built), plan.alone)
    averaged = ", averaged" if classifier.pick == MEAN_LOGITS else ""
    parts = tuple((path, described(built.model.get_submodule(path))) for path in _modules(built, classifier.modules))
    return Pooling(plan.task, PICKS.get(classifier.pick, "each token") + averaged, classifier.labels, parts)


def _modules(built: MetaModel, paths: tuple[str, ...]) -> list[str]:
    known = {name for name, _ in built.model.named_modules()}
    return [path for path in paths if path in known]  # and not parameters


def _outside(built: MetaModel) -> tuple[tuple[str, str], ...]:
    within = built.base_path.partition(".")[0]
    return tuple((name, described(child)) for name, child in built.model.named_children() if name != within)


def described(module: nn.Module) -> str:
    """The class of a module and its sizes, those of its children where it has any."""
    if isinstance(module, nn.Linear):
        return f"Linear {module.in_features} -> {module.out_features}"
    inner = ", ".join(described(child) for child in module.children())
    return f"{type(module).__name__}({inner})" if inner else type(module).__name__


def _of_embedding(plan: Plan, model: str) -> Pooling:
    found = sentence_plan(json_reader(model))
    if found is None:
        both = plan.both_ways or bool(plan.alone)
        return Pooling(plan.task, PICKS["first" if both else "last"], None, (), plan.alone)
    parts = [(step.path, str(step)) for step in found.steps]
    return Pooling(plan.task, found.which, None, tuple(parts), plan.alone, normalised=found.normalised)


def task_of_model(config: Any, model: str) -> str:
    """What MODEL is served for, one of meta.TASKS: a language model in a folder of sentence-transformers embeds."""
    task = task_of(config)
    return EMBED if task == GENERATE and json_reader(model)("modules.json") else task


def pooling_or_refusal(built: MetaModel, plan: Plan, model: str) -> tuple[Pooling | None, list[UnsupportedModelError]]:
    """`pooling_of`, or why there is none."""
    try:
        return pooling_of(built, plan, model), []
    except UnsupportedModelError as error:
        return None, [error]
