"""A model that numbers its tokens itself is made to use the engine's positions.

    places = torch.arange(x.shape[1])      ->      places = tfb_token_positions(self, torch.arange(x.shape[1]), 0)
    x = x + self.places[:, : x.shape[1]]   ->      x = x + tfb_token_rows(self, self.places, 1, 0, ...)

Where it counts is seen in the run on meta: every count that a query, key or value is computed from. While planning, the
modules are of the edited classes; afterwards they are what they were, and the plan has the texts. That each token then
follows its own position, and nothing else that there is to count, is checked on numbers.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.graph.counted import Count
from tfbackend.graph.interface import RUN_ERRORS, answering, positions_given
from tfbackend.graph.kinds import tampered
from tfbackend.graph.observe import TOKENS, Observation, call_keywords, needs_masks, observe, rows_of
from tfbackend.graph.statecache import kept_by, run_alone
from tfbackend.graph.stateful import find_state
from tfbackend.graph.trial import apart, materialise, plain_float32
from tfbackend.meta import INTERFACE_NAME, WITH_MASKS
from tfbackend.source.edits import Edit, apply_edits
from tfbackend.source.forward import ForwardSource, SourceError, function_source, generate_class, scratch
from tfbackend.source.supers import explicit_supers
from tfbackend.statespec import StateSpec

_ROUNDS = 4
"""How often a model is looked at anew: code that another edit let run may count too."""
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Numbered:
    """What was done about a model's own numbering.

    Attributes:
        observation: a run of the model as it is now.
        methods: (module path, method name) -> its text.
        problem: why the model still numbers tokens itself; "" where it does not.
    """

    observation: Observation
    methods: dict[tuple[str, str], str] = field(default_factory=dict)
    problem: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that are told the positions."""
        return tuple(dict.fromkeys(path for path, _ in self.methods))


@contextmanager
def following_positions(
    base: nn.Module, seen: Observation, directory: Path | None = None, besides: Collection[str] = ()
) -> Iterator[Numbered]:
    """While entered, modules of `base` that count tokens ask for positions instead.

    Args:
        seen: a run of `base` as it is.
        directory: where the edited classes are written.
        besides: paths of modules that run one request at a time, and may count its tokens.
    """
    classes = {path: type(module) for path, module in base.named_modules()}
    try:
        counted = bool(seen.counting and _counts(seen, besides))
        yield _follow(base, seen, directory or scratch(), besides) if counted else Numbered(seen)
    finally:
        for path, cls in classes.items():
            module = base.get_submodule(path)
            if type(module) is not cls:
                module.__class__ = cls


def _counts(seen: Observation, besides: Collection[str]) -> list[Count]:
    return [count for count in seen.counts if not any(f"{count.path}.".startswith(f"{path}.") for path in besides)]


def _follow(base: nn.Module, seen: Observation, directory: Path, besides: Collection[str]) -> Numbered:
    first, methods = seen, dict[tuple[str, str], str]()
    for _ in range(_ROUNDS):
        try:
            methods |= _edit_all(base, _counts(seen, besides), directory)
        except SourceError as error:
            return Numbered(first, problem=str(error))
        seen = observe(base)
        if seen.problem:
            return Numbered(first, problem=seen.problem)
        if not (seen.counting and _counts(seen, besides)):
            return Numbered(seen, methods, _disproof(base, seen))
    return Numbered(first, problem=f"it counts them again, {_counts(seen, besides)[0].place}")


def _edit_all(base: nn.Module, counts: Sequence[Count], directory: Path) -> dict[tuple[str, str], str]:
    """Give every module of a class that counts the edited class; the texts by path and method.

    Raises:
        SourceError: a count cannot be replaced.
    """
    edits: dict[tuple[type[nn.Module], str], list[Edit]] = {}
    for count in counts:
        module = base.get_submodule(count.path)
        edits.setdefault((type(module), count.method), []).append(_edit(module, count))
    texts: dict[tuple[str, str], str] = {}
    for (cls, method), found in edits.items():
        source = _source(cls, method)
        text = apply_edits(source.text, [*dict.fromkeys(found), *explicit_supers(source)])
        made = generate_class(cls, text, directory)
        for path, module in base.named_modules():
            if type(module) is cls:
                module.__class__ = made
                texts[path, method] = text
    return texts


def _source(cls: type[nn.Module], method: str) -> ForwardSource:
    return function_source(inspect.unwrap(getattr(cls, method)), with_super=True)


