"""What a classifier of Transformers does between the base model's hidden states and its logits, read from its forward.

    hidden = self.bert(...).last_hidden_state                           which token counts: `pick`
    logits = self.classifier(self.dropout(self.bert.pooler(hidden)))    what is done with it: `graph`

The forward is traced over prompts of one token, of which there is but one that can count; a pooler inside the base
model is followed from the base model's hidden states on. Which token it is in longer prompts is found by running the
class's own forward over random hidden states and comparing: nothing is read from names or from fields of the config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from tfbackend.errors import UnsupportedModelError
from tfbackend.grafting import graft
from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.graph.observe import TOKENS, Observation, model_inputs
from tfbackend.graph.query import leads_to, name_of
from tfbackend.graph.tracing import Trace, trace
from tfbackend.graph.trial import apart, materialise, plain_float32
from tfbackend.meta import MetaModel
from tfbackend.pooling import MEAN_LOGITS, PICKS, TOKENWISE, Pick, pick_row

_PROMPTS = 10007
"""Prompts of one token in the traced run. Prime: no size of a model, so it is their number wherever it shows."""
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class ClassifierPlan:
    """The way from hidden states to the logits of labels.

    Attributes:
        graph: hidden states [prompts, 1, hidden] of the one token that counts -> [prompts, labels].
        pick: which token that is, one of pooling.PICKS; or MEAN_LOGITS, TOKENWISE: each has logits of its own, which
            are averaged or not.
        padding: id of the token that "last_real" passes over.
        labels: how many there are.
        modules: paths in the full model of what `graph` calls.
    """

    graph: fx.Graph
    pick: str
    padding: int | None
    labels: int
    modules: tuple[str, ...]

    def __str__(self) -> str:
        which = PICKS.get(self.pick, "each token")
        averaged = ", averaged" if self.pick == MEAN_LOGITS else ""
        return f"{self.labels} labels of {which}{averaged}, by {', '.join(self.modules) or 'nothing'}"


def plan_classifier(meta: MetaModel, observation: Observation) -> ClassifierPlan:
    """Read the head of `meta.model`, of whose base model `observation` was made.

    Raises:
        UnsupportedModelError: the logits are no function of the hidden states of one token, or of their mean.
    """
    reader = _Reader(meta, observation)
    graph = reader.read()
    modules = tuple(sorted({str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")}))
    padding = getattr(meta.model.config.get_text_config(), "pad_token_id", None)
    with torch.no_grad(), plain_float32():
        try:
            pick, labels = _Trials(meta, observation, reader, modules, padding).pick()
        except UnsupportedModelError:
            raise
        except RUN_ERRORS as error:
            raise _refusal(meta, f"it does not run by itself: {type(error).__name__}: {error}") from error
    return ClassifierPlan(graph, pick, padding if pick == "last_real" else None, labels, modules)


def _refusal(meta: MetaModel, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "What the model does between its last layer and the logits of its labels cannot be read.",
        where=f"{type(meta.model).__name__}.forward",
        found=found,
        needed="logits that follow from the hidden states of one token, or from a mean of all",
    )


def _resized(output: Any) -> Any:
    """What a module gave for one prompt of TOKENS tokens, as if for _PROMPTS prompts of one."""

    def resize(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dim():
            return x
        sizes = [_PROMPTS if x.shape[0] == 1 else x.shape[0], *x.shape[1:]]
        return x.new_empty([1 if size == TOKENS else size for size in sizes], device="meta")

    return tree_map(resize, output)


def inputs_of(model: nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """Keywords of a call of a whole model over `ids` [prompts, tokens], those that its forward takes."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return {"input_ids": ids} | ({"use_cache": False} if "use_cache" in parameters else {})


def logits_of(output: Any) -> torch.Tensor:
    """The logits of labels of what a model gives; those of where an answer starts and ends count as two labels.

    Raises:
        ValueError: it gives none.
    """
    logits = getattr(output, "logits", None)
    if logits is None and getattr(output, "start_logits", None) is not None:
        logits = torch.stack((output.start_logits, output.end_logits), -1)
    if not isinstance(logits, torch.Tensor):
        raise ValueError("it gives no logits")
    return logits


def _logits_in(traced: Trace) -> fx.Node | None:
    """Likewise of a traced forward: their node, None where it gives none."""
    output = traced.output if isinstance(traced.output, dict) else {}
    found, both = output.get("logits"), (output.get("start_logits"), output.get("end_logits"))
    if found is None and all(isinstance(node, fx.Node) for node in both):
        found = traced.graph.call_function(torch.stack, (both, -1))
    return found if isinstance(found, fx.Node) else None


