"""One run of the whole model on meta tensors: what every module is called with, and what its attention is asked for.

Shapes, keyword arguments, scales and windows are read from the calls the model really makes, so that nothing has to be
guessed from the names of config fields. Masks are asked what they hide (see `mask_window`), not what they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tfbackend.errors import UnsupportedModelError

TOKENS = 7
"""Tokens of the meta run. Prime and small: no size of a real model is 7, so a 7 in a graph is the token axis."""

RUN_ERRORS = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, NameError),
    *(AssertionError, ArithmeticError, ImportError, SyntaxError),
)
"""What the forward of a model may raise when it runs in other circumstances than its author had in mind."""

Recorder = Callable[..., Any]
_recorders: list[Recorder] = []


@dataclass(frozen=True)
class MaskWindow:
    """What a mask lets a token see: itself and the `window - 1` tokens before it, or all before it where None."""

    window: int | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention interface: shapes [1, heads, tokens, dim], the mask's window, and the keywords."""

    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: MaskWindow | None
    mask_problem: str
    keywords: dict[str, Any]


class Made(NamedTuple):
    """Where a tensor of the run came from: leaf number `leaf` of what module `path` returned from its call number
    `call`."""

    tensor: torch.Tensor
    path: str
    leaf: int
    call: int


@dataclass
class Observation:
    """What the run saw.

    Attributes:
        calls: module path -> (args, kwargs) of its calls, tensors on meta.
        outputs: module path -> output of its last call.
        attention: module path -> calls of the attention interface made with that module.
        made: id of a tensor -> where it came from, for what modules without children returned.
        modules: the modules of `made` by path.
        problem: why the run ended early, "" if it did not.
    """

    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, list[AttentionCall]] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    problem: str = ""


def attention_interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers' attention modules call: [1, heads, tokens, dim] in, [1, tokens, heads, v_dim] out.

    While a recorder listens (a meta run, a trace, a proof) it answers; in the engine vLLM's attention layer, which
    `apply` put on the module, does.
    """
    if _recorders:
        return _recorders[-1](module, query, key, value, attention_mask, **keywords), None
    tokens, heads = query.shape[2], query.shape[1]
    attn: Any = module.attn
    output = attn(
        query.transpose(1, 2).reshape(tokens, -1),
        key.transpose(1, 2).reshape(tokens, -1),
        value.transpose(1, 2).reshape(tokens, -1),
    )
    return output.view(1, tokens, heads, -1), None


@contextmanager
def answering(recorder: Recorder) -> Iterator[None]:
    """Let `recorder(module, query, key, value, mask, **keywords) -> tensor` answer the attention interface."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()


_NEAR, _FAR = 160, 1 << 21
"""Every pair of the first `_NEAR` positions is asked, and pairs around `_FAR`, which is beyond any real context."""


def mask_window(function: Callable[..., Any]) -> MaskWindow:
    """Ask a mask function (batch, head, q, kv) -> bool what it hides: on all pairs of the first positions, where a
    prefix would show, and far out on many distances, those next to its edge included.

    Raises:
        UnsupportedModelError: it is neither causal nor a causal window, which is all that vLLM's attention can do.
    """
    ask = _asker(function)
    if ask(_FAR, _FAR + 1) or not ask(_FAR, _FAR):
        raise UnsupportedModelError("A mask is not causal.", found="a token sees the one after it, or not itself")
    window = None if ask(_FAR, 0) else _edge(ask)
    _check_near(ask, window)
    for q in (_FAR, _FAR + 1, _FAR + 12345):
        _check_row(ask, q, window)
    return MaskWindow(window)


Asker = Callable[[Any, Any], torch.Tensor]


def _asker(function: Callable[..., Any]) -> Asker:
    """`function` over index tensors that broadcast, for the first sequence and head."""
    zero = torch.tensor(0)

    def ask(q: Any, kv: Any) -> torch.Tensor:
        q, kv = torch.broadcast_tensors(torch.as_tensor(q), torch.as_tensor(kv))  # type: ignore[no-untyped-call]
        try:
            seen = torch.as_tensor(function(zero, zero, q, kv)).expand(q.shape)
        except RuntimeError:  # it branches on its arguments, and so takes one pair at a time
            pairs = zip(q.flatten(), kv.flatten(), strict=True)
            seen = torch.tensor([bool(function(zero, zero, a, b)) for a, b in pairs]).view(q.shape)
        return seen

    return ask


def _edge(ask: Asker) -> int:
    """The distance at which a token far out stops seeing, if there is one such distance."""
    low, high = 0, _FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(_FAR, _FAR - middle) else (low, middle)
    return high


def _check_near(ask: Asker, window: int | None) -> None:
    q, kv = torch.arange(_NEAR)[:, None], torch.arange(_NEAR)[None, :]
    wanted = (kv <= q) & (q - kv < (window or _FAR))
    seen = ask(q, kv)
    if not torch.equal(seen, wanted):
        at = (seen != wanted).nonzero()[0].tolist()
        found = f"token {at[0]} {'sees' if seen[at[0], at[1]] else 'does not see'} token {at[1]}"
        raise UnsupportedModelError("A mask is neither causal nor a sliding window.", found=found)


