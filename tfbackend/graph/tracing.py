"""torch.fx graphs of a single module's forward, recorded over meta values.

The forward runs for real, on meta tensors and with the arguments that the model was seen to pass; a torch function mode
notes every operation and children are leaves. Control flow therefore takes the branches the engine will take. Each node
keeps its meta value in `node.meta["val"]` and the exact span of the expression that made it in `node.meta["span"]`,
which is what ties a graph to an edit of its source.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.graph.interface import RUN_ERRORS, answering, buffers_on_meta, call_on_meta, calls_made_by, unattended

Span = tuple[int, int, int, int]
"""(first line, first column, last line, last column) in the file, lines from 1, columns in bytes from 0."""


class Frame(NamedTuple):
    """A running function at one moment: its code, the expression it is at, and its local variables that are
    tensors."""

    code: CodeType
    span: Span | None
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """A recorded forward.

    Attributes:
        graph: the operations; `call_module` targets are child paths relative to the traced module.
        complete: whether the forward reached its return. Absence may be read only from a complete graph.
        ended: where and why it did not.
        attention: nodes that are calls of the attention interface.
        mutations: nodes that wrote into a tensor in place.
        output: what the forward returned, tensors replaced by their nodes.
    """

    graph: fx.Graph
    complete: bool
    ended: str
    attention: tuple[fx.Node, ...] = ()
    mutations: tuple[fx.Node, ...] = ()
    output: Any = None

    def calls(self, path: str) -> list[fx.Node]:
        """Nodes that call the child at `path`."""
        return [n for n in self.graph.nodes if n.op == "call_module" and n.target == path]


def attention_call(*args: Any, **kwargs: Any) -> Any:
    """Target of the node that stands for a call of the attention interface; never run."""
    raise AssertionError("a marker, not a function")


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    known: Mapping[str, Any] | None = None,
    *,
    opened: Collection[str] = (),
    framed: frozenset[str] = frozenset(),
    real: bool = False,
) -> Trace:
    """Record `module`'s forward over the given arguments, on meta. Never raises for what the module does.

    It ends early then.

    Args:
        known: a child whose path is in it does not run; the output given there is what its call returns.
        opened: a child whose path is in it is no leaf: its operations are recorded in its place.
        framed: names of operations whose nodes get `node.meta["frames"]`, the Frames around them, innermost first.
        real: the arguments have values, so buffers keep theirs.
    """
    recorder = _Recorder(module, outputs=known or {}, opened=frozenset(opened), framed=framed)
    forward = inspect.unwrap(type(module).forward)
    complete, ended, output = False, "", None
    buffers = nullcontext() if real else buffers_on_meta(module)
    with torch.no_grad(), buffers, recorder.listening(forward.__code__):
        try:
            output = forward(module, *args, **kwargs)
            complete = True
        except RUN_ERRORS as error:
            ended = f"{_place_of(error, forward.__code__)}: {type(error).__name__}: {error}"
    graph = recorder.graph
    nodes = tree_map(lambda x: recorder.node_of(x) if isinstance(x, torch.Tensor) else x, output)
    if complete:
        first = nodes if isinstance(nodes, (fx.Node, tuple, list, dict)) else None
        graph.output(first)
    return Trace(graph, complete, ended, tuple(recorder.attention), tuple(recorder.mutations), nodes)


def _place_of(error: BaseException, code: CodeType) -> str:
    traceback, line = error.__traceback__, code.co_firstlineno
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"{code.co_filename}:{line}"


@dataclass
class _Recorder:
    module: nn.Module
    outputs: Mapping[str, Any] = field(default_factory=dict)
    opened: frozenset[str] = frozenset()
    framed: frozenset[str] = frozenset()
    graph: fx.Graph = field(default_factory=fx.Graph)
    attention: list[fx.Node] = field(default_factory=list)
    mutations: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.active = False
        self.known: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self.paths = {id(child): path for path, child in self.module.named_modules() if path}
        self.state: dict[int, str] = {}
        self.code: CodeType | None = None

    @contextmanager
    def listening(self, code: CodeType) -> Iterator[None]:
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        self.state = {id(tensor): name for name, tensor in state}
        self.code, self.active = code, True
        with _patched_calls(self), answering(self.on_attention), _Mode(self):
            yield
        self.active = False

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        if (entry := self.known.get(id(tensor))) is not None:
            return entry[1]
        name = self.state.get(id(tensor))
        if name is not None:
            node = self.graph.create_node("get_attr", name)
        else:
            node = self.graph.create_node("placeholder", f"input_{len(self.known)}")
        return self.keep(tensor, node)

    def keep(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        node.meta["val"] = tensor
        self.known[id(tensor)] = (tensor, node)
        return node

    def as_nodes(self, value: Any) -> Any:
        def convert(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return self.node_of(x)
            if isinstance(x, torch.Size):
                return tuple(x)
            if isinstance(x, slice):
                return slice(convert(x.start), convert(x.stop), convert(x.step))
            return x if isinstance(x, fx.node.base_types) or x is None or x is ... else repr(x)

        return tree_map(convert, value)

    def add(self, op: str, target: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        node = self.graph.create_node(op, target, tuple(self.as_nodes(args)), dict(self.as_nodes(kwargs)))
        node.meta["span"] = self.span()
        if self.framed and getattr(target, "__name__", "") in self.framed:
            node.meta["frames"] = self.frames()
        if isinstance(result, torch.Tensor):
            self.keep(result, node)
        elif result is not None:
            node.meta["val"] = result
            for index, item in enumerate(tree_leaves(result)):
                if isinstance(item, torch.Tensor) and id(item) not in self.known:
                    picked = self.graph.call_function(_getitem, (node, index))
                    picked.meta["span"] = node.meta["span"]
                    self.keep(item, picked)
        return node

    def span(self) -> Span | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        return None if frame is None else span_of(frame)

    def frames(self) -> tuple[Frame, ...]:
        """Every running function from here out to the forward."""
        frame: FrameType | None = sys._getframe(1)
        found: list[Frame] = []
        while frame is not None:
            tensors = {name: x for name, x in frame.f_locals.items() if isinstance(x, torch.Tensor)}
            found.append(Frame(frame.f_code, span_of(frame), tensors))
            if frame.f_code is self.code:
                return tuple(found)
            frame = frame.f_back
        return ()

    def on_attention(self, module: nn.Module, q: Any, k: Any, v: Any, mask: Any = None, **keywords: Any) -> Any:
        if not self.active:
            return unattended(module, q, k, v)
        self.active = False
        result = unattended(module, q, k, v)
        self.active = True
        node = self.add("call_function", attention_call, (q, k, v), keywords, result)
        if module is self.module:
            self.attention.append(node)
        return result


def frame_of(code: CodeType) -> Frame | None:
    """The innermost running function of this code, as it stands; None where none runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return None
    tensors = {name: x for name, x in frame.f_locals.items() if isinstance(x, torch.Tensor)}
    return Frame(code, span_of(frame), tensors)


