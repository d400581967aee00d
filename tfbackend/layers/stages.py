"""What stands on a pipeline stage for the layers that other stages have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import PPMissingLayer

from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.query import is_within
from tfbackend.graph.stages import Stages

HIDDEN = "hidden_states"
"""Name of what a stage hands to the next."""


@dataclass(frozen=True)
class Stage:
    """One of the stages that share the layers of a model.

    Attributes:
        plan: what is known of the layers.
        start, stop: the layers that it has.
        embedding: path of the vocabulary embedding, relative to the base model, where this stage does without; or "".
    """

    plan: Stages
    start: int
    stop: int
    embedding: str = ""

    @property
    def follows(self) -> bool:
        """Whether there is a stage after this one."""
        return self.stop < self.plan.count

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Paths of what it has not, relative to the base model."""
        others = (n for n in range(self.plan.count) if not self.start <= n < self.stop)
        return (*(f"{self.plan.layers}.{n}" for n in others), *([self.embedding] if self.embedding else []))

    def has(self, path: str) -> bool:
        """Whether a path relative to the base model is not in what is absent."""
        return not any(is_within(path, missing) for missing in self.absent)


def this_stage(plan: Stages | None, embedding: str, *, tied: bool) -> Stage | None:
    """The stage of this rank, None where there is but one.

    Args:
        plan: what is known of the layers; there is a plan wherever there are stages.
        embedding: path of the vocabulary embedding, relative to the base model.
        tied: whether the head, which is on the last stage, has the table of the embedding.
    """
    group = get_pp_group()
    if group.world_size == 1:
        return None
    assert plan is not None
    start, stop = get_pp_indices(plan.count, group.rank_in_group, group.world_size)
    needed = plan.embeds or (tied and group.is_last_rank)
    return Stage(plan, start, stop, "" if group.is_first_rank or needed else embedding)


def leave_out(base: nn.Module, stage: Stage) -> None:
    """Put stand-ins where the stage has nothing."""
    for number, path in enumerate(f"{stage.plan.layers}.{n}" for n in range(stage.plan.count)):
        if stage.has(path):
            continue
        original = base.get_submodule(path)
        base.set_submodule(path, AbsentLayer(original, stage.plan.returned[number]))
    if stage.embedding:
        base.set_submodule(stage.embedding, AbsentEmbedding(base.get_submodule(stage.embedding)))


class AbsentLayer(PPMissingLayer):
    """Hands on the hidden states that it is given, or those of another stage; keeps what its stage has made of them.

    Attributes:
        tfb_received: hidden states [1, tokens, width] from the stage before, to be handed on in place of its input.
        tfb_given: its input of the call that is running.
    """

    tfb_received: torch.Tensor | None
    tfb_given: torch.Tensor | None

    def __init__(self, original: nn.Module, returned: int) -> None:
        super().__init__()
        # A model may ask its layers of what type they are.
        self.__dict__.update(_plain(original))
        self.tfb_returned, self.tfb_received, self.tfb_given = returned, None, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the class; the output has the form of the layer's."""
        hidden = args[0] if args else next(iter(kwargs.values()))
        self.tfb_given = hidden
        if self.tfb_received is not None:
            hidden = self.tfb_received
        return (hidden, *[None] * (self.tfb_returned - 1)) if self.tfb_returned else hidden


class AbsentEmbedding(PPMissingLayer):
    """[...] -> zeros [..., width]: nothing reads them where hidden states come from another stage."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_plain(original))
        weight = original.weight
        assert isinstance(weight, torch.Tensor)
        self.tfb_width, self.tfb_dtype = weight.shape[1], weight.dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.zeros(*input_ids.shape, self.tfb_width, dtype=self.tfb_dtype, device=input_ids.device)


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are neither parameters nor modules."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def check_shared(pairs: Sequence[tuple[str, str]], stage: Stage | None, prefix: str) -> None:
    """Refuse parameters that a layer here shares with one of another stage.

    Args:
        pairs: (place, place of the one that it shares), in the served tree.
        prefix: of the base model in it.
    """
    if stage is None:
        return
    for place, source in pairs:
        inside = [path.removeprefix(f"{prefix}.") for path in (place, source)]
        if stage.has(inside[0]) and not stage.has(inside[1]):
            raise UnsupportedModelError(
                "A layer has the weights of a layer that another pipeline stage has.",
                where=place,
                found=f"the weights of {source}",
                remedy="Serve it with --pipeline-parallel-size 1",
            )
