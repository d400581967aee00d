"""What a mixture-of-experts block does, found by running it on numbers with stand-ins for its experts.

The code of a router is not read: the block runs with random weights, and what it asks of its experts is compared with
each rule that RouterSpec can say. Shared experts are known by what the block adds to what its experts give.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tfbackend.fusers.base import Site
from tfbackend.graph.interface import RUN_ERRORS
from tfbackend.moespec import SCORINGS, RouterSpec

_TOKENS = 61


@dataclass(frozen=True)
class BlockReading:
    """What a block was seen to do.

    Attributes:
        router: the rule.
        tensors: role ("weight", "bias", "correction") -> path of the tensor in the block.
        shared, shared_gate: see MoESpec.
        after: child that everything goes through in the end; "" for none.
    """

    router: RouterSpec
    tensors: Mapping[str, str]
    shared: str = ""
    shared_gate: str = ""
    after: str = ""


def read_block(site: Site, experts: str, top_k: int) -> BlockReading | str:
    """Run the block of `site`, whose child `experts` is behind the experts interface; or why nothing can be said."""
    module: Any = site.module
    given = _only_input(site)
    if isinstance(given, str):
        return given
    count, hidden = module.get_submodule(experts).num_experts, given.shape[-1]
    if isinstance(count, torch.Tensor) or not isinstance(count, int):
        return "does not say how many experts it has"
    run = _Run(site, experts, given, count)
    try:
        return run.read(top_k, hidden)
    except RUN_ERRORS as error:
        return f"it does not run on numbers: {type(error).__name__}: {error}"


def _only_input(site: Site) -> torch.Tensor | str:
    calls = site.observation.calls.get(site.kind.first, [])
    if not calls:
        return "the model did not call it in the observed run"
    args, kwargs = calls[0]
    given = [*args, *kwargs.values()]
    if len(calls) != 1 or len(given) != 1 or not isinstance(given[0], torch.Tensor):
        return "takes more than hidden states"
    first, beyond = _first(site.observation.outputs.get(site.kind.first)), beyond_hidden(site)
    if not isinstance(first, torch.Tensor) or first.shape != given[0].shape or beyond is None:
        return "gives more than hidden states"
    return given[0]


def beyond_hidden(site: Site) -> int | None:
    """How many outputs nobody has a use for follow the hidden states; None where somebody has."""
    output = site.observation.outputs.get(site.kind.first)
    if isinstance(output, torch.Tensor):
        return 0
    unread = site.observation.unread(site.kind.first)
    return len(unread) - 1 if unread and all(unread[1:]) else None


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Routers compute in float32, whatever they are given."""
    return torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


@dataclass(frozen=True)
class _Beside:
    """after(factor * experts + sigmoid(gate) * shared), where any but the experts may be missing."""

    shared: str
    gate: str
    after: str
    factor: float = 1.0


class _Asked(nn.Module):
    """Stands where the experts were: keeps what it is asked, and answers with random numbers."""

    def __init__(self, answer: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.answer, self.num_experts = answer, num_experts
        self.asked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids, weights = [*args, *kwargs.values()]
        self.asked = hidden_states, ids, weights
        return self.answer.to(hidden_states).view(hidden_states.shape)


class _Diagonal(nn.Module):
    """Stands in for a child that gives as many numbers as it takes."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        super().__init__()
        row = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
        self.row = nn.Parameter(row, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.row


class _Product(_Diagonal):
    """Stands in for a child that gives one number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.row).sum(-1, keepdim=True)


