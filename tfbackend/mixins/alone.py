"""Calls a Transformers model with one prompt at a time, where its parts cannot tell the prompts of a call apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context, is_forward_context_available

from tfbackend import meta
from tfbackend.alone import Alone, Limits, limits_of
from tfbackend.apply import materialise, replace_layers
from tfbackend.grafting import graft
from tfbackend.meta import CLASSIFY
from tfbackend.mixins.base import Base
from tfbackend.mixins.requests import guard_requests


class AloneMixin(Base):
    """A model whose plan may say that each prompt is run by itself.

    Attributes:
        limits: what a request may ask of the model.
        head: modules of the Transformers class that are not in its base model, at their own paths.
    """

    limits: Limits = Limits()

    def build_base(self, built: meta.MetaModel, prefix: str) -> nn.Module:
        if not self.plan.alone:
            self.limits = Limits(types=self.plan.types)
            return super().build_base(built, prefix)
        meta.give_back_interfaces(built)
        replace_layers(self.plan, built.base, prefix, self.context)
        materialise(built.model, self.context)
        self.head = nn.Module()
        for path in outside(built.model, built.base_path):
            graft(self.head, built.model, path)
        # Its parameters are the base model's and the head's, and have their names there.
        self.__dict__["alone"] = Alone(built.model, labels=self.task == CLASSIFY, tokenwise=built.tokenwise)
        base: nn.Module = built.base
        return base

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As Base; a model that runs prompt by prompt is tried out before anybody asks it.

        Raises:
            UnsupportedModelError: it cannot do what it may be asked for.
        """
        loaded = super().load_weights(weights)
        if self.plan.alone:
            self.limits = limits_of(self.__dict__["alone"], self.serving.max_model_len, self.context.device)
        guard_requests(self.vllm_config, self.limits)
        return loaded

    def each_alone(self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Token ids of whole prompts side by side, places in them, types or none, all [tokens] -> [tokens, n]."""
        alone: Alone = self.__dict__["alone"]
        if is_forward_context_available() and get_forward_context().attn_metadata is None:
            return self._measured(alone, ids)
        starts: list[int] = (positions == 0).nonzero().flatten().tolist()
        rows: list[torch.Tensor] = []
        for start, end in zip(starts, [*starts[1:], ids.shape[0]], strict=True):
            told = types[start:end].long() if types is not None and self.limits.types > 1 else None
            rows.append(alone(ids[start:end].long(), told))
        return torch.cat(rows)

    def _measured(self, alone: Alone, ids: torch.Tensor) -> torch.Tensor:
        """A call that only measures memory, with the longest prompts that there may be, whatever they are."""
        length = max(min(self.serving.max_model_len, ids.shape[0]), self.limits.shortest)
        prompt = torch.full((length,), self.limits.needs or 0, dtype=torch.long, device=ids.device)
        rows = [alone(prompt) for _ in range(0, ids.shape[0], length)]
        return torch.cat(rows)[: ids.shape[0]]


def outside(model: nn.Module, base_path: str) -> Iterator[str]:
    """Paths of the largest modules, and of parameters and buffers, that are not in the base model."""
    within, path = base_path.split(".") if base_path else [], ""
    for name in within:
        owner: Any = model.get_submodule(path)
        prefix = f"{path}." if path else ""
        yield from (f"{prefix}{child}" for child in owner._modules if child != name)
        own = {**owner._parameters, **owner._buffers}
        yield from (f"{prefix}{key}" for key, x in own.items() if x is not None)
        path = f"{prefix}{name}"
