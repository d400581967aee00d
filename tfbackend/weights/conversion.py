"""Transformers' own changes to checkpoints: renamings, and conversions that join, split or turn tensors."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, dot_natural_key


@dataclass(frozen=True)
class Converter:
    """A conversion as one name met it.

    Attributes:
        transform: the conversion; shared, never changed.
        pattern: the source pattern that the name matched.
        index: what the pattern's `*` stood for, "" where it has none.
    """

    transform: WeightConverter
    pattern: str
    index: str

    @property
    def part(self) -> tuple[str, str]:
        """Which of the conversion's inputs the tensor is."""
        return self.pattern, self.index

    def results(self, first: str) -> tuple[str, ...]:
        """Names of all results, given that of the first; () where they cannot be told."""
        targets = self.transform.target_patterns
        if len(targets) == 1:
            return (first,)
        before, found, after = first.partition(targets[0])
        return tuple(before + target + after for target in targets) if found else ()

    def respell(self, name: str, pattern: str, index: str) -> str:
        """The name of another input of the conversion, spelled after `name`, which is the one of this input."""
        return name.replace(_spelled(self.pattern, self.index), _spelled(pattern, index), 1)


@dataclass(frozen=True)
class Part:
    """One input of a conversion."""

    source_name: str
    tensor: torch.Tensor


class Conversions:
    """The conversions that Transformers registers for a model class, asked one name at a time.

    Args:
        model: the full model; only its class, config and submodules are looked at.
        states: its parameters on meta, for conversions that look at the shape they convert to.
    """

    def __init__(self, model: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._stub = _ModelStub(states)
        self._config = getattr(model, "config", None)

    def rename(self, name: str) -> str:
        """All renamings, in turn."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def find(self, renamed: str) -> tuple[str, Converter] | None:
        """(name of the first result, converter) where a conversion takes the tensor of this renamed name."""
        for transform in self._converters:
            target, pattern = transform.rename_source_key(renamed)
            if pattern is not None:
                return target, Converter(transform, pattern, _index(pattern, renamed))
        return None

    def run(
        self, transform: WeightConverter, first: str, parts: Mapping[tuple[str, str], Part]
    ) -> dict[str, torch.Tensor]:
        """Convert the inputs of one conversion; those with an index are taken in its order, however they came.

        Raises:
            ValueError, RuntimeError: the tensors do not have shapes that fit together.
        """
        own = copy.deepcopy(transform)
        for (pattern, _), part in sorted(parts.items(), key=lambda item: dot_natural_key(item[1].source_name)):
            own.add_tensor(first, part.source_name, pattern, part.tensor)
        results = own.convert(first, model=self._stub, config=self._config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}

    def indices(self, transform: WeightConverter, shape: torch.Size, seen: Iterable[str]) -> list[str]:
        """What `*` stands for in the source patterns of a complete conversion whose first result has this shape."""
        count = max((int(text) for text in seen if text.isdigit()), default=-1) + 1
        for operation in transform.operations:
            attribute = getattr(operation, "num_shards_attribute", None)
            if isinstance(operation, MergeModulelist):
                count = max(count, shape[operation.dim] * len(transform.target_patterns))
            elif attribute is not None and self._config is not None:
                count = max(count, getattr(self._config.get_text_config(), attribute))
        return [str(index) for index in range(count)]


class _ModelStub:
    """What a conversion may ask of the model it loads into: the shape of a parameter."""

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        self._states = states

    def get_parameter(self, name: str) -> Any:
        return self._states[name]


def _index(pattern: str, name: str) -> str:
    """What the `*` of a source pattern stands for in `name`, "" where the pattern has none."""
    if "*." not in pattern:
        return ""
    found = re.search(pattern.replace("*.", r"(?P<index>.*)\.", 1).replace("*.", r".*\."), name)
    return found.group("index") if found else ""


def _spelled(pattern: str, index: str) -> str:
    return pattern.removeprefix("^").removesuffix("$").replace("\\.", ".").replace("*", index)
