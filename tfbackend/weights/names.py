"""How a tensor of one model may be spelled in a checkpoint.

A name is never matched loosely: each function here yields whole candidate names, in a fixed order, and the caller looks
them up in the names that the meta model really has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

TRAINING_COMPONENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Path components that torch.compile, FSDP and activation checkpointing put anywhere in a name."""

TRAINING_PREFIXES = ("module.", "base_model.model.")
"""What DataParallel and PEFT put in front."""

BASE_PREFIXES = (
    "model",
    "transformer",
    "gpt_neox",
    "biogpt",
    "backbone",
    "decoder",
    "language_model",
    "text_model",
    "model.language_model",
    "model.text_model",
    "language_model.model",
)
"""What the base model is called in published checkpoints; tried after the model's own name for it."""

HEAD_NAMES = ("lm_head", "embed_out", "output_projection")
"""What the linear that gives logits is called in published checkpoints."""


def join(*parts: str) -> str:
    """Dotted path of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def training_spellings(name: str) -> Iterator[str]:
    """The name as it is, then with ever more of what training left on it taken off."""
    yield name
    bare = ".".join(part for part in name.split(".") if part not in TRAINING_COMPONENTS)
    if bare != name:
        yield bare
    while prefix := next((p for p in TRAINING_PREFIXES if bare.startswith(p)), None):
        bare = bare.removeprefix(prefix)
        yield bare


class Spellings:
    """All candidate names for a tensor of one model.

    Args:
        base_path: where the base model is in the full model; "" where the full model is the base model.
        own_prefix: what the model class calls its base model (`base_model_prefix`).
        head_path: where the head is in the full model, or None.
        rename: Transformers' renamings of old names to current ones.
    """

    def __init__(self, base_path: str, own_prefix: str, head_path: str | None, rename: Callable[[str], str]) -> None:
        self._base = base_path
        self._prefixes = tuple(dict.fromkeys(p for p in (base_path, own_prefix, *BASE_PREFIXES) if p))
        self._head = head_path
        self._rename = rename

    def current(self, name: str) -> Iterator[str]:
        """The name brought up to date by Transformers' renamings, then as it is; no prefix of a base model changed."""
        for spelling in training_spellings(name):
            yield from dict.fromkeys((self._rename(spelling), spelling))

    def candidates(self, name: str) -> Iterator[str]:
        """Everything the tensor may be called in the meta model, the likeliest first."""
        for spelling in self.current(name):
            yield from self.prefixed(spelling)

    def prefixed(self, name: str) -> Iterator[str]:
        """The name with the base model's prefix as it is, added, removed or replaced; then as a name of the head."""
        yield name
        if self._base:
            yield join(self._base, name)
        for prefix in self._prefixes:
            rest = name.removeprefix(f"{prefix}.")
            if rest != name:
                yield rest
                if self._base:
                    yield join(self._base, rest)
        yield from self._as_head(name)

    def _as_head(self, name: str) -> Iterator[str]:
        if self._head is not None and (leaf := self.head_leaf(name)):
            yield join(self._head, leaf)

    def head_leaf(self, name: str) -> str:
        """ "weight" for "lm_head.weight" and "model.embed_out.weight"; "" where the name is not one of a head."""
        module, _, leaf = name.rpartition(".")
        before, _, last = module.rpartition(".")
        return leaf if last in HEAD_NAMES and (not before or before in self._prefixes) else ""
