"""One run of the whole model on meta tensors: what every module is called with, and what its attention is asked for.

Shapes, keyword arguments, scales and windows are read from the calls the model really makes, so that nothing has to be
guessed from the names of config fields. Masks are asked what they hide (see `mask_window`), not what they are called.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tfbackend.graph.counted import Count, CountedTokens
from tfbackend.graph.interface import (
    RUN_ERRORS,
    answering,
    as_it_was,
    buffers_on_meta,
    call_on_meta,
    calls_made_by,
    passing_experts,
    positions_given,
    unattended,
)
from tfbackend.graph.masks import Masks, MaskWindow, masks_that_answer, read_mask
from tfbackend.graph.query import SDPA, SOFTMAX, is_in_place
from tfbackend.graph.repeats import Repeats, mark, repeat, since
from tfbackend.graph.routed import reads_values
from tfbackend.graph.settling import Settling, settling

if TYPE_CHECKING:
    from tfbackend.graph.selection import Selection
    from tfbackend.graph.statepass import Keeping

TOKENS = 7
"""Tokens of the meta run. Prime and small: no size of a real model is 7, so a 7 in a graph is the token axis."""


class OwnParameter(NamedTuple):
    """A parameter of the module that calls, by its name there: the module's repeats have one of that name too."""

    name: str
    shape: torch.Size


class TableSize(NamedTuple):
    """A keyword of a call that gives each of its tokens a table of biases, by head and distance, by the sizes of it."""

    heads: int
    tokens: int
    extent: int


class Unread(NamedTuple):
    """A keyword of a call that has a bias for each query and key, and why it is no such table."""

    why: str


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention interface: shapes [1, heads, tokens, dim], the mask's window, and the keywords, with
    the module's own parameters as OwnParameter."""

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
        reads_values: whether it ended where the model asked for the values of a tensor, which on meta has none.
        counting: paths of modules whose query, key or value depends on a count of tokens that the model made; "" where
        what the model gives does.
        counts: where it made those.
        inline: module path -> how often it weighs tokens against tokens by itself, beside the attention interface.
        masks: what the masks of the run hide.
        looped: classes of modules that go through their experts by themselves, and were answered for.
        operations: how many there were.
        returned: module path -> how many of them there had been when it returned.
        read: id of a tensor -> the number of the last operation that took it.
        fewest: the least number of tokens, of all those of the run, that anything picked with a top-k; None where
            nothing did.
        selection: which keys attention is told to attend to, or why that is not known; None where it is told of none.
            An observed run does not say, `graph.selection` does.
        idle: paths of modules that nothing that is asked for follows from. An observed run does not say.
        settling: methods by which the model changes its own weights in its first forward.
        keeping: what a run saw in which the model was to keep state; None where it was not asked to.
    """

    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, list[AttentionCall]] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    problem: str = ""
    reads_values: bool = False
    counting: list[str] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    inline: dict[str, int] = field(default_factory=dict)
    masks: Masks = field(default_factory=dict)
    looped: set[type[nn.Module]] = field(default_factory=set)
    operations: int = 0
    returned: dict[str, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    fewest: int | None = None
    selection: Selection | str | None = None
    idle: frozenset[str] = frozenset()
    settling: list[Settling] = field(default_factory=list)
    keeping: Keeping | None = None

    def unread(self, path: str) -> list[bool] | None:
        """For each element of the tuple that the one call of a module returned, whether nothing was done with it."""
        output = self.outputs.get(path)
        if len(self.calls.get(path, ())) != 1 or not isinstance(output, tuple) or path not in self.returned:
            return None
        return [isinstance(x, torch.Tensor) and self.read.get(id(x), 0) <= self.returned[path] for x in output]

    def note_counts(self, path: str, counted: CountedTokens, values: Iterable[torch.Tensor]) -> None:
        """Note where what `values` of the module at `path` were computed from was counted."""
        if counts := [count for x in values for count in counted.behind(x)]:
            self.counting.append(path)
            self.counts += [count for count in dict.fromkeys(counts) if count not in self.counts]


def observe(base: nn.Module, tokens: int = TOKENS) -> Observation:
    """Run the base model once over meta tokens, as the engine will call it: flat positions, no cache."""
    seen = Observation()
    paths = {id(module): path for path, module in base.named_modules()}
    running: list[tuple[str, nn.Module]] = []
    counted: CountedTokens

    def record(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        **keywords: Any,
    ) -> torch.Tensor:
        window, problem = read_mask(mask, module, keywords.get("is_causal"))
        own = {id(p): OwnParameter(name, p.shape) for name, p in module.named_parameters(recurse=False)}
        keywords = {name: own.get(id(given), given) for name, given in keywords.items()}
        call = AttentionCall(query.shape, key.shape, value.shape, window, problem, keywords)
        path = paths.get(id(module), "?")
        seen.attention.setdefault(path, []).append(call)
        seen.note_counts(path, counted, (query, key, value, *rows_of(keywords, tokens)))
        return unattended(module, query, key, value)

    with (
        torch.no_grad(),
        buffers_on_meta(base),
        as_it_was(base),
        masks_that_answer() as seen.masks,
        answering(record),
        _calls_into(seen, base, running),
    ):
        inputs = model_inputs(base, torch.device("meta"), tokens)
        counted = CountedTokens(tokens, running, (*base.parameters(), *base.buffers()))
        try:
            with positions_given(_row_of(inputs)), counted, _Operations(seen, running, tokens, base):
                output = base(**inputs)
            if not seen.inline:  # a bias that is still there makes all depend on a count, and goes with its attention
                seen.note_counts("", counted, [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)][:1])
        except RUN_ERRORS as error:
            seen.problem = f"{type(error).__name__}: {error}{_place_of(error)}"
            seen.reads_values = reads_values(error)
    return seen


def rows_of(keywords: dict[str, Any], tokens: int) -> list[torch.Tensor]:
    """What a call of the attention interface gives with a row for each token: biases [1, heads, tokens, any]."""
    given = [x for x in keywords.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return [x for x in given if x.dim() == 4 and x.shape[-2] == tokens]


def _row_of(inputs: dict[str, Any]) -> torch.Tensor:
    """Positions [tokens] of a call, as a tensor that no model has counted."""
    return torch.zeros_like(inputs["input_ids"][0])


def _place_of(error: BaseException) -> str:
    """ " (file.py:line)" of the innermost frame that is neither torch's nor ours, "" where there is none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if owner not in ("torch", "tfbackend"):
            place = f" ({Path(frame.f_code.co_filename).name}:{line})"
    return place


