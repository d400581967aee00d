"""The part that torch.compile sees: flat tokens in, flat hidden states out, no closure and no cache in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig

from tfbackend.graph.interface import LAYERS, POSITIONS
from tfbackend.graph.numbering import TokenNumbering
from tfbackend.graph.token_types import TYPES
from tfbackend.layers.stages import Stage

_TOKEN_AXES = {"input_ids": 0, "positions": -1, "inputs_embeds": 0, "types": 0, "received": 0}


@support_torch_compile(dynamic_arg_dims=_TOKEN_AXES)
class Decoder(nn.Module):
    """Calls a Transformers base model the way an engine does.

    It does not own the base model, so that parameters have one name only.
    """

    base: nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.keywords: dict[str, Any] = {}
        self.numbered = True
        self.numbering: TokenNumbering | None = None
        self._repeated: list[Any] = []
        self._numbering: list[Any] = []
        self._before: list[Any] = []
        self._after: list[Any] = []

    def serve(
        self,
        base: nn.Module,
        keywords: dict[str, Any],
        numbering: TokenNumbering | None = None,
        stage: Stage | None = None,
    ) -> None:
        """Attach the base model and the keywords of its calls; `position_ids`, where it is one, is given anew each
        time, made of the token ids where there is a `numbering`. `stage` says which layers are stand-ins."""
        self.__dict__["base"] = base
        self.keywords = {name: value for name, value in keywords.items() if name != "position_ids"}
        self.numbered, self.numbering = "position_ids" in keywords, numbering
        self._repeated = [module for module in base.modules() if hasattr(module, LAYERS)]
        self._numbering = [module for module in base.modules() if hasattr(module, POSITIONS)]
        if stage is not None:
            layers = [*base.get_submodule(stage.plan.layers).children()]
            self._before, self._after = layers[: stage.start][-1:], layers[stage.stop :][:1]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        types: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids [tokens] or inputs_embeds [tokens, hidden], positions [tokens], types [tokens] or none in any call,
        received [tokens, hidden] from the stage before -> [tokens, hidden], for the stage after where there is one."""
        inputs: dict[str, Any] = {}
        if inputs_embeds is not None:
            inputs["inputs_embeds"] = inputs_embeds.unsqueeze(0)
        else:
            assert input_ids is not None
            inputs["input_ids"] = input_ids.unsqueeze(0)
        if self.numbered:
            places = positions
            if self.numbering is not None:
                assert input_ids is not None, "positions are made of token ids, and none are given"
                places = self.numbering.number(input_ids, positions)
            inputs["position_ids"] = places.unsqueeze(0)
        if types is not None:
            inputs[TYPES] = types.unsqueeze(0)
        for module in self._repeated:
            module.tfb_attention_calls = 0
        for module in self._numbering:
            module.tfb_positions = positions
        for layer in self._before:
            assert received is not None
            layer.tfb_received = received.unsqueeze(0)
        output = self.base(**inputs, **self.keywords)
        for layer in self._before:
            layer.tfb_received = None
        for module in self._numbering:  # so that no call is left with those of another
            module.tfb_positions = None
        for module in self._repeated:
            if module.tfb_attention_calls != len(module.tfb_attention_layers):
                raise RuntimeError("attention was called less often than when it was planned")
        hidden: torch.Tensor = output[0]
        for layer in self._after:
            hidden, layer.tfb_given = layer.tfb_given, None
        return hidden.squeeze(0)
