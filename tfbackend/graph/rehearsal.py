"""Runs of a model's own code on real numbers, without its weights.

Every module that holds weights and nothing else gives random numbers of the shape that it was seen to give, and so do
experts; all code around them runs as it is, so that masks, positions and biases are the true ones. A model of any size
takes a moment.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tfbackend.graph.interface import calls_made_by, has_experts_interface
from tfbackend.graph.masks import masks_for
from tfbackend.graph.observe import TOKENS, Observation, call_keywords

Visit = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Stands in for the call of one module: (module, args, kwargs) -> its output."""

_SPREAD = 0.5
"""Standard deviation of what modules with weights give; no softmax of products of such numbers runs into its ends."""


class _Enough(Exception):
    """Raised by a visit that needs no more of the run."""


class Rehearsal:
    """A twin of a base model whose weights are left out.

    Args:
        seen: a run of the model on meta tensors.
        skipped: paths of modules that are not run but give zeros, unless they are visited.
    """

    def __init__(self, base: nn.Module, seen: Observation, skipped: Collection[str] = ()) -> None:
        self.twin, self.seen, self.skipped = copy.deepcopy(base).float(), seen, frozenset(skipped)
        self.paths = {id(module): path for path, module in self.twin.named_modules()}
        generator = torch.Generator().manual_seed(7)
        for module in self.twin.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and not _holds_weights_only(module):
                    drawn = torch.randn(parameter.shape, generator=generator) * _SPREAD
                    module._parameters[name] = nn.Parameter(drawn, requires_grad=False)

    def run(
        self,
        visits: Mapping[str, Visit],
        *,
        seed: int,
        hiding: bool,
        tokens: int = TOKENS,
        spread: float = _SPREAD,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        """One forward over `tokens` tokens, up to the last visit.

        Args:
            visits: what to do instead of calling the modules at these paths.
            seed: of the random numbers.
            hiding: whether masks are the model's; else they hide nothing.
            spread: standard deviation of the random numbers.
            inputs: keywords of the call; token ids of zero and their positions, where None.

        Raises:
            anything that the model's code raises.
        """
        if inputs is None:
            ids = torch.zeros((1, tokens), dtype=torch.long)
            inputs = {"input_ids": ids} | call_keywords(self.twin, torch.arange(tokens)[None])
        with torch.no_grad(), masks_for(self.twin.config, hiding=hiding), self._calls(visits, seed, tokens, spread):
            try:
                self.twin(**inputs)
            except _Enough:
                return

    def _calls(
        self, visits: Mapping[str, Visit], seed: int, tokens: int, spread: float
    ) -> AbstractContextManager[None]:
        left = set(visits)

        def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            path = self.paths.get(id(module))
            if path is not None and path in visits:
                output = visits[path](module, args, kwargs)
                left.discard(path)
                if not left:
                    raise _Enough
                return output
            if path in self.skipped:
                return self.blank(path, tokens)
            if path is None or not _holds_weights_only(module):
                return original(module, *args, **kwargs)
            return self._drawn(path, seed, tokens, spread)

        return calls_made_by(call)

    def blank(self, path: str, tokens: int = TOKENS) -> Any:
        """Zeros in the shape of what a module gives, in the memory of one."""

        def zeros(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return torch.zeros(1).expand([tokens if size == TOKENS else size for size in x.shape])

        return tree_map(zeros, self.seen.outputs[path])

    def _drawn(self, path: str, seed: int, tokens: int, spread: float) -> Any:
        """The same for the same path and seed, in whatever order modules are called."""
        mark = hashlib.sha256(f"{seed} {path}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mark[:6], "big"))

        def draw(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            shape = [tokens if size == TOKENS else size for size in x.shape]
            if not x.is_floating_point():
                return torch.zeros(shape, dtype=x.dtype)
            return torch.randn(shape, generator=generator) * spread

        return tree_map(draw, self.seen.outputs[path])


def _holds_weights_only(module: nn.Module) -> bool:
    if has_experts_interface(module):
        return True
    return next(module.children(), None) is None and any(p is not None for p in module._parameters.values())
