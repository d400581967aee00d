"""Experts behind Transformers' experts interface -> a routed-experts layer, the router staying as it is.

    experts_interface(self, hidden_states, top_k_index, top_k_weights)

The forward stays as it is: the interface calls `self.routed`. Sizes are read from the weights; what is done between the
two matrix products is not read from the code, the gate function of the module is run on numbers and compared with each
rule there is a kernel or a reference for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import nn

from tfbackend.activations import ACTIVATIONS
from tfbackend.expertspec import EXPERT_ACTIVATIONS, ExpertsSpec
from tfbackend.fusers.base import Match, Miss, Rewrite, Site, WeightEntry
from tfbackend.graph.interface import RUN_ERRORS, has_experts_interface
from tfbackend.serving import ServingSpec

_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0
_KERNELS = {
    "cpu": ({"silu", "gelu", "gelu_tanh", "swigluoai"}, 32),
    "cuda": ({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}, 1),
}
"""By device: the activations that vLLM's experts have a kernel for, and what the hidden size has to divide by."""


class ExpertsFuser:
    name: ClassVar[str] = "experts"

    def match(self, site: Site) -> Match | Miss:
        module: Any = site.module
        if not has_experts_interface(module):
            return Miss(self.name, site.qualname, "is not behind the experts interface", near=False)
        spec = read_experts(site, module, site.qualname)
        if isinstance(spec, str):
            return Miss(self.name, site.qualname, spec, site.place())
        names = tuple(name for name, _ in module.named_parameters())
        return Match({"spec": spec, "names": names}, claims=frozenset({*names, "routed"}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec, names = match.roles["spec"], match.roles["names"]
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary=str(spec),
            children=(("routed", spec),),
            removes=names,
            weights=tuple(WeightEntry(name, f"routed.runner.routed_experts.{LIVE[name]}") for name in names),
            claims=match.claims,
        )


LIVE = {
    "gate_up_proj": "w13_weight",
    "up_proj": "w13_weight",
    "down_proj": "w2_weight",
    "gate_up_proj_bias": "w13_bias",
    "up_proj_bias": "w13_bias",
    "down_proj_bias": "w2_bias",
}
"""Parameter of a Transformers class -> that of the layer here."""


def read_experts(site: Site, module: Any, path: str) -> ExpertsSpec | str:
    """What the experts at `path`, which are `site` or a child of it, compute; or why that cannot be said."""
    if site.serving.quantization:
        return "quantized experts have no loader yet"
    names = {name: parameter.shape for name, parameter in module.named_parameters()}
    if problem := _shape_problem(module, names):
        return problem
    first = "gate_up_proj" if module.has_gate else "up_proj"
    experts, down = names[first][0], names["down_proj"][1:]
    hidden, width = down if not module.is_transposed else (down[1], down[0])
    call = _call(module, site.observation.calls.get(path, []))
    if isinstance(call, str):
        return call
    sizes = ExpertsSpec(
        num_experts=experts,
        top_k=call,
        hidden=hidden,
        intermediate=width,
        gated=module.has_gate,
        bias=module.has_bias,
        transposed=module.is_transposed,
    )
    spec = _rule(module, sizes)
    if isinstance(spec, str):
        return spec
    return spec if has_kernel(spec, site.serving) else spec.without_kernel()


def _shape_problem(module: Any, names: dict[str, torch.Size]) -> str:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    wanted = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if module.has_bias else set())
    if set(names) != wanted or next(module.buffers(), None) is not None:
        return f"has the parameters {', '.join(sorted(names))} and not {', '.join(sorted(wanted))}"
    into, out = names[first], names["down_proj"]
    if len(into) != 3 or len(out) != 3:
        return f"its weights are {tuple(into)} and {tuple(out)}, not one matrix an expert"
    rows, columns = (1, 2) if not module.is_transposed else (2, 1)
    factor = 2 if module.has_gate else 1
    if into[0] != out[0] or into[rows] != factor * out[columns] or into[columns] != out[rows]:
        return f"its weights {tuple(into)} and {tuple(out)} do not follow each other"
    return ""


def _call(module: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> int | str:
    """How many experts a token of the observed call has, or why the call is not the interface's."""
    if not calls:
        return "the model did not call it in the observed run"
    args, kwargs = calls[0]
    names = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
    given = [*args, *kwargs.values()]
    if list(kwargs) != names[len(args) : len(given)] or len(given) != 3:
        return f"is called with {len(args)} arguments and {', '.join(kwargs) or 'no keywords'}"
    ids, weights = given[1:]
    if not all(isinstance(x, torch.Tensor) and x.dim() == 2 for x in given) or ids.shape != weights.shape:
        return "is not called with the ids and weights of each token's experts"
    if ids.dtype.is_floating_point or not weights.dtype.is_floating_point:
        return f"takes ids of {ids.dtype} and weights of {weights.dtype}"
    return int(ids.shape[1])


def _rule(module: nn.Module, sizes: ExpertsSpec) -> ExpertsSpec | str:
    """The spec of these sizes that does between the matrix products what the module does."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn((9, sizes.width), generator=generator, dtype=torch.float64) * 6
    try:
        wanted = module._apply_gate(x.clone()) if module.has_gate else module.act_fn(x.clone())  # type: ignore[operator]
    except RUN_ERRORS as error:
        return f"its gate does not run on numbers: {type(error).__name__}: {error}"
    for spec in _candidates(module, sizes):
        got = spec.between(x)
        if got.shape == wanted.shape and torch.allclose(got, wanted.double(), rtol=1e-6, atol=1e-6):
            return spec
    return "what it does between its matrix products is none of the rules known here"


def _candidates(module: nn.Module, sizes: ExpertsSpec) -> Iterator[ExpertsSpec]:
    numbers = list(dict.fromkeys(value for value in vars(module).values() if isinstance(value, float)))
    activations = EXPERT_ACTIVATIONS if sizes.gated else tuple(ACTIVATIONS)
    for interleaved, limit, activation in product((False, True)[: 1 + sizes.gated], [None, *numbers], activations):
        spec = replace(sizes, activation=activation, interleaved=interleaved, limit=limit)
        if activation == "swigluoai":
            yield from (replace(spec, alpha=alpha) for alpha in numbers)
        else:
            yield spec


def has_kernel(spec: ExpertsSpec, serving: ServingSpec) -> bool:
    """Whether vLLM has a kernel for such experts on the platform served."""
    activations, divisor = _KERNELS.get(serving.device, _KERNELS["cuda"])
    if spec.activation not in activations or spec.hidden % divisor or not spec.gated:
        return False
    if spec.activation == "swigluoai":
        return spec.alpha == _OAI_ALPHA and spec.limit == _OAI_LIMIT
    return spec.limit is None
