"""Attention that a model writes out by itself is put behind the attention interface, where fusers look for it.

    scores = query @ key.transpose(-1, -2) * self.scale + mask
    context = scores.softmax(-1) @ value                      ->     context = inline_attention(self, query, key, value)

Scale, window and ALiBi slopes are measured on real numbers, the text is cut, and the cut module is run beside the
original. While planning, the modules are of the cut classes; afterwards they are what they were, and the plan has the
texts. What cannot be put behind the interface is a reason to refuse the model, with the place. Modules that hand the
interface a mask of their own making go the same way, see biased.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.biased import BiasReader, longest_whole, with_own_masks
from tfbackend.graph.alike import representatives
from tfbackend.graph.inline import (
    FRAMED,
    InlineAttention,
    InlineError,
    Measured,
    check_both_ways,
    check_rises,
    find_inline,
    layouts,
    measure,
    shared_heads,
)
from tfbackend.graph.interface import RUN_ERRORS, InlineNumbers, answering
from tfbackend.graph.kinds import tampered
from tfbackend.graph.masks import MaskWindow
from tfbackend.graph.observe import Observation
from tfbackend.graph.own_masks import combined, given_window, long_rises, own_windows, window_of
from tfbackend.graph.rehearsal import Rehearsal
from tfbackend.graph.tracing import Frame, trace
from tfbackend.graph.trial import apart, copied
from tfbackend.layerspecs import AttentionSpec
from tfbackend.serving import ServingSpec
from tfbackend.source.cut import cut
from tfbackend.source.forward import ForwardSource, SourceError, function_source, generate_class, scratch

_TOLERANCE, _ROUNDED = 2e-5, 2e-2
"""Largest difference of the cut module, relative to the largest value; where the original rounds its bias to bfloat16,
the second."""


_LENGTHS = ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length")
"""How configs call the number of positions that the model has tables for."""


@dataclass(frozen=True)
class Inlined:
    """What was done.

    Attributes:
        methods: module path -> text of the method that was cut, the forward or one that it calls.
        numbers: module path -> what its attention does.
        problems: module path -> why its attention stays where it is.
        masks: likewise for modules that call the interface with a mask that they computed.
        plain: what such masks hide that add nothing to what they do not hide.
    """

    methods: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, InlineNumbers] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    plain: dict[str, MaskWindow] = field(default_factory=dict)


@contextmanager
def behind_interface(
    base: nn.Module, seen: Observation, serving: ServingSpec, directory: Path | None = None
) -> Iterator[Inlined]:
    """While entered, modules of `base` that write attention out call the interface instead, and those that compute a
    mask hand over the bias that it comes to.

    Args:
        seen: a run of `base` as it is.
        directory: where the cut classes are written.
    """
    directory = directory or scratch()
    any_found = seen.inline or with_own_masks(seen)
    done = _Adoption(base, seen, serving, directory).run() if any_found else Inlined()
    classes = {path: type(base.get_submodule(path)) for path in done.methods}
    try:
        for path, text in done.methods.items():
            _become(base.get_submodule(path), text, done.numbers[path], directory)
        yield done
    finally:
        for path, cls in classes.items():
            module = base.get_submodule(path)
            module.__class__ = cls
            vars(module).pop("inline_numbers", None)


def _become(module: nn.Module, text: str, numbers: InlineNumbers, directory: Path) -> None:
    module.__class__ = generate_class(type(module), text, directory)
    vars(module)["inline_numbers"] = numbers


class _Adoption:
    """Finds, measures, cuts and proves."""

    def __init__(self, base: nn.Module, seen: Observation, serving: ServingSpec, directory: Path) -> None:
        self.base, self.seen, self.serving, self.directory = base, seen, serving, directory
        self.done, self.masked = Inlined(), with_own_masks(seen)

    def run(self) -> Inlined:
        """What is to be done with every module that the run saw weighing tokens against tokens, or masking them."""
        paths = [path for path in self.seen.inline if not self._left(path, self._outward_problem(path))]
        paths += self.masked
        speakers = representatives(self.base, paths, self.seen)
        self.rehearsal = Rehearsal(self.base, self.seen, skipped=paths)
        leading = [path for path in paths if speakers[path] == path]
        try:
            if inline := [path for path in leading if path not in self.masked]:
                self._adopt_all(inline)
            self._adopt_masked([path for path in leading if path in self.masked])
            self._prove()
        except RUN_ERRORS as error:
            for path in paths:
                self._left(path, f"it does not run by itself: {type(error).__name__}: {error}")
        done = self.done
        for path, speaker in speakers.items():
            if speaker in done.methods:
                done.methods[path], done.numbers[path] = done.methods[speaker], done.numbers[speaker]
            for problems in (done.problems, done.masks):
                if speaker in problems:
                    problems[path] = problems[speaker]
            if speaker in done.plain:
                done.plain[path] = done.plain[speaker]
        return done

    def _adopt_masked(self, paths: list[str]) -> None:
        """What is to be done with modules that call the interface with a mask that they computed."""
        bound, longest = (longest_whole(self.base), self._longest()) if paths else (None, 0)
        reader = BiasReader(self.rehearsal, bound, longest)
        for path in paths:
            with self._leaving(path):
                if bound is None and (plain := reader.plain(path)) is not None:
                    self.done.plain[path] = plain
                    continue
                self.done.methods[path], self.done.numbers[path] = reader.read(path)

    def _adopt_all(self, paths: list[str]) -> None:
        one, two, masked = (self._look(paths, seed=seed, hiding=seed == 3) for seed in (1, 2, 3))
        measured: dict[str, Measured] = {}
        for path in paths:
            if path not in self.done.problems:
                with self._leaving(path):
                    measured[path] = measure(one[path], two[path])
        self._look_far(measured)
        slopes = {
            path: found.slopes or (0.0,) * one[path].query.shape[1]
            for path, found in measured.items()
            if not bool(one[path].visible.all()) or bool(masked[path].visible.all())
        }
        windows = own_windows(self.rehearsal, slopes, self._longest()) if slopes else {}
        for path, found in measured.items():
            with self._leaving(path):
                self._adopt(path, found, one[path], masked[path], windows.get(path))

    def _look_far(self, measured: dict[str, Measured]) -> None:
        """Check the slopes over a long context: bfloat16 holds the first 256 places exactly and no more."""
        slopes = {path: found.slopes for path, found in measured.items() if found.slopes is not None}
        if slopes:
            for path, (rises, size) in long_rises(self.rehearsal, slopes, self._longest()).items():
                with self._leaving(path):
                    measured[path] = check_rises(measured.pop(path), rises, size)

    @contextmanager
    def _leaving(self, path: str) -> Iterator[None]:
        """Leave the module as it is if what is done meanwhile finds a reason to."""
        try:
            yield
        except (InlineError, SourceError) as error:
            self._left(path, str(error))

    def _longest(self) -> int:
        """The longest context that can come: what the engine accepts, or what the model has positions for."""
        config = getattr(self.base, "config", None)
        lengths = [getattr(config, name, None) for name in _LENGTHS]
        return min([self.serving.max_model_len, *(n for n in lengths if isinstance(n, int))])

    def _left(self, path: str, problem: str) -> bool:
        """Note why a module stays as it is, if there is a reason."""
        if problem:
            (self.done.masks if path in self.masked else self.done.problems).setdefault(path, problem)
            self.done.methods.pop(path, None)
        return bool(problem)

    def _outward_problem(self, path: str) -> str:
        module, times = self.base.get_submodule(path), self.seen.inline[path]
        if times != 1 or len(self.seen.calls.get(path, [])) != 1:
            return f"it weighs tokens against tokens {times} times in one forward"
        if path in self.seen.attention:
            return "it calls the attention interface too"
        if {"attn", "inline_numbers"} & {*dict(module.named_children()), *vars(module)}:
            return "it already has an attribute called attn"
        return tampered(module)

    def _look(self, paths: list[str], *, seed: int, hiding: bool) -> dict[str, InlineAttention]:
        """One draw of each attention."""
        found: dict[str, InlineAttention] = {}

        def visit(module: nn.Module, args: Any, kwargs: Any) -> Any:
            traced, path = trace(module, args, kwargs, framed=FRAMED, real=True), self.rehearsal.paths[id(module)]
            if not traced.complete:
                raise RuntimeError(traced.ended)
            try:
                found[path] = find_inline(traced, module)
            except InlineError as error:
                self._left(path, str(error))
            return tree_map(lambda x: x.meta["val"] if isinstance(x, fx.Node) else x, traced.output)

        self.rehearsal.run(dict.fromkeys(paths, visit), seed=seed, hiding=hiding)
        return found

    def _adopt(
        self, path: str, measured: Measured, one: InlineAttention, masked: InlineAttention, own: int | str | None
    ) -> None:
        if isinstance(own, str):
            raise InlineError(own)
        given = given_window(self.rehearsal, path)
        if given is not None and given.chunk is not None:
            raise InlineError("its mask hides what is not of a token's chunk")
        window = combined(own, given.window if given else None)
        both = given.both if given is not None else bool(masked.visible.all())
        if both:
            check_both_ways(one, measured)
        _check_visible(masked, window, both=both)
        self.done.methods[path] = _cut_text(type(self.base.get_submodule(path)), masked)
        self.done.numbers[path] = InlineNumbers(measured.scale, window, measured.slopes, measured.rounded, both=both)

    def _prove(self) -> None:
        """Run each cut module beside its original, with an attention in plain torch."""

        def visit(module: nn.Module, args: Any, kwargs: Any) -> Any:
            path = self.rehearsal.paths[id(module)]
            twin, numbers = copy.copy(module), self.done.numbers[path]
            _become(twin, self.done.methods[path], numbers, self.directory)
            before = module.forward(*copied(args), **copied(kwargs))
            with answering(_attend):
                after = twin.forward(*copied(args), **copied(kwargs))
            self._left(path, _difference(before, after, _ROUNDED if numbers.rounded else _TOLERANCE))
            return before

        self.rehearsal.run(dict.fromkeys(self.done.methods, visit), seed=4, hiding=True)


def _attend(module: nn.Module, q: Any, k: Any, v: Any, mask: Any = None, **keywords: Any) -> Any:
    numbers: InlineNumbers = keywords["inline"]
    spec = AttentionSpec(q.shape[1], k.shape[1], q.shape[3], v.shape[3], numbers.scale, numbers.window)
    spec = replace(spec, alibi_slopes=numbers.alibi_slopes, key_bias=numbers.key_bias, both=numbers.both)
    attention = spec.reference()
    return attention(q, k, v, key_bias=keywords.get("key_bias"))


def _difference(before: Any, after: Any, tolerance: float) -> str:
    """What is wrong with the cut module; weights that it no longer gives are not."""
    left, right = tree_leaves(before), tree_leaves(after)
    if len(left) != len(right):
        return f"the original gives {len(left)} values, the cut one {len(right)}"
    compared = 0
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, torch.Tensor) or b is None:
            continue
        if not isinstance(b, torch.Tensor) or a.shape != b.shape:
            return "the cut one gives something else"
        worst = apart(a, b)
        if not worst <= tolerance:
            return f"outputs of the cut one differ by {worst:.2g} of the largest value, {tolerance:g} is allowed"
        compared += 1
    return "" if compared else "the cut one gives nothing"


def _check_visible(masked: InlineAttention, window: int | None, *, both: bool) -> None:
    """Whether under the model's own masks the first tokens are hidden as the window says."""
    tokens = masked.visible.shape[-1]
    if both:
        places = torch.arange(tokens)
        if not bool((masked.visible == MaskWindow(window, both=True).sees(places[:, None], places[None, :])).all()):
            raise InlineError("what it hides is no window on both sides")
        return
    wanted = None if window is None or window >= tokens else window
    for head in masked.visible:
        seen = window_of(head)
        if isinstance(seen, str):
            raise InlineError(seen)
        if seen != wanted:
            raise InlineError(f"it shows a window of {seen} where its mask has {wanted}")