class _Reader:
    """Traces the full model over the known output of its base model, and that from its hidden states on."""

    def __init__(self, meta: MetaModel, observation: Observation) -> None:
        self.meta, self.observation = meta, observation
        self.graph = fx.Graph()
        self.start = self.graph.placeholder("x")
        self.prompts: fx.Node | None = None
        self.device: fx.Node | None = None
        self.pooled: fx.Node | None = None

    def read(self) -> fx.Graph:
        """The graph from hidden states to logits."""
        meta = self.meta
        output = _resized(self.observation.outputs[""])
        ids = torch.zeros((_PROMPTS, 1), dtype=torch.long, device="meta")
        with _padded(meta.model.config):
            traced = trace(meta.model, (), inputs_of(meta.model, ids), known={meta.base_path: output})
        if not traced.complete:
            raise self._refuse(f"its forward was traced only in part: {traced.ended}")
        logits = _logits_in(traced)
        calls = traced.calls(meta.base_path)
        if not isinstance(logits, fx.Node) or len(calls) != 1:
            raise self._refuse(f"it calls {meta.base_path} {len(calls)} times, or gives no logits")
        given: dict[fx.Node, fx.Node] = {}
        leaves = tree_leaves(output)
        hidden = next((i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)), None)
        for node in calls[0].users:
            if name_of(node) == "_getitem" and leads_to(node, logits):
                index = node.args[1]
                given[node] = self.start if index == hidden else self._from_hidden(int(str(index)), ids)
        self.graph.output(self._copy(traced, logits, given, ids))
        return self.graph

    def _refuse(self, found: str) -> UnsupportedModelError:
        return _refusal(self.meta, found)

    def _from_hidden(self, leaf: int, ids: torch.Tensor) -> fx.Node:
        """What else the base model gives, computed from its hidden states."""
        base = self.meta.base
        known = {path: _resized(out) for path, out in self.observation.outputs.items() if path}
        keywords = model_inputs(base, torch.device("meta"), 1) | {"input_ids": ids}
        traced = trace(base, (), keywords, known=known)
        if not traced.complete:
            raise self._refuse(f"its base model was traced only in part: {traced.ended}")
        nodes = [n for n in tree_leaves(traced.output) if isinstance(n, fx.Node)]
        tensors = [i for i, x in enumerate(tree_leaves(self.observation.outputs[""])) if isinstance(x, torch.Tensor)]
        if self.pooled is not None:
            raise self._refuse("its base model gives several things besides hidden states")
        wanted = nodes[tensors.index(leaf)]
        self.pooled = self._copy(traced, wanted, {nodes[0]: self.start}, ids, f"{self.meta.base_path}.")
        return self.pooled

    def _copy(
        self, traced: Trace, end: fx.Node, given: dict[fx.Node, fx.Node], ids: torch.Tensor, prefix: str = ""
    ) -> fx.Node:
        """Put what `end` is computed from into the graph, `given` nodes excepted; its node there."""
        copies, keep, todo = dict(given), set[fx.Node](), [end]
        while todo:
            node = todo.pop()
            if node not in keep and node not in given:
                keep.add(node)
                todo += node.all_input_nodes
        for node in traced.graph.nodes:
            if node not in keep:
                continue
            if node.op == "placeholder":
                copies[node] = self._input(node, ids)
                continue
            copies[node] = made = self.graph.node_copy(node, lambda n: copies[n])
            if node.op in ("call_module", "get_attr"):
                made.target = f"{prefix}{node.target}"
            made.args, made.kwargs = self._counted(made.args), self._counted(made.kwargs)
        return copies[end]

    def _input(self, node: fx.Node, ids: torch.Tensor) -> fx.Node:
        if node.meta["val"] is not ids:
            raise self._refuse("the logits depend on more than the tokens and their hidden states")
        return self.graph.call_function(_one_token, (self.start, self._token()))

    def _token(self) -> int:
        padding = getattr(self.meta.model.config.get_text_config(), "pad_token_id", None) or 0
        return 1 if padding == 0 else 0

    def _counted(self, value: Any) -> Any:
        """Arguments with the number of prompts in place of _PROMPTS, and their device in place of meta."""

        def count(x: Any) -> Any:
            if isinstance(x, torch.device) and x.type == "meta":
                self.device = self.device or self._of_start(_device)
                return self.device
            if isinstance(x, int) and not isinstance(x, bool) and x == _PROMPTS:
                self.prompts = self.prompts or self._of_start(_count)
                return self.prompts
            return x

        return fx.node.map_aggregate(value, count)

    def _of_start(self, ask: Callable[[torch.Tensor], Any]) -> fx.Node:
        with self.graph.inserting_after(self.start):
            return self.graph.call_function(ask, (self.start,))


def _count(x: torch.Tensor) -> int:
    return x.shape[0]


def _device(x: torch.Tensor) -> torch.device:
    return x.device


def _one_token(x: torch.Tensor, token: int) -> torch.Tensor:
    """Prompts of one token, as many as x [prompts, ...] has rows."""
    return torch.full((x.shape[0], 1), token, dtype=torch.long, device=x.device)


