"""What a `...ForCausalLM` does between the base model's output and its logits, read from its forward.

The forward is traced with the base model and the head's linear as leaves. What comes before the linear is kept as a
graph of its own, what comes after it too, and both are run as written: a multiplier, a soft cap or a norm cannot be
lost because no list of config fields is consulted.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.observe import TOKENS, Observation
from tfbackend.graph.query import is_within, name_of, through_casts, value_of
from tfbackend.graph.tracing import Trace, trace
from tfbackend.graph.trial import materialise, plain_float32
from tfbackend.meta import MetaModel


@dataclass(frozen=True)
class HeadPlan:
    """The way from hidden states to logits.

    Attributes:
        before: graph from hidden states [1, tokens, hidden] to the input of the head's linear, None if it is the
        identity. after: graph from the linear's output to the logits, None if it is the identity or `soft_cap` and
        `scale` say it. soft_cap: cap * tanh(logits / cap) is applied first; None for none.
        scale: then logits are multiplied by it.
        modules: paths in the full model of the modules that `before` and `after` call.
    """

    before: fx.Graph | None
    after: fx.Graph | None
    soft_cap: float | None
    scale: float
    modules: tuple[str, ...]

    def __str__(self) -> str:
        steps = [f"{_size(self.before)} operations before the head"] if self.before else []
        steps += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        steps += [f"scale {self.scale:g}"] if self.scale != 1.0 else []
        steps += [f"{_size(self.after)} operations after the head"] if self.after else []
        return ", ".join(steps) or "plain"


def _size(graph: fx.Graph | None) -> int:
    return sum(n.op.startswith("call") for n in graph.nodes) if graph else 0


def plan_head(meta: MetaModel, observation: Observation) -> HeadPlan:
    """Read the head of `meta.model`, of whose base model `observation` was made.

    Raises:
        UnsupportedModelError: the way from hidden states to logits is not one linear with operations around it.
    """
    if meta.head_path is None:
        raise _refusal(meta, "it has no linear outside the base model")
    traced = _trace_head(meta, observation)
    if not traced.complete:
        raise _refusal(meta, f"its forward was traced only in part: {traced.ended}")
    logits = _logits(traced.output)
    if type(meta.model.get_submodule(meta.head_path)) is not nn.Linear:
        raise _refusal(meta, f"{meta.head_path} is a {type(meta.model.get_submodule(meta.head_path)).__name__}")
    linears = traced.calls(meta.head_path)
    start = _hidden_states(traced, meta.base_path, observation)
    if logits is None or len(linears) != 1 or start is None:
        raise _refusal(meta, f"it calls {meta.head_path} {len(linears)} times, or gives no logits")
    linear = linears[0]
    entering = linear.args[0] if linear.args else None
    if not isinstance(entering, fx.Node):
        raise _refusal(meta, f"it calls {meta.head_path} with keywords")
    before, after = _cut(meta, traced, start, entering), _cut(meta, traced, linear, logits)
    modules = tuple(
        sorted({str(n.target) for g in (before, after) if g for n in g.nodes if n.op in ("call_module", "get_attr")})
    )
    soft_cap, scale, plain = _read_scalars(after)
    _check_per_token(meta, before, start)
    _check_per_token(meta, None if plain else after, linear)
    return HeadPlan(before, None if plain else after, soft_cap, scale, modules)


def _check_per_token(meta: MetaModel, graph: fx.Graph | None, start: fx.Node) -> None:
    """Run `graph` on all tokens at once and on each alone: the engine asks for the logits of some tokens only.

    Raises:
        UnsupportedModelError: the results differ, or it does not run.
    """
    if graph is None:
        return
    generator = torch.Generator().manual_seed(22)
    with torch.no_grad(), plain_float32():
        try:
            run = materialise(runnable(graph, meta.model), generator)
            x = torch.randn((1, TOKENS, value_of(start).shape[-1]), generator=generator)
            together, alone = run(x), torch.cat([run(x[:, i : i + 1]) for i in range(TOKENS)], dim=1)
        except RUN_ERRORS as error:
            raise _refusal(meta, f"an operation around the head does not run by itself: {error}") from error
    if together.shape != alone.shape or not torch.allclose(together, alone, rtol=1e-4, atol=1e-5):
        raise _refusal(meta, "the logits of a token depend on which others are asked for")


def _refusal(meta: MetaModel, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "What the model does between its last layer and its logits cannot be read.",
        where=f"{type(meta.model).__name__}.forward",
        found=found,
        needed="one linear over the base model's output, with operations around it",
    )


def _trace_head(meta: MetaModel, observation: Observation) -> Trace:
    forward = inspect.unwrap(type(meta.model).forward)
    ids = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
    positions = torch.arange(TOKENS, device="meta")[None]
    kwargs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    parameters = inspect.signature(forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        kwargs = {k: v for k, v in kwargs.items() if k in parameters}
    ran = {".".join(p for p in (meta.base_path, path) if p): output for path, output in observation.outputs.items()}
    return trace(meta.model, (), kwargs, known=ran, opened=_around(meta.head_path or ""))


def _around(path: str) -> set[str]:
    """Paths of the modules that the head's linear lies in: "cls.predictions.decoder" is in cls and cls.predictions."""
    parts = path.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