class _Run:
    """One block with stand-ins, in float64."""

    def __init__(self, site: Site, experts: str, given: torch.Tensor, count: int) -> None:
        self.site, self.experts, self.count = site, experts, count
        self.generator = torch.Generator().manual_seed(23)
        self.twin = copy.deepcopy(site.module).double().eval()
        self.hidden = given.shape[-1]
        shape = [_TOKENS if size == given.shape[-2] else size for size in given.shape]
        self.x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        self.rows = self.x.reshape(-1, self.hidden)
        answer = torch.randn(self.rows.shape, generator=self.generator, dtype=torch.float64)
        self.asked = _Asked(answer, count)
        setattr(self.twin, experts, self.asked)
        self.stands = self._stand_in()
        self.tensors = self._fill()

    def _stand_in(self) -> dict[str, _Diagonal]:
        made: dict[str, _Diagonal] = {}
        for name, child in list(self.twin.named_children()):
            output = self.site.observation.outputs.get(f"{self.site.kind.first}.{name}")
            if name == self.experts or not isinstance(output, torch.Tensor) or next(child.parameters(), None) is None:
                continue
            if output.shape[-1] in (1, self.hidden) and self.count not in (1, self.hidden):
                cls = _Product if output.shape[-1] == 1 else _Diagonal
                made[name] = cls(self.hidden, self.generator)
                setattr(self.twin, name, made[name])
        return made

    def _fill(self) -> dict[str, torch.Tensor]:
        """Random numbers for every tensor that is left, which are the router's, by path."""
        own = {f"{name}." for name in self.stands} | {f"{self.experts}."}
        found = {}
        saved = self.twin.state_dict()
        for path, tensor in [*self.twin.named_parameters(), *self.twin.named_buffers()]:
            if path.startswith(tuple(own)) or path not in saved:
                continue
            owner: Any = self.twin.get_submodule(path.rpartition(".")[0])
            spread = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 and tensor.shape[0] > 1 else 0.3
            drawn = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64) * spread
            leaf = path.rpartition(".")[2]
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(drawn, requires_grad=False)
            else:
                owner._buffers[leaf] = drawn
            found[path] = drawn
        return found

    def read(self, top_k: int, hidden: int) -> BlockReading | str:
        """What the block does; or which part of it is not known."""
        with torch.no_grad():
            output = _first(self.twin(self.x.clone()))
            if self.asked.asked is None:
                return "it does not call its experts"
            seen, ids, weights = self.asked.asked
            if seen.shape != self.rows.shape or not torch.equal(seen, self.rows):
                return "its experts see something else than it is given"
            beside = self._beside(output.reshape(-1, hidden))
            if isinstance(beside, str):
                return beside
            wanted = torch.zeros(_TOKENS, self.count, dtype=torch.float64).scatter_add_(-1, ids, weights.double())
            # What multiplies the output of the experts may as well multiply their weights.
            found = self._router(wanted * beside.factor, top_k)
        if isinstance(found, str):
            return found
        router, tensors = found
        return BlockReading(replace(router, wide=self._wide()), tensors, beside.shared, beside.gate, beside.after)

    def _beside(self, output: torch.Tensor) -> _Beside | str:
        """What the block does with what its experts give: after(factor * experts + sigmoid(gate) * shared)."""
        full = [name for name, stand in self.stands.items() if type(stand) is _Diagonal]
        gates = [name for name, stand in self.stands.items() if type(stand) is _Product]
        if len(full) <= 2 and len(gates) <= 1:
            for shared, after in permutations([*full, "", ""][:2], 2):
                way = _Beside(shared, "".join(gates), after)
                if (factor := self._factor(output, way)) is not None:
                    return replace(way, factor=factor)
        inside = ", ".join(self.stands) or "anything"
        return f"what it adds to its experts is not what one of its children gives ({inside})"

    def _factor(self, output: torch.Tensor, way: _Beside) -> float | None:
        """What multiplies the experts if the block does the rest this way; None if it does not."""
        rest, answer = output / self.stands[way.after].row if way.after else output, self.asked.answer
        if way.shared:
            added = self.stands[way.shared](self.rows)
            rest = rest - (self.stands[way.gate](self.rows).sigmoid() * added if way.gate else added)
        elif way.gate:
            return None
        factor = float((rest * answer).sum() / answer.square().sum())
        return factor if factor and _close(rest, answer * factor) else None

    def _router(self, wanted: torch.Tensor, top_k: int) -> tuple[RouterSpec, dict[str, str]] | str:
        matrices = [path for path, tensor in self.tensors.items() if tensor.shape == (self.count, self.hidden)]
        vectors = [path for path, tensor in self.tensors.items() if tensor.numel() == self.count]
        if len(matrices) != 1 or len(matrices) + len(vectors) != len(self.tensors) or len(vectors) > 2:
            return f"its router has the tensors {', '.join(self.tensors) or 'of other modules'}"
        for roles in permutations(("bias", "correction"), len(vectors)):
            tensors = {"weight": matrices[0], **dict(zip(roles, vectors, strict=True))}
            for spec in self._candidates("bias" in roles, "correction" in roles):
                if (scale := self._agrees(spec, tensors, wanted, top_k)) is not None:
                    return replace(spec, scale=scale), tensors
        return "its router chooses by none of the rules known here"

    def _candidates(self, bias: bool, correction: bool) -> Iterator[RouterSpec]:
        numbers = sorted(v for v in self._numbers() if isinstance(v, int))
        pairs = [(g, k) for g, k in product(numbers, repeat=2) if 1 < g < self.count and 0 < k < g]
        groups = [(1, 1), *((g, k) for g, k in pairs if self.count % g == 0)]
        for scoring, renormalize, (count, used) in product(SCORINGS, (False, True), groups):
            if count == 1 or not correction or self.count // count > 1:
                yield RouterSpec(scoring, renormalize, count, used, bias=bias, correction=correction)

    def _agrees(self, spec: RouterSpec, tensors: dict[str, str], wanted: torch.Tensor, top_k: int) -> float | None:
        """The scale by which the rule gives what is wanted, or None."""
        roles = {role: self.tensors[path] for role, path in tensors.items()}
        bias, correction = (roles[r].flatten() if r in roles else None for r in ("bias", "correction"))
        if spec.groups > 1 and spec.groups_used * (self.count // spec.groups) < top_k:
            return None
        weights, ids = spec.route(F.linear(self.rows, roles["weight"], bias), top_k, correction)
        got = torch.zeros_like(wanted).scatter_add_(-1, ids, weights)
        scale = float(wanted.sum() / got.sum())
        if not _close(got * scale, wanted):
            return None
        # What was divided by a sum in float32 is a number of the module again.
        told = [float(v) for v in (1, *self._numbers()) if abs(v - scale) <= 1e-5 * abs(scale)]
        return told[0] if told else float(f"{scale:.7g}")

    def _numbers(self) -> set[int | float]:
        values = (value for module in self.twin.modules() for value in vars(module).values())
        return {v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)}

    def _wide(self) -> bool:
        """Whether a model in bfloat16 computes the logits in float32."""
        twin, x = copy.deepcopy(self.twin).to("meta", torch.bfloat16), self.x.to("meta", torch.bfloat16)
        getattr(twin, self.experts).answer = self.asked.answer.to("meta", torch.bfloat16)
        with torch.no_grad(), _FirstLogits(_TOKENS, self.count) as seen:
            twin(x)
        return seen.dtype is torch.float32


class _FirstLogits(TorchFunctionMode):
    """Notes the dtype of the first numbers that there are one of for each token and expert."""

    def __init__(self, tokens: int, experts: int) -> None:
        super().__init__()
        self.tokens, self.experts = tokens, experts
        self.dtype: torch.dtype = torch.float32

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and look at what it gives."""
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.dim() < 2:
            return result
        if self.experts and tuple(result.flatten(0, -2).shape) == (self.tokens, self.experts):
            self.dtype, self.experts = result.dtype, 0
        return result