def _cut_text(cls: type[nn.Module], found: InlineAttention) -> str:
    """The method of `cls` that holds the whole computation, with an interface call in its place."""
    ends = found.end.meta.get("frames", ())
    starts = {frame.code: frame for frame in found.start.meta.get("frames", ())}
    for frame in ends:
        method = _method_of(cls, frame)
        if method is not None and frame.code in starts:
            source = function_source(method)
            if method.__globals__ is not inspect.unwrap(cls.forward).__globals__:
                raise SourceError(f"{method.__qualname__} is of another file than the forward")
            start, end = source.expression(starts[frame.code].span), source.expression(frame.span)
            if start is end and found.start is not found.end:
                raise SourceError("it is computed in a function outside its class")
            return cut(source, start, end, _call(source, found, frame), "inline attention")
    raise SourceError("it is computed in no method of its class")


def _method_of(cls: type[nn.Module], frame: Frame) -> Any:
    """The plain method of `cls` that runs in `frame`, the forward beneath its decorators; None where there is none."""
    name = frame.code.co_name
    member = inspect.unwrap(cls.forward) if name == "forward" else inspect.getattr_static(cls, name, None)
    return member if isinstance(member, FunctionType) and member.__code__ is frame.code else None


def _call(source: ForwardSource, found: InlineAttention, frame: Frame) -> str:
    shared = shared_heads(found)
    query, key, value = (
        _spelled(x, frame.tensors, count, role)
        for x, count, role in ((found.query, 1, "query"), (found.key, shared, "key"), (found.value, shared, "value"))
    )
    return f"inline_attention({source.me}, {query}, {key}, {value}){found.back}"


def _spelled(wanted: torch.Tensor, tensors: dict[str, torch.Tensor], shared: int, role: str) -> str:
    """An expression for a stack of heads, of which rows of `shared` are alike and one of each is taken."""
    few = wanted[:, ::shared]
    takes: list[tuple[torch.Tensor, str]] = [(few, "")] + ([(wanted, f"[:, ::{shared}]")] if shared > 1 else [])
    for goal, after in takes:
        for name, tensor in tensors.items():
            for layout, x in layouts(tensor):
                if x.shape == goal.shape and torch.equal(x.float(), goal.float()):
                    return f"{name}{layout}{after}"
    raise SourceError(f"no local variable holds its {role}")