def _edit(module: nn.Module, count: Count) -> Edit:
    """The edit that puts positions in the place of one count."""
    if count.start is None or not count.method:
        what = "in another way than 0, 1, 2 ..." if count.start is None else "in no method of the module"
        raise SourceError(f"it counts them {what} ({count.place})")
    if problem := tampered(module):
        raise SourceError(f"{problem} ({count.place})")
    source = _source(type(module), count.method)
    node = source.expression(count.span)
    if count.axis is None:
        made = f"tfb_token_positions({source.me}, {source.segment(node)}, {count.start})"
    else:
        if not isinstance(node, ast.Subscript) or not _is_plain(node.value):
            raise SourceError(f"it takes rows of what it has just made ({count.place})")
        made = f"tfb_token_rows({source.me}, {source.segment(node.value)}, {count.axis}, {count.start}, "
        made += f"{source.segment(node)})"
    return Edit(*source.offsets(node), made, "positions")


def _is_plain(node: ast.expr) -> bool:
    """Whether the expression is a name or an attribute, which may be read twice."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


_SHUFFLED = (5, 6, 7, 0, 1, 2 * TOKENS - 1, 3)
"""Positions of a call of `TOKENS` tokens, as of three requests in one batch."""


def _disproof(base: nn.Module, seen: Observation) -> str:
    """Run the model over twice as many tokens as it would be, and over `_SHUFFLED`: each token of the second run must
    be what the token at its position was in the first. What differs, or "".

    All tokens are the same, each attends to itself alone, and mixers that keep state are given each as a request of its
    own, so that they differ by their numbers only.
    """
    with torch.no_grad(), plain_float32():
        try:
            twin: Any = materialise(base, torch.Generator().manual_seed(23))
            _part_tokens(twin, base, seen)
            twin.config._attn_implementation = WITH_MASKS if needs_masks(base) else INTERFACE_NAME
            long, short = torch.arange(2 * TOKENS), torch.tensor(_SHUFFLED)
            wanted = _values(twin, long)
            with positions_given(short):
                got = _values(twin, short)
        except RUN_ERRORS as error:
            return f"it does not run on other positions: {type(error).__name__}: {error}"
    if len(wanted) != len(got):
        return f"it attends {len(got)} times where it was {len(wanted)}"
    for (name, one), (_, other) in zip(wanted, got, strict=True):
        one = one.index_select(one.dim() - 2, short) if one.shape[-2] == len(long) else one
        if not apart(one, other) <= _TOLERANCE:
            return f"{name} of a token does not follow from its position alone"
    return ""


def _part_tokens(twin: nn.Module, base: nn.Module, seen: Observation) -> None:
    """Have mixers of `twin` that ask Transformers' cache for state take each token for a request."""
    for path, calls in seen.calls.items() if kept_by(getattr(base, "config", None)) else ():
        spec = find_state(base.get_submodule(path), calls)
        if isinstance(spec, StateSpec):
            mixer = twin.get_submodule(path)
            vars(mixer)["forward"] = partial(_each_alone, mixer, spec)


def _each_alone(mixer: nn.Module, spec: StateSpec, *args: Any, **kwargs: Any) -> Any:
    """What a mixer returns for [1, tokens, width] where no token has one before it."""
    forward = inspect.unwrap(type(mixer).forward)
    hidden = inspect.signature(forward).bind(mixer, *args, **kwargs).arguments[spec.hidden]
    made = run_alone(forward, mixer, spec, hidden.transpose(0, 1))
    return tree_map(lambda x: x.transpose(0, 1) if isinstance(x, torch.Tensor) else x, made)


def _values(twin: nn.Module, positions: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(name, value [..., tokens, dim]) of every query, key and value of a run, and of what the run gives."""
    values: list[tuple[str, torch.Tensor]] = []

    def attend(module: nn.Module, q: Any, k: Any, v: Any, mask: Any = None, **keywords: Any) -> Any:
        values.extend(zip(("query", "key", "value"), (q, k, v), strict=True))
        values.extend(("bias", rows) for rows in rows_of(keywords, len(positions)))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)

    with answering(attend):
        ids = torch.ones((1, len(positions)), dtype=torch.long)
        output = twin(input_ids=ids, **call_keywords(twin, positions[None]))
    return [*values, ("what it gives", next(x for x in tree_leaves(output) if isinstance(x, torch.Tensor)))]
