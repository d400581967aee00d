"""Attention that is given a bias for each query and key: where that comes to a table for each token, it is given that.

    bias = self.relative(x, queries, keys)                   [1, heads, tokens, tokens]
    attention_interface(self, q, k, v, mask, bias=bias)
                    ->
    def forward(self, x, queries, keys):
        queries, keys = tfb_latest_place(queries, 16)        # the module gives [1, heads, tokens, 16]

An engine's tokens are of many requests, so nobody can give it a bias of each with each; what a token adds to the score
of a key that many tokens back is its own. Only the module that makes the bias is told other positions, its code stays.
What the model does with the bias on the way to attention it then does with the table. That this comes to the same is
tried out on the whole module that attends, as Transformers runs it and with the reference of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.fusers.attention import spec_of
from tfbackend.graph.alike import representatives
from tfbackend.graph.distances import DistanceError, DistanceTable, find_table, makes_bias
from tfbackend.graph.interface import RUN_ERRORS, answering
from tfbackend.graph.kinds import tampered
from tfbackend.graph.masks import MaskWindow
from tfbackend.graph.observe import TOKENS, AttentionCall, Observation, TableSize, Unread, observe
from tfbackend.graph.trial import apart, copied, materialise, plain_float32, random_inputs
from tfbackend.meta import INTERFACE_NAME
from tfbackend.serving import ServingSpec
from tfbackend.source.edits import Edit, apply_edits
from tfbackend.source.forward import SourceError, forward_source, generate_class, scratch

_TOLERANCE = 2e-5
"""Largest difference of what attends, relative to its largest value."""
_SCORES = 1 << 24
"""Scores over all heads of a trial."""


@dataclass(frozen=True)
class Tabled:
    """What was done.

    Attributes:
        forwards: path of a module that makes a bias -> its text.
        keywords: path of attention -> the keyword in which it is given tables.
        problems: path of attention -> (keyword, why it is given a bias of each token with each).
    """

    forwards: dict[str, str] = field(default_factory=dict)
    keywords: dict[str, str] = field(default_factory=dict)
    problems: dict[str, tuple[str, str]] = field(default_factory=dict)

    def read(self, seen: Observation) -> Observation:
        """A run of the model as it is now, with what is known of the biases that its attention is given."""
        attention = dict(seen.attention)
        for path, keyword in self.keywords.items():
            attention[path] = [_with(call, keyword, _size(call.keywords[keyword])) for call in attention[path]]
        for path, (keyword, why) in self.problems.items():
            attention[path] = [_with(call, keyword, Unread(why)) for call in attention[path]]
        return replace(seen, attention=attention)


@contextmanager
def biases_by_distance(
    base: nn.Module, seen: Observation, serving: ServingSpec, directory: Path | None = None
) -> Iterator[Tabled]:
    """While entered, modules of `base` that make a bias by distance make tables instead.

    Args:
        seen: a run of `base` as it is.
        directory: where the edited classes are written.
    """
    directory = directory or scratch()
    biased = {path: keyword for path in seen.attention if (keyword := _biased(seen, path))}
    done = _Tabling(base, seen, serving, directory).run(biased) if biased else Tabled()
    classes = {path: type(base.get_submodule(path)) for path in done.forwards}
    try:
        for path, text in done.forwards.items():
            module = base.get_submodule(path)
            module.__class__ = generate_class(type(module), text, directory)
        yield done
    finally:
        for path, cls in classes.items():
            base.get_submodule(path).__class__ = cls


def _biased(seen: Observation, path: str) -> str:
    """The first keyword in which a call of the interface gives a bias for each query and key; "" for none."""
    call = seen.attention[path][0]
    shapes = [(1, heads, TOKENS, TOKENS) for heads in (1, call.query[1])]
    given = {k: x for k, x in call.keywords.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return next((keyword for keyword, x in given.items() if tuple(x.shape) in shapes), "")


def _with(call: AttentionCall, keyword: str, value: Any) -> AttentionCall:
    return replace(call, keywords=call.keywords | {keyword: value})


def _size(table: torch.Tensor) -> TableSize:
    return TableSize(*table.shape[1:])


class _Tabling:
    """Finds the modules, edits them, and tries them out."""

    def __init__(self, base: nn.Module, seen: Observation, serving: ServingSpec, directory: Path) -> None:
        self.base, self.seen, self.directory = base, seen, directory
        self.longest = max(serving.max_model_len, 2 * TOKENS)
        self.longer: dict[int, Observation] = {}

    def run(self, biased: dict[str, str]) -> Tabled:
        done, made = Tabled(), dict[str, tuple[str, str]]()
        speakers = representatives(self.base, biased, self.seen)
        for path, keyword in biased.items():
            try:
                if speakers[path] not in made and speakers[path] not in done.problems:
                    made[path] = self._read(path, keyword)
            except (DistanceError, SourceError) as error:
                done.problems[path] = keyword, str(error)
            except RUN_ERRORS as error:
                done.problems[path] = keyword, f"it does not run by itself: {type(error).__name__}: {error}"
            if speakers[path] in made:
                maker, text = made[speakers[path]]
                done.forwards[f"{path}.{maker}"], done.keywords[path] = text, keyword
            else:
                done.problems[path] = done.problems[speakers[path]]
        return done

    def _read(self, path: str, keyword: str) -> tuple[str, str]:
        """(path of the module that makes the bias, from the one that attends; its text)."""
        if len(self.seen.attention[path]) != 1 or len(self.seen.calls.get(path, ())) != 1:
            raise DistanceError("it attends several times in one forward")
        shape, problem = self.seen.attention[path][0].keywords[keyword].shape, "no module of its own makes it"
        for name in self._makers(path, shape):
            try:
                with torch.no_grad(), plain_float32():
                    call = self.seen.calls[f"{path}.{name}"][0]
                    table = find_table(self.base.get_submodule(f"{path}.{name}"), call, self.longest)
                    text = _text(type(self.base.get_submodule(f"{path}.{name}")), table)
                    self._try_out(path, name, keyword, text, table.extent)
                return name, text
            except (DistanceError, SourceError) as error:
                problem = str(error)
        raise DistanceError(problem)

    def _makers(self, path: str, shape: torch.Size) -> list[str]:
        """Paths in the module that attends of those that return a bias once."""
        module = self.base.get_submodule(path)
        inside = {f"{path}.{name}": name for name, child in module.named_modules() if name and not tampered(child)}
        once = [full for full in inside if len(self.seen.calls.get(full, ())) == 1]
        return [inside[full] for full in once if makes_bias(self.seen.outputs[full], shape)]

    def _try_out(self, path: str, maker: str, keyword: str, text: str, extent: int) -> None:
        """Run what attends as it is, in Transformers' eager attention, and with tables and the layer's reference.

        Over few tokens, and over some more than the bias reaches, as far as memory lets one look.

        Raises:
            DistanceError: the two differ.
        """
        heads = self.seen.attention[path][0].query[1]
        longer = min(extent + TOKENS, self.longest, int((_SCORES / heads) ** 0.5))
        for tokens in dict.fromkeys((TOKENS, longer)):
            seen = self.seen if tokens == TOKENS else self.longer.get(tokens) or observe(self.base, tokens)
            self.longer[tokens] = seen
            problem = self._apart(seen, path, maker, keyword, text)
            if problem:
                raise DistanceError(problem)

    def _apart(self, seen: Observation, path: str, maker: str, keyword: str, text: str) -> str:
        generator = torch.Generator().manual_seed(37)
        module, call = self.base.get_submodule(path), seen.attention[path][0]
        twin: Any = materialise(module, generator)
        args, kwargs = _inputs(seen, path, module, generator)
        twin.config._attn_implementation = "eager"
        before = _first_leaf(twin.forward(*copied(args), **copied(kwargs)))
        part = twin.get_submodule(maker)
        part.__class__ = generate_class(type(part), text, self.directory)
        twin.config._attn_implementation = INTERFACE_NAME

        def attend(_: nn.Module, q: Any, k: Any, v: Any, mask: Any = None, **keywords: Any) -> Any:
            spec = spec_of(_with(call, keyword, _size(keywords[keyword])))
            return spec.reference()(q, k, v, keywords.get("s_aux"), distance_bias=keywords[keyword])

        with answering(attend):
            after = _first_leaf(twin.forward(*copied(args), **copied(kwargs)))
        worst = apart(before, after)
        return "" if worst <= _TOLERANCE else f"with a table in place of it the outputs differ by {worst:.2g}"


def _text(cls: type[nn.Module], table: DistanceTable) -> str:
    """The forward of a module that makes a bias, with a statement before all others."""
    source = forward_source(cls)
    first = source.body[0]
    start, _ = source.offsets(first)
    names = f"{table.queries}, {table.keys}"
    statement = f"{names} = tfb_latest_place({table.queries}, {table.extent})\n{' ' * first.col_offset}"
    return apply_edits(source.text, [Edit(start, start, statement, "distances")])


@dataclass(frozen=True)
class _Kept:
    """Holds a mask while all other tensors of a call are drawn at random."""

    mask: torch.Tensor


def _inputs(seen: Observation, path: str, module: nn.Module, generator: torch.Generator) -> Any:
    """Random arguments for a module that attends, with the masks that it is given."""

    def keep(x: Any) -> Any:
        known = seen.masks.get(id(x))
        if known is None:
            return x
        tensor, window = known
        if not isinstance(window, MaskWindow):
            raise DistanceError(window)
        places = torch.arange(tensor.shape[-1])
        hidden = ~window.sees(places[:, None], places[None, :])
        return _Kept(torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None])

    call = tree_map(keep, seen.calls[path][0])
    drawn = random_inputs(call, module, generator, observation=seen)
    return tree_map(lambda x: x.mask if isinstance(x, _Kept) else x, drawn)


def _first_leaf(output: Any) -> torch.Tensor:
    return next(x for x in tree_leaves(output) if isinstance(x, torch.Tensor))