def _check_row(ask: Asker, q: int, window: int | None) -> None:
    edge = window or 0
    distances = {*range(-2, 8192), *range(8192, q, 997), *(1 << n for n in range(21)), *range(edge - 99, edge + 99), q}
    kv = torch.tensor(sorted(q - d for d in distances if d <= q))
    wanted = (kv <= q) & (q - kv < (window or 2 * _FAR))
    seen = ask(q, kv)
    if not torch.equal(seen, wanted):
        distance = q - int(kv[seen != wanted][-1])
        verb = "does not see" if 0 <= distance < (window or q) else "sees"
        raise UnsupportedModelError(
            "A mask has holes, or reaches further for some tokens than for others.",
            found=f"token {q} {verb} the one {distance} before it",
        )


_windows: dict[int, tuple[torch.Tensor, MaskWindow | str]] = {}


def _tagged_mask(
    *args: Any, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
) -> torch.Tensor:
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    try:
        _windows[id(mask)] = (mask, mask_window(mask_function))
    except UnsupportedModelError as error:
        _windows[id(mask)] = (mask, str(error))
    return mask


@contextmanager
def _masks_that_answer() -> Iterator[None]:
    """While observing, masks are tags that know their window.

    Position ids are not searched for packed sequences meanwhile: that reads values, and meta tensors have none.
    """
    search = masking_utils.find_packed_sequence_indices
    ALL_MASK_ATTENTION_FUNCTIONS.register("tfbackend", _tagged_mask)
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop("tfbackend", None)
        _windows.clear()


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Swap real buffers for meta ones, so that they mix with meta activations; the real ones come back."""
    kept = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None and not b.is_meta]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.to("meta")
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


def observe(base: nn.Module) -> Observation:
    """Run the base model once over `TOKENS` meta tokens, as the engine will call it: flat positions, no cache."""
    seen = Observation()
    paths = {id(module): path for path, module in base.named_modules()}

    def record(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        **keywords: Any,
    ) -> torch.Tensor:
        window, problem = _read_mask(mask, module, keywords.get("is_causal"))
        call = AttentionCall(query.shape, key.shape, value.shape, window, problem, keywords)
        seen.attention.setdefault(paths.get(id(module), "?"), []).append(call)
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))

    with torch.no_grad(), buffers_on_meta(base), _masks_that_answer(), answering(record), _calls_into(seen, paths):
        try:
            base(**model_inputs(base, torch.device("meta")))
        except RUN_ERRORS as error:
            seen.problem = f"{type(error).__name__}: {error}"
    return seen


def _read_mask(mask: Any, module: nn.Module, is_causal: Any) -> tuple[MaskWindow | None, str]:
    if mask is None:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        return (MaskWindow(None), "") if causal is True else (None, "it has no mask and does not say that it is causal")
    tagged = _windows.get(id(mask))
    if tagged is None:
        return None, "the mask was computed by the model itself and cannot be read"
    return (None, tagged[1]) if isinstance(tagged[1], str) else (tagged[1], "")


def model_inputs(base: nn.Module, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of one forward over `TOKENS` tokens: those of our engine call that this class takes."""
    ids = torch.zeros((1, TOKENS), dtype=torch.long, device=device)
    positions = torch.arange(TOKENS, device=device)[None]
    return {"input_ids": ids} | call_keywords(base, positions)


def call_keywords(base: nn.Module, positions: torch.Tensor) -> dict[str, Any]:
    """The keywords that the engine's call and the meta run share: positions [1, tokens], no cache.

    `use_cache` goes only to classes that name it or take any keyword.
    """
    parameters = inspect.signature(inspect.unwrap(type(base).forward)).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    keywords: dict[str, Any] = {}
    if "position_ids" in parameters or open_ended:
        keywords["position_ids"] = positions
    if "use_cache" in parameters or open_ended:
        keywords["use_cache"] = False
    return keywords


@contextmanager
def _calls_into(seen: Observation, paths: dict[int, str]) -> Iterator[None]:
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is not None:
            seen.calls.setdefault(path, []).append((args, kwargs))
        output = call_on_meta(original, module, args, kwargs)
        if path is not None:
            seen.outputs[path] = output
            _note_made(seen, path, module, output)
        return output

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def _note_made(seen: Observation, path: str, module: nn.Module, output: Any) -> None:
    if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
        return
    seen.modules[path] = module
    call = len(seen.calls[path]) - 1
    for number, leaf in enumerate(tree_leaves(output)):
        if isinstance(leaf, torch.Tensor):
            seen.made[id(leaf)] = Made(leaf, path, number, call)


def rescales(module: nn.Module) -> bool:
    """Whether a rotary embedding recomputes its frequencies from the positions of each call."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    if not any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
        return False
    return inspect.unwrap(type(module).forward) is not type(module).forward


def call_on_meta(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a module on meta tensors; a rotary embedding that would look at position values is spared the look."""
    if rescales(module):
        return inspect.unwrap(type(module).forward)(module, *args, **kwargs)
    return original(module, *args, **kwargs)