def _logits(output: Any) -> fx.Node | None:
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if found is None and isinstance(output, (tuple, list)):
        found = output[0]
    return found if isinstance(found, fx.Node) else None


def _hidden_states(traced: Trace, base_path: str, observation: Observation) -> fx.Node | None:
    """The node of the base model's last hidden states: its first output.

    Some classes call a part of the base model directly; that is the same where the base model returns what the part
    does.
    """
    for node in traced.graph.nodes:
        path = str(node.target)
        if node.op == "call_module" and is_within(path, base_path):
            inner = path.removeprefix(base_path).removeprefix(".")
            if _first(observation.outputs.get(inner)) is not _first(observation.outputs.get("")):
                return None
            firsts: list[fx.Node] = [u for u in node.users if name_of(u) == "_getitem" and u.args[1] == 0]
            return firsts[0] if firsts else node
    return None


def _first(output: Any) -> Any:
    return next((x for x in tree_leaves(output) if isinstance(x, torch.Tensor)), None)


def _cut(meta: MetaModel, traced: Trace, start: fx.Node, end: fx.Node) -> fx.Graph | None:
    """The graph from `start` to `end`, None where that is nothing but a slice of all tokens.

    Raises:
        UnsupportedModelError: it needs a value that is not computed from `start`, or counts tokens.
    """
    keep: set[fx.Node] = set()
    todo = [end]
    while todo:
        node = todo.pop()
        if node is not start and node not in keep:
            keep.add(node)
            todo += node.all_input_nodes
    graph, copies = fx.Graph(), {}
    copies[start] = graph.placeholder("x")
    for node in traced.graph.nodes:
        if node not in keep:
            continue
        if node.op == "placeholder":
            raise _refusal(meta, f"the logits depend on {node.target}")
        if TOKENS in [a for a in node.args if isinstance(a, int)]:
            raise _refusal(meta, f"{name_of(node)} counts tokens")
        if _takes_all(node):
            copies[node] = copies[node.args[0]]
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(copies[end])
    return graph if _size(graph) else None


def _takes_all(node: fx.Node) -> bool:
    """Whether the node is x[:, 0:, :], which is how "all logits" is spelled."""
    if name_of(node) not in ("__getitem__", "getitem") or not isinstance(node.args[1], tuple):
        return False
    return all(
        isinstance(i, slice) and i.start in (None, 0) and i.stop is None and i.step is None for i in node.args[1]
    )


def _read_scalars(graph: fx.Graph | None) -> tuple[float | None, float, bool]:
    """(soft cap, scale, whether these two say all), so that vLLM's own logits processor can do it."""
    if graph is None:
        return None, 1.0, True
    last = next(n for n in graph.nodes if n.op == "output").args[0]
    assert isinstance(last, fx.Node)
    scale, cap, node = 1.0, None, through_casts(last)
    factor, node = _peel(node)
    while factor is not None and name_of(node) != "tanh":
        scale, (factor, node) = scale * factor, _peel(through_casts(node))
    if factor is not None and name_of(node) == "tanh":
        under = node.args[0]
        assert isinstance(under, fx.Node)
        inner, below = _peel(through_casts(under))
        if inner is None or abs(inner * factor - 1.0) > 1e-6:
            return None, 1.0, False
        cap, node = factor, through_casts(below)
    return (cap, scale, True) if node.op == "placeholder" else (None, 1.0, False)


def _peel(node: fx.Node) -> tuple[float | None, fx.Node]:
    """(factor, input) where the node multiplies or divides by a number, else (None, node)."""
    if name_of(node) in ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide") and len(node.args) == 2:
        numbers = [a for a in node.args if isinstance(a, (int, float))]
        tensors = [a for a in node.args if isinstance(a, fx.Node)]
        if len(numbers) == 1 and len(tensors) == 1:
            divides = "div" in name_of(node)
            if divides and node.args[0] is not tensors[0]:
                return None, node
            return (1.0 / numbers[0] if divides else float(numbers[0])), through_casts(tensors[0])
    return None, node


def runnable(graph: fx.Graph, root: nn.Module) -> fx.GraphModule:
    """`graph` as a module [1, tokens, n] -> [1, tokens, m], its submodules taken from `root`."""
    return fx.GraphModule(root, graph)
