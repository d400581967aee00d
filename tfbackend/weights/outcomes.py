"""The answers to "where does this tensor go", as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfbackend.weights.conversion import Converter

Shard = str | int | None
"""A part of a stacked parameter ("q", 0 ...), or None for the whole."""


@dataclass(frozen=True)
class Placement:
    """A tensor has a place.

    Attributes:
        target: the parameter or buffer in the served module tree, "model.layers.0.self_attn.qkv_proj.weight".
        shard: which part of it the tensor is; None for all of it.
        source_name: the tensor's name in the checkpoint; the first of them where several were joined.
        canonical: the name in the state of the Transformers model. For a tensor that only a quantized checkpoint has
            (scales, zero points), its module's path there and the tensor's own last component.
        alias_of: canonical name of the parameter that the config ties this one to.
        sources: all checkpoint names, where a conversion joined several or split one.
        unties: the checkpoint has a tensor of its own for a tied parameter, and it differs: the tie has to go.
        transposed: the checkpoint has the weight [in, out], the place takes it [out, in]. Only of the weight itself:
            what quantizers write beside or in place of it is [out, in] already.
        cleared: rows that Transformers sets to zero once they are loaded.
    """

    target: str
    shard: Shard
    source_name: str
    canonical: str
    alias_of: str | None = None
    sources: tuple[str, ...] = ()
    unties: bool = False
    transposed: bool = False
    cleared: tuple[int, ...] = ()

    @property
    def origins(self) -> tuple[str, ...]:
        """The checkpoint tensors that this placement uses up."""
        return self.sources or (self.source_name,)

    def __str__(self) -> str:
        return describe(self.target, self.shard)


@dataclass(frozen=True)
class Gathered:
    """A tensor is one of the inputs of a conversion of Transformers.

    Attributes:
        source_name: the tensor's name in the checkpoint.
        group: canonical name of the conversion's first result; equal for all inputs of one conversion.
        converter: the conversion, and which of its inputs the tensor is.
        placements: where the results go.
    """

    source_name: str
    group: str
    converter: Converter
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Dropped:
    """A tensor is left out by a named rule.

    Attributes:
        rule: key of `tfbackend.weights.RULES`.
        why: the rule as a sentence.
        ndims: numbers of dimensions that the tensor may have for the rule to hold; empty for any.
    """

    rule: str
    why: str
    ndims: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unexpected:
    """Nothing takes the tensor and no rule drops it. `nearest` are the names that look most like it."""

    nearest: tuple[str, ...] = ()


Outcome = Placement | Gathered | Dropped | Unexpected


def describe(target: str, shard: Shard) -> str:
    """A place as messages spell it."""
    return target if shard is None else f"{target} (shard {shard})"
