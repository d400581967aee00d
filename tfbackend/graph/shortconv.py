"""Whether a mixer is a gated short convolution: its shapes say which, and its numbers whether it is one."""

from __future__ import annotations

import torch
from torch import nn

from tfbackend.graph.mixerparts import apart_from, depthwise, linears_of, read_by_numbers, stray_weights
from tfbackend.graph.statetrial import TOLERANCE
from tfbackend.shortconvspec import ShortConvSpec
from tfbackend.statespec import CONV, StateSpec


def read_short_conv(
    module: nn.Module, state: StateSpec, found: tuple[ShortConvSpec, dict[str, str]]
) -> tuple[ShortConvSpec, dict[str, str]] | str:
    """`found` if the numbers of the mixer are those of that short convolution, or else a reason."""
    spec, places = found

    def compare(mixer: nn.Module, generator: torch.Generator) -> tuple[ShortConvSpec, dict[str, str]] | str:
        worst = apart_from(spec.reference().bind(mixer, places), mixer, state, spec.dim, generator)
        if not worst <= TOLERANCE:
            return f"what it gives differs by {worst:.2g} of the largest value from a short convolution"
        return found

    return read_by_numbers(module, 31, compare)


def find_short_conv(module: nn.Module, state: StateSpec) -> tuple[ShortConvSpec, dict[str, str]] | str:
    """What a mixer that keeps `state` is as a short convolution by its shapes, with the name of each weight of the
    layer, or why it is none; "" where it does not look like one."""
    if [(s.kind, len(s.shape)) for s in state.states] != [(CONV, 2)]:
        return ""
    dim, kernel = state.states[0].shape
    parts = (linears_of(module, dim, 3 * dim), depthwise(module, dim, kernel), linears_of(module, dim, dim))
    if any(len(names) != 1 for names in parts):
        return ""
    names = [found[0] for found in parts]
    if strays := stray_weights(module, {*names}):
        return f"it has {', '.join(strays)}, which a short convolution has not"
    if len(state.outputs) != 1:
        return f"it returns {len(state.outputs)} values"
    biased = {name: getattr(module.get_submodule(name), "bias", None) is not None for name in names}
    if len({*biased.values()}) != 1:
        return f"of its parts, {', '.join(name for name in names if biased[name])} alone have a bias"
    spec = ShortConvSpec(dim, kernel, biased[names[0]])
    return spec, dict(zip(("in_proj", "conv", "out_proj"), names, strict=True))
