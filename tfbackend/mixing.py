"""Whether tokens see each other outside attention, found by changing one token and looking at the others.

An engine calls the model with the tokens of many requests side by side, and with a part of each request at a time.
Attention knows which belong together; a convolution, a scan or a shift over the token axis does not, and would mix
strangers and forget the past. Such a module is refused by name, whatever it is called and however it is written.

Each kind of layer runs once in plain torch on random weights, with an attention in which each token sees itself alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.graph.interface import RUN_ERRORS, answering, rescales
from tfbackend.graph.kinds import kind_key
from tfbackend.graph.observe import TOKENS, Observation
from tfbackend.graph.selection import Selection
from tfbackend.graph.trial import copied, in_float64, materialise, plain_float32, random_inputs
from tfbackend.proof import Prover
from tfbackend.proof_key import module_key
from tfbackend.standinspec import AllKeys

_CHANGED = 2
"""The token that is changed; not the middle one, which a reversal would leave in its place."""
_TOLERANCE = 1e-5


def mixing_modules(
    base: nn.Module, layers: str, observation: Observation, prover: Prover, kept: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """(path, what was seen) of every module that lets tokens see each other, each kind looked at once.

    Looks into the decoder layers, at path `layers`, and what the base model calls beside them; not at what picks keys
    for attention, of which nothing is left. Modules at the paths `kept` have a state of their own for each request:
    they stand as if each token saw itself alone.
    """
    left = observation.selection.makers if isinstance(observation.selection, Selection) else frozenset[str]()
    seen: dict[Any, str] = {}
    for path, module in _parts(base, layers):
        if path in kept or path not in observation.calls or rescales(module):
            continue
        inside = tuple(name for name, _ in module.named_modules() if f"{path}.{name}" in kept)
        key = kind_key(module, observation.calls[path]), inside
        if key not in seen:
            without = [maker.removeprefix(path) for maker in sorted(left) if maker.startswith(f"{path}.")]
            lasting = "-".join((f"tokens-{module_key(module, observation.calls[path])}{''.join(without)}", *inside))
            seen[key] = prover.once(lasting, partial(_innermost, base, path, observation, left, kept))
        if seen[key]:
            inner, _, found = seen[key].partition(": ")
            yield f"{path}{inner}", found


def _parts(base: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    stack = base.get_submodule(layers) if layers else None
    for name, child in base.named_children():
        if child is not stack and not layers.startswith(f"{name}."):
            yield name, child
    if stack is not None:
        yield from ((f"{layers}.{name}", child) for name, child in stack.named_children())


def _innermost(
    base: nn.Module, path: str, observation: Observation, left: frozenset[str], kept: Collection[str]
) -> str:
    """ "<path below `path`>: what was seen" of the smallest module that mixes tokens; "" if none does."""
    if path in kept:
        return ""
    module = base.get_submodule(path)
    without = [maker.removeprefix(f"{path}.") for maker in left if maker.startswith(f"{path}.")]
    alone = {n: observation.outputs[f"{path}.{n}"] for n, _ in module.named_modules() if f"{path}.{n}" in kept}
    found = "" if path in left else _mixes(module, observation.calls[path][0], without, alone)
    if not found:
        return ""
    for name, _ in module.named_modules():
        inner = f"{path}.{name}"
        if name and observation.calls.get(inner) and (deeper := _innermost(base, inner, observation, left, kept)):
            return f".{name}{deeper}"
    return f": {found}"


class _EachAlone(nn.Module):
    """Gives what a module with a state gave in the observed run, made of the token itself alone."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.like = like

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and _axis(x) == 1)
        summed = tokens.flatten(2).sum(-1)

        def spread(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if _axis(x) != 1:  # a state that it returns
                return torch.zeros(x.shape)
            wide = summed.view(*summed.shape, *[1] * (x.dim() - 2)).expand(x.shape)
            return torch.sin(wide + torch.arange(x.shape[-1]))

        return tree_map(spread, self.like)


def _mixes(module: nn.Module, call: Any, without: Sequence[str], alone: Mapping[str, Any]) -> str:
    """How the output at some token follows another token; "" where it does not, or where that cannot be tried.

    `without` are modules inside that pick keys; `alone` has what those inside that have a state gave in the observed
    run.
    """
    for masked in (False, True):
        try:
            before, after = _both(module, call, without, alone, masked)
        except RUN_ERRORS:
            continue
        return _followed(before, after)
    return ""


def _both(
    module: nn.Module, call: Any, without: Sequence[str], alone: Mapping[str, Any], masked: bool
) -> tuple[Any, Any]:
    """What the module gives, and what it gives with one token changed."""
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad(), plain_float32(), answering(_attend_to_itself):
        original = materialise(module, generator)
        for name in without:
            vars(original.get_submodule(name))["forward"] = AllKeys().forward
        for name, output in alone.items():
            original.set_submodule(name, _EachAlone(output))
        inputs = random_inputs(call, original, generator, masked=masked)
        forward = inspect.unwrap(type(original).forward)
        before = forward(original, *copied(inputs[0]), **copied(inputs[1]))
        changed = tree_map(_change, inputs)
        return before, forward(original, *copied(changed[0]), **copied(changed[1]))


def _followed(before: Any, after: Any) -> str:
    for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if isinstance(a, torch.Tensor) and (token := _moved(a, b)) is not None:
            return f"what it gives for token {token} changes with token {_CHANGED}"
    return ""


def _attend_to_itself(module: nn.Module, q: Any, k: Any, v: Any, mask: Any = None, **_: Any) -> Any:
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)


def _axis(x: torch.Tensor) -> int | None:
    return next((axis for axis, size in enumerate(x.shape) if size == TOKENS), None)


def _change(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or (axis := _axis(x)) is None:
        return x
    other = x.clone()
    token = other.select(axis, _CHANGED)
    if x.dtype.is_floating_point:
        token.mul_(-1.3).add_(0.1)
    elif x.dtype != torch.bool:
        token.copy_((token + 1) % TOKENS)
    return other


def _moved(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """The first token other than the changed one at which two outputs differ."""
    axis = _axis(a)
    if axis is None or a.shape != b.shape:
        return None
    a, b = in_float64(a), in_float64(b)
    size = a.abs().max().item() or 1.0
    for token in range(TOKENS):
        apart = (a - b).select(axis, token).abs().max().item() / size
        if token != _CHANGED and not apart <= _TOLERANCE:
            return token
    return None
