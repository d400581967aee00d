"""Attention with a mask that its module computes: where that comes to a bias for each key, it is handed over as one.

    mask = self.dynamic_mask(hidden_states, bias, attention_mask)
    attention_interface(self, q, k, v, attention_mask=mask)        ->        key_biased_attention(self, q, k, v, bias)

What the mask adds to the scores is looked at on real numbers, over the longest context of which it hides nothing but
the future: every token must be given the same for a key. Which variable holds that is told by its values.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tfbackend.graph.eager import EagerCall, eager_calls
from tfbackend.graph.inline import InlineError
from tfbackend.graph.interface import HARMLESS, InlineNumbers
from tfbackend.graph.masks import UNREADABLE, MaskWindow
from tfbackend.graph.observe import TOKENS, AttentionCall, Observation, observe
from tfbackend.graph.own_masks import given_window
from tfbackend.graph.rehearsal import Rehearsal
from tfbackend.graph.selection import FAR
from tfbackend.layerspecs import BIAS_COLUMNS, KERNEL_WIDTHS
from tfbackend.source.cut import cut
from tfbackend.source.forward import ForwardSource, SourceError, forward_source

_MOST, _CHEAP = 1 << 28, 1 << 24
"""Numbers over all heads of the largest mask that is looked at, and of the largest that is looked at to no need."""

_TOLERANCE = 1e-5


def with_own_masks(seen: Observation) -> list[str]:
    """Paths of the modules that call the attention interface once, with a mask that they computed."""
    return [
        path
        for path, calls in seen.attention.items()
        if len(calls) == 1 and calls[0].mask_problem == UNREADABLE and len(seen.calls.get(path, [])) == 1
    ]


def longest_whole(base: nn.Module) -> int | None:
    """The longest context of which nothing is left out by picking some of the tokens; None where nothing is picked.

    Raises:
        RuntimeError: the model does not run over more tokens than any bound.
    """
    far = observe(base, FAR)
    if far.problem:
        raise RuntimeError(f"a call of {FAR} tokens fails: {far.problem}")
    return far.fewest if far.fewest is not None and far.fewest < FAR else None


class BiasReader:
    """Reads the biases of modules that compute their own masks.

    Args:
        bound: tokens of the longest context of which nothing may be hidden but the future; None for any.
        wanted: the longest context there will be.
    """

    def __init__(self, rehearsal: Rehearsal, bound: int | None, wanted: int) -> None:
        self.rehearsal, self.bound, self.wanted = rehearsal, bound, wanted

    def read(self, path: str) -> tuple[str, InlineNumbers]:
        """The text of the module's forward with the bias in place of the mask, and its numbers.

        Raises:
            InlineError: its mask is no bias for each key, or it is given something else besides.
            SourceError: its forward cannot be cut.
        """
        module = self.rehearsal.twin.get_submodule(path)
        call = self.rehearsal.seen.attention[path][0]
        scale, given = _scale(call), given_window(self.rehearsal, path)
        window = given.window if given else None
        heard = self._hear(path, TOKENS if self.bound is None else min(TOKENS, self.bound))
        bias = bias_of(heard, call.key[1], window)
        self._look_far(path, call, window)
        text = _biased_text(forward_source(type(module)), heard, bias)
        return text, InlineNumbers(scale, window, key_bias=True, max_context=self.bound)

    def plain(self, path: str) -> MaskWindow | None:
        """What the mask of the module hides, if that is nothing and it adds nothing; else None."""
        call = self.rehearsal.seen.attention[path][0]
        for tokens in (TOKENS, self.wanted):
            if call.query[1] * tokens * tokens > _MOST:
                return None
            heard = self._hear(path, tokens)
            if heard.added is None or bool(heard.added.any()):
                return None
        return MaskWindow(both=True)

    def _look_far(self, path: str, call: AttentionCall, window: int | None) -> None:
        tokens, heads = self.wanted if self.bound is None else self.bound, call.query[1]
        if heads * tokens * tokens > _MOST:
            raise InlineError(f"of its own mask {tokens} tokens are too many to look at")
        bias_of(self._hear(path, tokens), call.key[1], window)
        if self.bound is None or heads * (tokens + 1) ** 2 > _CHEAP or (window and window <= tokens):
            return
        if self._hear(path, tokens + 1).windows() == {None}:
            raise InlineError(f"it picks {tokens} of {tokens + 1} tokens, of which its mask hides none")

    def _hear(self, path: str, tokens: int) -> EagerCall:
        heard: list[EagerCall] = []

        def visit(module: nn.Module, args: Any, kwargs: Any) -> Any:
            with eager_calls() as calls:
                module.forward(*args, **kwargs)
            heard.extend(calls)
            return self.rehearsal.blank(path, tokens)

        self.rehearsal.run({path: visit}, seed=5, hiding=True, tokens=tokens)
        if len(heard) != 1:
            raise InlineError(f"in eager attention it calls the interface {len(heard)} times")
        return heard[0]


def _scale(call: AttentionCall) -> float:
    """What multiplies the scores of a call that asks for nothing that a bias would change."""
    given = {name: value for name, value in call.keywords.items() if value is not None and name not in HARMLESS}
    scale, dropout = given.pop("scaling", call.query[3] ** -0.5), given.pop("dropout", 0.0)
    given.pop("is_causal", None)
    if given or dropout or not isinstance(scale, (int, float)):
        raise InlineError(f"with a mask of its own it asks for {', '.join(given) or 'an unusual scale or dropout'}")
    if max(call.query[3] + BIAS_COLUMNS, call.value[3]) > max(KERNEL_WIDTHS):
        raise InlineError(f"heads of {call.query[3]} have no room for the bias of its mask")
    return float(scale)


def bias_of(call: EagerCall, kv_heads: int, window: int | None) -> torch.Tensor:
    """What a mask adds to the scores of each key, [KV heads, tokens].

    Raises:
        InlineError: it hides more or less than the future and what is outside the window, or adds something else for
            some tokens or heads.
    """
    if call.added is None:
        raise InlineError("its mask is none that can be read")
    visible, added, windows = call.visible(), call.added, call.windows()
    if windows != {None if window is None or window >= added.shape[-1] else window}:
        raise InlineError(next((w for w in windows if isinstance(w, str)), f"its mask has a window of {windows}"))
    bias = added.diagonal(dim1=-2, dim2=-1).contiguous()
    size = max(bias.abs().max().item(), 1e-30)
    if (added - bias[:, None, :]).where(visible, 0.0).abs().max().item() > _TOLERANCE * size:
        raise InlineError("what its mask adds for a key is not the same for all tokens")
    if bias.shape[0] % kv_heads and bias.shape[0] != 1:
        raise InlineError(f"its mask has {bias.shape[0]} heads for {kv_heads} KV heads")
    grouped = bias.expand(kv_heads, -1)[:, None] if bias.shape[0] == 1 else bias.view(kv_heads, -1, bias.shape[-1])
    if (grouped - grouped[:, :1]).abs().max().item() > _TOLERANCE * size:
        raise InlineError("what its mask adds is not the same for query heads that share a key")
    return grouped[:, 0]


def _biased_text(source: ForwardSource, heard: EagerCall, bias: torch.Tensor) -> str:
    if heard.frame is None:
        raise SourceError("it does not call the attention interface in its forward")
    call = source.expression(heard.frame.span)
    if not isinstance(call, ast.Call) or any(isinstance(argument, ast.Starred) for argument in call.args):
        raise SourceError("its call of the attention interface cannot be read")
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    given = dict(zip(("module", "query", "key", "value", "attention_mask"), call.args, strict=False)) | named
    if not {"query", "key", "value", "attention_mask"} <= given.keys():
        raise SourceError("its call of the attention interface does not name query, key, value and mask")
    name = _holder(heard.frame.tensors, bias)
    parts = ", ".join(source.segment(given[role]) for role in ("query", "key", "value"))
    start = _beginning(source, given["attention_mask"], call)
    return cut(source, start, call, f"key_biased_attention({source.me}, {parts}, {name})", "key bias")


def _holder(tensors: dict[str, torch.Tensor], bias: torch.Tensor) -> str:
    """An expression for the bias [1, KV heads, tokens]."""
    goal = bias[None]
    for name, tensor in tensors.items():
        for after, x in _turned(tensor):
            if x.shape == goal.shape and torch.allclose(x.float(), goal, rtol=_TOLERANCE, atol=0.0):
                return f"{name}{after}"
    raise SourceError("no local variable holds the bias of its mask")


def _turned(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "", tensor
    if tensor.dim() == 3:
        yield ".transpose(1, 2)", tensor.transpose(1, 2)
    if tensor.dim() == 4 and 1 in tensor.shape[2:]:
        at = 2 if tensor.shape[2] == 1 else 3
        yield f".squeeze({at})", tensor.squeeze(at)


def _beginning(source: ForwardSource, mask: ast.expr, call: ast.Call) -> ast.expr:
    """Where the making of the mask begins: the first value that its name has before the call."""
    if not isinstance(mask, ast.Name):
        return call
    made = [
        statement
        for statement in ast.walk(source.tree)
        if isinstance(statement, ast.Assign)
        and statement.lineno < call.lineno
        and any(isinstance(target, ast.Name) and target.id == mask.id for target in statement.targets)
    ]
    return min(made, key=lambda statement: statement.lineno).value if made else call
