"""What a plan has to know of a model besides its rewrites: its head, how it numbers tokens, and masks seen through."""

from __future__ import annotations

from dataclasses import replace

from tfbackend.classifier import ClassifierPlan, plan_classifier
from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.numbering import TokenNumbering, numbers_by_tokens, read_numbering, renumbered
from tfbackend.graph.observe import Observation
from tfbackend.head import HeadPlan, plan_head
from tfbackend.inline import Inlined
from tfbackend.meta import CLASSIFY, GENERATE, MetaModel
from tfbackend.refusals import padding_refusal, places_refusal, positions_refusal
from tfbackend.serving import ServingSpec


def explained(observation: Observation, inlined: Inlined) -> Observation:
    """The observation with what is known of masks that could not be served."""
    attention = dict(observation.attention)
    for path, why in inlined.masks.items():
        attention[path] = [replace(c, mask_problem=f"{c.mask_problem}: {why}") for c in attention[path]]
    for path, mask in inlined.plain.items():
        attention[path] = [replace(c, mask=mask, mask_problem="") for c in attention[path]]
    return replace(observation, attention=attention)


def read_heads(
    meta: MetaModel, observation: Observation
) -> tuple[HeadPlan | None, ClassifierPlan | None, list[UnsupportedModelError]]:
    """What comes after the base model, for the task that the model was built for."""
    try:
        if meta.task == CLASSIFY:
            return None, plan_classifier(meta, observation), []
        return (plan_head(meta, observation) if meta.base_path and meta.task == GENERATE else None), None, []
    except UnsupportedModelError as error:
        return None, None, [error]


def parts_read(meta: MetaModel, classifier: ClassifierPlan | None) -> tuple[str, ...]:
    """Paths in the base model of what the classifier calls."""
    before = f"{meta.base_path}."
    modules = classifier.modules if classifier else ()
    return tuple(path.removeprefix(before) for path in modules if path.startswith(before))


def read_token_numbering(
    meta: MetaModel,
    serving: ServingSpec,
    observation: Observation,
    vocabulary: str,
    refusals: list[UnsupportedModelError],
) -> TokenNumbering | None:
    """How the model numbers its tokens by looking at which they are; None where it does not, or may not be served."""
    table = numbers_by_tokens(meta.base, vocabulary)
    if not table:
        if meta.task != GENERATE and (other := renumbered(meta.base, observation, vocabulary)):
            refusals.append(positions_refusal("", f"without positions it looks up other rows of {other}"))
        return None
    if not serving.whole_prompts:
        refusals.append(padding_refusal(table))
        return None
    padding = getattr(meta.model.config.get_text_config(), "pad_token_id", None)
    found = read_numbering(meta.base, observation, vocabulary, padding)
    if isinstance(found, str):
        refusals.append(padding_refusal(table, found))
        return None
    if found.longest < serving.max_model_len:
        refusals.append(places_refusal(table, found.longest, serving.max_model_len))
    return found