def span_of(frame: FrameType) -> Span | None:
    """The expression that a frame is at."""
    line, end_line, column, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return line, column, end_line, end_column


def _getitem(value: Any, index: Any) -> Any:
    return value[index]


class _Mode(TorchFunctionMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self.recorder, kwargs or {}
        if not recorder.active:
            return func(*args, **kwargs)
        recorder.active = False
        try:
            before = [recorder.node_of(x) for x in args[:1] if isinstance(x, torch.Tensor)]
            result = func(*args, **kwargs)
        finally:
            recorder.active = True
        if _is_data(result):
            same = isinstance(result, torch.Tensor) and bool(before) and result is args[0]
            node = recorder.add("call_function", func, args, kwargs, result)
            if (same and not _is_identity(func)) or _says_in_place(func, kwargs):
                recorder.mutations.append(node)
        elif getattr(func, "__name__", "") in ("__setitem__", "__set__") or _says_in_place(func, kwargs):
            recorder.mutations.append(recorder.add("call_function", func, args, kwargs, None))
        return result


def _is_data(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return True
    return isinstance(result, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in result)


def _says_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return kwargs.get("out") is not None or (name.endswith("_") and not name.endswith("__"))


def _is_identity(func: Any) -> bool:
    return getattr(func, "__name__", "") in (
        "contiguous",
        "to",
        "float",
        "type_as",
        "expand",
        "dropout",
        "type",
        "reshape",
    )


def _patched_calls(recorder: _Recorder) -> AbstractContextManager[None]:
    def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = recorder.paths.get(id(module))
        if not recorder.active or path is None or path in recorder.opened:
            return call_on_meta(original, module, args, kwargs)
        recorder.active = False
        try:
            known = path in recorder.outputs
            result = recorder.outputs[path] if known else call_on_meta(original, module, args, kwargs)
        finally:
            recorder.active = True
        recorder.add("call_module", path, args, kwargs, result)
        return result

    return calls_made_by(call)