@contextmanager
def _padded(config: Any) -> Iterator[None]:
    """While entered, the config names a padding token: without one, some classes take one prompt at a time only."""
    text = config.get_text_config()
    before = getattr(text, "pad_token_id", None)
    text.pad_token_id = 0 if before is None else before
    try:
        yield
    finally:
        text.pad_token_id = before


class _Given(nn.Module):
    """Stands in for a base model: gives known hidden states, and what else it is made to compute from them."""

    def __init__(self, base: nn.Module, output: Any, parts: list[str]) -> None:
        super().__init__()
        self.__dict__["output"], self.config = output, getattr(base, "config", None)
        self.hidden: torch.Tensor | None = None
        self.others: Callable[[torch.Tensor], Any] | None = None
        for path in parts:
            graft(self, base, path)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Anything -> what the base model gives."""
        assert self.hidden is not None
        hidden, others, seen = self.hidden, self.others, []

        def fill(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            seen.append(x)
            if len(seen) == 1:
                return hidden
            return others(hidden) if others is not None else torch.full((), torch.nan)

        return tree_map(fill, self.output)


class _Trials:
    """Runs the class's own forward over random hidden states, beside the graph over each token that may count."""

    def __init__(
        self, meta: MetaModel, seen: Observation, reader: _Reader, modules: tuple[str, ...], padding: int | None
    ) -> None:
        self.meta, self.padding = meta, padding
        self.generator = torch.Generator().manual_seed(24)
        inside = [m.removeprefix(f"{meta.base_path}.") for m in modules if m.startswith(f"{meta.base_path}.")]
        stand_in = _Given(meta.base, seen.outputs[""], inside)
        with _swapped(meta, stand_in):
            self.twin: Any = materialise(meta.model, self.generator)
        self.given: Any = self.twin.get_submodule(meta.base_path)
        self.run = fx.GraphModule(self.twin, reader.graph)
        pooled = reader.pooled
        others = fx.GraphModule(self.twin, _until(pooled)) if pooled is not None else None
        vars(self.given)["others"] = others  # no child of its own child
        first = next(x for x in tree_leaves(seen.outputs[""]) if isinstance(x, torch.Tensor))
        self.width, self.vocabulary = first.shape[-1], meta.model.config.get_text_config().vocab_size

    def pick(self) -> tuple[str, int]:
        """(which token counts, how many labels there are).

        Raises:
            UnsupportedModelError: none of PICKS, and not each.
        """
        left, labels = [*PICKS, MEAN_LOGITS, TOKENWISE], 0
        for ids in self._prompts():
            hidden = torch.randn((1, len(ids), self.width), generator=self.generator)
            self.given.hidden = hidden
            wanted = logits_of(self.twin(**inputs_of(self.twin, ids[None])))
            labels = wanted.shape[-1]
            left = [pick for pick in left if self._agrees(pick, hidden, ids, wanted)]
        if not left:
            raise _refusal(self.meta, "the logits follow from no one token, and from no mean of all")
        return left[0], labels

    def _agrees(self, pick: str, hidden: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor) -> bool:
        if pick in (MEAN_LOGITS, TOKENWISE):
            got = self.run(hidden.transpose(0, 1))
            got = got.transpose(0, 1) if pick == TOKENWISE and got.dim() == 3 else got.mean(0, keepdim=True)
        else:
            got = self.run(pick_row(Pick(pick, self.padding), hidden[0], ids)[None, None])
        return apart(wanted, got) <= _TOLERANCE

    def _prompts(self) -> Iterator[torch.Tensor]:
        """Token ids of prompts of several lengths, with padding at either end, within, throughout and nowhere."""
        padding = self.padding if self.padding is not None and 0 <= self.padding < self.vocabulary else None
        for length, padded in _SHAPES:
            ids = torch.randint(0, self.vocabulary, (length,), generator=self.generator)
            if padding is not None:
                ids[ids == padding] = (padding + 1) % self.vocabulary
                ids[[*padded]] = padding
            yield ids


_SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (5, ()), (1, ()), (2, ()), (9, ()), (6, (5,)), (6, (3, 4, 5)), (6, (0,)), (6, (0, 1, 2)), (8, (2, 4)), (8, (3, 7)),
    (3, (0, 1, 2)), (1, (0,)),
)  # fmt: skip
"""Length of a prompt, and which of its tokens are padding."""


def _until(end: fx.Node) -> fx.Graph:
    """The graph up to `end`, which it gives."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in end.graph.nodes:
        copies[node] = made.node_copy(node, lambda n: copies[n])
        if node is end:
            break
    made.output(copies[end])
    return made


@contextmanager
def _swapped(meta: MetaModel, stand_in: nn.Module) -> Iterator[None]:
    parent, _, name = meta.base_path.rpartition(".")
    owner, base = meta.model.get_submodule(parent), meta.base
    owner._modules[name] = stand_in
    try:
        yield
    finally:
        owner._modules[name] = base