def needs_masks(base: nn.Module) -> bool:
    """Whether the model fails where Transformers makes it no masks, which an engine has no use for."""
    with torch.no_grad(), buffers_on_meta(base), answering(unattended), passing_experts():
        try:
            base(**model_inputs(base, torch.device("meta")))
        except RUN_ERRORS:
            return True
    return False


def model_inputs(base: nn.Module, device: torch.device, tokens: int = TOKENS) -> dict[str, Any]:
    """Keyword arguments of one forward over `tokens` tokens: those of our engine call that this class takes."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device=device)
    positions = torch.arange(tokens, device=device)[None]
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


class _Operations(TorchFunctionMode):
    """Notes what operations take, which module, the innermost of `running`, weighs tokens against tokens, and how many
    tokens are picked of all."""

    def __init__(self, seen: Observation, running: list[tuple[str, nn.Module]], tokens: int, base: nn.Module) -> None:
        super().__init__()
        self.seen, self.running, self.tokens = seen, running, tokens
        self.weights = {id(parameter) for parameter in base.parameters()}
        self.paths = {id(module): path for path, module in base.named_modules()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, note what it took, and whether it is a softmax over the tokens, torch's attention or a top-k."""
        self.seen.operations += 1
        for taken in tree_leaves((args, kwargs)):
            if isinstance(taken, torch.Tensor):
                self.seen.read[id(taken)] = self.seen.operations
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if is_in_place(name) and args and id(args[0]) in self.weights:
            found = settling(self.paths)
            self.seen.settling += [found] if found not in self.seen.settling else []
        if (name in SOFTMAX and tuple(result.shape[-2:]) == (self.tokens, self.tokens)) or name == SDPA:
            path = next((path for path, module in reversed(self.running) if type(module) is not nn.Softmax), "")
            self.seen.inline[path] = self.seen.inline.get(path, 0) + 1
        elif name == "topk":
            given = (args[0] if args else (kwargs or {})["input"]).shape
            picked = [new for old, new in zip(given, result[0].shape, strict=True) if old == self.tokens]
            self.seen.fewest = min([*picked, *([] if self.seen.fewest is None else [self.seen.fewest])], default=None)
        return result


def _calls_into(
    seen: Observation, base: nn.Module, running: list[tuple[str, nn.Module]]
) -> AbstractContextManager[None]:
    repeats, paths = Repeats(base), {id(module): path for path, module in base.named_modules()}

    def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None:
            return call_on_meta(original, module, args, kwargs)
        first, key = repeats.before(path, module, args, kwargs)
        ran = None
        if first is not None:
            output = repeat(seen, first, path)
        else:
            marks = mark(seen, path) if key is not None else None
            seen.calls.setdefault(path, []).append((args, kwargs))
            running.append((path, module))
            try:
                output = call_on_meta(original, module, args, kwargs, seen.looped)
            finally:
                running.pop()
            _note_made(seen, path, module, output)
            seen.returned[path] = seen.operations
            ran = since(seen, path, marks, output) if marks is not None else None
        seen.outputs[path] = output
        repeats.after(path, key, (args, kwargs), output, ran)
        return output

    return calls_made_by(call)


def _note_made(seen: Observation, path: str, module: nn.Module, output: Any) -> None:
    if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
        return
    seen.modules[path] = module
    call = len(seen.calls[path]) - 1
    for number, leaf in enumerate(tree_leaves(output)):
        if isinstance(leaf, torch.Tensor):
            seen.made[id(leaf)] = Made(leaf, path, number, call)
