"""The class that vLLM would make, its MRO and what it can do, without importing vLLM.

Our classes are read from their source with ast; the classes of vLLM and torch that they derive from are known by name.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tfbackend
from tfbackend.graph.statecache import kept_by

CAPABILITIES: dict[str, str] = {
    "SupportsLoRA": "LoRA adapters",
    "SupportsQuant": "quantized checkpoints",
    "SupportsPP": "pipeline parallelism",
    "SupportsMultiModal": "images, video and audio",
    "SupportsEagle": "EAGLE drafts",
    "SupportsEagle3": "EAGLE-3 drafts",
    "SupportsMRoPE": "multi-axis rotary positions",
    "IsHybrid": "recurrent layers beside attention",
    "HasInnerState": "state between calls",
    "IsAttentionFree": "no attention at all",
    "SupportsMambaPrefixCaching": "prefix caching of recurrent state",
    "SupportsCrossEncoding": "scoring pairs of texts",
    "SupportsTranscription": "transcription",
}
"""vLLM's interface -> what a model that has it can do."""

POOLING_SUFFIXES: tuple[tuple[str, str], ...] = (
    ("ForCausalLM", "generate"),
    ("ForConditionalGeneration", "generate"),
    ("ChatModel", "generate"),
    ("LMHeadModel", "generate"),
    ("ForTextEncoding", "embed"),
    ("EmbeddingModel", "embed"),
    ("ForSequenceClassification", "classify"),
    ("ForTokenClassification", "classify"),
    ("ForAudioClassification", "classify"),
    ("ForImageClassification", "classify"),
    ("ForVideoClassification", "classify"),
    ("ClassificationModel", "classify"),
    ("ForRewardModeling", "embed"),
    ("RewardModel", "embed"),
    ("Model", "embed"),
)
"""End of an architecture's name -> what vLLM serves it for, in the order that vLLM looks; tests compare with vLLM's."""

_EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class ServedClass:
    """The class that serves a model.

    Attributes:
        name: what vLLM's registry calls it.
        ours: whether tfbackend has a class of that name.
        mro: names of the classes in order of resolution; () where it is not ours.
        can, cannot: capabilities in words.
    """

    name: str
    ours: bool
    mro: tuple[str, ...] = ()
    can: tuple[str, ...] = ()
    cannot: tuple[str, ...] = ()

    def supports(self, interface: str) -> bool:
        return interface in self.mro


def served_class(config: Any, architecture: str, task: str = "") -> ServedClass:
    """The class for a config; `architecture` stands in where the config names none, `task` for what that says."""
    name = class_name(config, architecture, task)
    bases = class_bases()
    if name not in bases:
        return ServedClass(name, ours=False)
    mro = linearize(name, bases)
    can = tuple(words for interface, words in CAPABILITIES.items() if interface in mro)
    cannot = tuple(CAPABILITIES[i] for i in ("SupportsLoRA", "SupportsQuant", "SupportsPP") if i not in mro)
    return ServedClass(name, True, mro, can, cannot)


def class_name(config: Any, architecture: str, task: str = "") -> str:
    """The name that vLLM looks up for `--model-impl transformers`."""
    text = config.get_text_config()
    name = "Transformers" + ("MultiModal" if text is not config else "") + ("MoE" if num_experts(text) else "")
    task = task or task_of(config, architecture)
    ends = {"embed": "EmbeddingModel", "classify": "ForSequenceClassification"}
    return name + ends.get(task, f"{kept_by(config) if text is config else ''}ForCausalLM")


_LABELLING = ("ForQuestionAnswering", "ForQuestionAnsweringSimple", "ForRewardModeling", "RewardModel")
"""Ends of names of classes that give logits of labels, which the plugin says to vLLM."""


def task_of(config: Any, architecture: str = "") -> str:
    """What the class that the config names is served for, one of meta.TASKS; `architecture` stands in for it."""
    named = (getattr(config, "architectures", None) or [architecture])[0]
    if named.endswith(_LABELLING):
        return "classify"
    return next((task for suffix, task in POOLING_SUFFIXES if named.endswith(suffix)), "generate")


def num_experts(text_config: Any) -> int:
    """Routed experts of a layer, 0 where the model has none."""
    found = next((getattr(text_config, name) for name in _EXPERT_COUNTS if getattr(text_config, name, None)), 0)
    return int(max(found)) if isinstance(found, (list, tuple)) else int(found)


def class_bases() -> Mapping[str, tuple[str, ...]]:
    """Class -> bases, of every class of models.py and of the mixins, read from their source."""
    root = Path(tfbackend.__file__).parent
    bases: dict[str, tuple[str, ...]] = {}
    for path in (root / "models.py", *sorted((root / "mixins").rglob("*.py"))):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
    return bases


def linearize(name: str, bases: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """C3 over names; a class that `bases` does not list counts as one without bases.

    Raises:
        TypeError: there is no consistent order, as Python would say.
    """
    own = bases.get(name, ())
    pending = [list(linearize(base, bases)) for base in own] + [list(own)]
    order = [name]
    while pending := [chain for chain in pending if chain]:
        for chain in pending:
            head = chain[0]
            if not any(head in other[1:] for other in pending):
                break
        else:
            raise TypeError(f"no consistent order of the bases of {name}")
        order.append(head)
        pending = [chain[1:] if chain[0] == head else chain for chain in pending]
    return tuple(order)
