"""Attention that is told which keys to attend to, where that is all of them up to a known length of the context.

    picked = self.indexer(...)        attention_interface(self, q, k, v, mask, indices=picked)

How many keys are picked of how many is read from runs on meta tensors: all of a context of any length within the bound,
as many as the bound of a longer one. What the keyword means is seen at work: in eager attention the same classes hide
what was not picked, which must be nothing within the bound and something beyond. The choice is no choice within it,
whoever makes it need not be asked, and a run without them shows whether anybody else would miss the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tfbackend.graph.alike import representatives
from tfbackend.graph.eager import EagerCall, eager_calls
from tfbackend.graph.interface import RUN_ERRORS, answering, buffers_on_meta, unattended
from tfbackend.graph.masks import masks_that_answer
from tfbackend.graph.observe import TOKENS, Observation, model_inputs, observe
from tfbackend.graph.rehearsal import Rehearsal

PICKED = "indices"
"""The keyword by which Transformers' classes tell an attention function which keys to attend to."""

FAR = 1 << 20
"""Tokens of a context that is longer than any bound."""

_MOST = 1 << 24
"""Numbers over all heads that a mask may have to be looked at."""


@dataclass(frozen=True)
class Selection:
    """All keys are picked in contexts of up to `bound` tokens, by the modules at the paths `makers`."""

    bound: int
    makers: frozenset[str]


def find_selection(base: nn.Module, seen: Observation) -> Selection | str | None:
    """What the attention of `base` is told, by the run `seen`; None where it is told nothing, else why it is not
    known."""
    paths = [path for path, picked in _picked(seen) if picked is not None]
    if not paths:
        return None
    bound = _bound(base, seen, paths)
    if isinstance(bound, str):
        return bound
    makers = {path: _maker(seen, path) for path in paths}
    if not any(makers.values()):
        return "no module inside attention makes them"
    found = Selection(bound, frozenset(filter(None, makers.values())))
    try:
        return _unmissed(base, found) or _at_work(base, seen, paths, bound) or found
    except RUN_ERRORS as error:
        return f"they cannot be seen at work: {type(error).__name__}: {error}"


def _picked(seen: Observation) -> Iterator[tuple[str, torch.Tensor | None]]:
    for path, calls in seen.attention.items():
        for call in calls:
            picked = call.keywords.get(PICKED)
            yield path, picked if isinstance(picked, torch.Tensor) else None


def _bound(base: nn.Module, seen: Observation, paths: list[str]) -> int | str:
    """The most tokens of which all are picked."""
    counts = _counts(observe(base, FAR), paths, FAR)
    if isinstance(counts, str):
        return counts
    if len(counts) != 1 or FAR in counts:
        return f"its layers pick {' or '.join(map(str, sorted(counts)))} of {FAR} keys"
    (bound,) = counts
    for tokens in sorted({bound, max(2, bound // 2), bound + 1, min(TOKENS, bound)}):
        wanted = {min(tokens, bound)}
        counts = _counts(seen if tokens == TOKENS else observe(base, tokens), paths, tokens)
        if counts != wanted:
            found = counts if isinstance(counts, str) else " or ".join(map(str, sorted(counts)))
            return f"of {tokens} keys {found} are picked, of {FAR} keys {bound}"
    return bound


def _counts(seen: Observation, paths: list[str], tokens: int) -> set[int] | str:
    """How many keys each call picks for each of its tokens."""
    if seen.problem:
        return f"a call of {tokens} tokens fails: {seen.problem}"
    counts = set()
    for path, picked in _picked(seen):
        if path in paths:
            if picked is None or picked.is_floating_point() or picked.dim() < 2 or picked.shape[-2] != tokens:
                return f"they are no list of keys for each of {tokens} tokens"
            counts.add(picked.shape[-1])
    return counts


def _maker(seen: Observation, path: str) -> str:
    """The innermost module inside attention `path` that gave what it is told; "" where it was handed that."""
    told = {id(picked) for at, picked in _picked(seen) if at == path}
    inside = [at for at, output in seen.outputs.items() if at.startswith(f"{path}.") and id(output) in told]
    return max(inside, key=len, default="")


class _Uses(TorchFunctionMode):
    """Whether anything is computed from one of some tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.used = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and note it where one of the tensors goes in."""
        watched = {id(x) for x in self.tensors}
        if any(id(x) in watched for x in tree_leaves((args, kwargs))):
            self.used = self.used or getattr(func, "__name__", "an operation")
        return func(*args, **(kwargs or {}))


def _unmissed(base: nn.Module, found: Selection) -> str:
    """Run the model with nothing in place of what is picked; what else asked for it, "" if nobody did."""
    uses = _Uses()
    with (
        torch.no_grad(),
        buffers_on_meta(base),
        masks_that_answer(),
        answering(unattended),
        _without(base, found, uses),
    ):
        inputs = model_inputs(base, torch.device("meta"))
        with uses:
            base(**inputs)
    return f"{uses.used} is computed from them besides" if uses.used else ""


@contextmanager
def _without(base: nn.Module, found: Selection, uses: _Uses) -> Iterator[None]:
    """While entered, the makers give an empty tensor, which `uses` watches."""
    makers = [base.get_submodule(path) for path in found.makers]
    uses.tensors = [torch.empty(0, dtype=torch.int32, device="meta") for _ in makers]
    for maker, empty in zip(makers, uses.tensors, strict=True):
        vars(maker)["forward"] = lambda *_, empty=empty, **__: empty
    try:
        yield
    finally:
        for maker in makers:
            del vars(maker)["forward"]


def _at_work(base: nn.Module, seen: Observation, paths: list[str], bound: int) -> str:
    """What eager attention does other than to see all keys up to the bound and fewer beyond; "" if nothing."""
    speakers = list(dict.fromkeys(representatives(base, dict.fromkeys(paths), seen).values()))
    most = math.isqrt(_MOST // max(call.query[1] for path in speakers for call in seen.attention[path]))
    rehearsal = Rehearsal(base, seen)
    for tokens in (min(bound, most), bound + 1):
        if tokens > most:
            continue
        for path, calls in _heard(rehearsal, speakers, tokens).items():
            given = {call.mask.window for call in seen.attention[path] if call.mask}
            whole: set[Any] = {None if window is None or window >= tokens else window for window in given}
            found = set[Any]().union(*(call.windows() for call in calls))
            if (found == whole) != (tokens <= bound):
                hides = "something" if tokens <= bound else "nothing"
                return f"eager attention of {path} hides {hides} in a context of {tokens} tokens"
    return ""


def _heard(rehearsal: Rehearsal, paths: list[str], tokens: int) -> dict[str, list[EagerCall]]:
    heard: dict[str, list[EagerCall]] = {}

    def visit(module: nn.Module, args: Any, kwargs: Any) -> Any:
        with eager_calls() as calls:
            output = module.forward(*args, **kwargs)
        heard[rehearsal.paths[id(module)]] = calls
        return output

    rehearsal.run(dict.fromkeys(paths, visit), seed=1, hiding=True, tokens=tokens)
    return heard
