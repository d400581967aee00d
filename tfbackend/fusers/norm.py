"""Normalisation modules -> vLLM's norms: RMS in every spelling, and mean-centred ones.

    x = x.float(); x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps); return w * x.to(dtype)
    (x * torch.rsqrt(...)) * (1.0 + w)          F.rms_norm(x, (n,), w, eps)          F.layer_norm(x, (n,), w, b, eps)
    x / torch.sqrt(...) * w

The graph says what kind it is and what eps is; the proof says whether that reading was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import fx, nn

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.graph.query import name_of, through_casts, value_of
from tfbackend.layerspecs import NormSpec

_ALLOWED = frozenset(
    "to float type_as type half bfloat16 contiguous pow square mean rsqrt sqrt mul add sub div reciprocal multiply "
    "rms_norm layer_norm __mul__ __add__ __radd__ __rmul__ __sub__ __truediv__ __pow__ norm var "
    "__get__ view reshape".split()
)


class NormFuser:
    name: ClassVar[str] = "norm"

    def match(self, site: Site) -> Match | Miss:
        module = site.module
        if next(module.children(), None) is not None or len(list(module.parameters())) > 2:
            return Miss(self.name, site.qualname, "not a norm: has children or more than two parameters", near=False)
        trace = site.trace
        names = [name_of(node) for node in trace.graph.nodes if node.op == "call_function"]
        if not {"rsqrt", "sqrt", "rms_norm", "layer_norm"} & set(names):
            near = "norm" in type(module).__name__.lower()
            return Miss(self.name, site.qualname, "takes no root", site.place(), near=near)
        spec = self._read(site, names)
        if isinstance(spec, str):
            return Miss(self.name, site.qualname, spec, site.place())
        return Match({"spec": spec}, claims=frozenset({""}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        spec = match.roles["spec"]
        return Rewrite(
            site.qualname, self.name, f"{type(site.module).__name__}: {spec}", layer=spec, claims=match.claims
        )

    def _read(self, site: Site, names: Sequence[str]) -> NormSpec | str:
        trace, module = site.trace, site.module
        if not trace.complete:
            return f"its forward was traced only in part: {trace.ended}"
        inputs = [n for n in trace.graph.nodes if n.op == "placeholder"]
        if len(inputs) != 1 or not isinstance(trace.output, fx.Node):
            return "takes or gives more than one tensor"
        if odd := [name for name in names if name not in _ALLOWED]:
            return f"also does {odd[0]}"
        size = value_of(inputs[0]).shape[-1]
        if problem := _state_problem(module, size):
            return problem
        fused = next((name for name in ("rms_norm", "layer_norm") if name in names), None)
        if fused is not None:
            spec = _read_fused(trace.graph, fused, size, names)
        else:
            spec = _read_spelled(trace.graph, module, size, names)
        if isinstance(spec, NormSpec) and spec.kind == "rms" and spec.bias:
            return "adds a bias to an RMS norm, for which there is no layer"
        return spec


def _state_problem(module: nn.Module, size: int) -> str:
    for name, _ in module.named_buffers():
        return f"reads a buffer {name}"
    for name, parameter in module.named_parameters():
        if name not in ("weight", "bias") or tuple(parameter.shape) != (size,):
            return f"has a parameter {name} of shape {tuple(parameter.shape)}"
    return ""


def _read_fused(graph: fx.Graph, kind: str, size: int, names: Sequence[str]) -> NormSpec | str:
    node = next(n for n in graph.nodes if name_of(n) == kind)
    slots = (
        ("input", "normalized_shape", "weight", "eps")
        if kind == "rms_norm"
        else ("input", "normalized_shape", "weight", "bias", "eps")
    )
    given = dict(zip(slots, node.args, strict=False)) | dict(node.kwargs)
    if tuple(given["normalized_shape"]) != (size,):
        return f"normalises over {given['normalized_shape']}"
    eps = given.get("eps", 1e-5 if kind == "layer_norm" else None)
    if not isinstance(eps, float):
        return "its eps depends on the dtype"
    if {"mul", "__mul__", "mean", "rsqrt", "sqrt"} & set(names):
        return "scales again beside the fused norm"
    weight = given.get("weight")
    shape = "none" if weight is None else _weight_form(weight)
    return NormSpec("rms" if kind == "rms_norm" else "layer", size, eps, shape, given.get("bias") is not None)


def _weight_form(weight: object) -> str:
    assert isinstance(weight, fx.Node)
    return "zero_centred" if "add" in name_of(weight) else "plain"


def _read_spelled(graph: fx.Graph, module: nn.Module, size: int, names: Sequence[str]) -> NormSpec | str:
    roots = [n for n in graph.nodes if name_of(n) in ("rsqrt", "sqrt")]
    if len(roots) != 1:
        return f"takes {len(roots)} roots"
    under = roots[0].args[0] if roots[0].args else None
    if not isinstance(under, fx.Node):
        return "what stands under its root is not mean + eps"
    over = [through_casts(a) for a in under.args if isinstance(a, fx.Node)]
    if [name_of(node) for node in over] not in (["mean"], ["var"]):
        return "what stands under its root is not mean + eps"
    numbers = [a for a in under.args if isinstance(a, float)]
    if name_of(under) not in ("add", "__add__", "__radd__") or len(numbers) != 1:
        return "what stands under its root is not mean + eps"
    means = [n for n in graph.nodes if name_of(n) in ("mean", "var")]
    if any(
        n.args[1:2] not in ((-1,), ([-1],), ((-1,),)) and n.kwargs.get("dim") not in (-1, [-1], (-1,)) for n in means
    ):
        return "takes its mean over another dimension than the last"
    centred = any(name in ("sub", "__sub__", "var") for name in names)
    weight = "none"
    if "weight" in dict(module.named_parameters()):
        weight = "plain"
        for node in graph.nodes:
            ones = any(isinstance(a, (int, float)) and a == 1 for a in node.args)
            if name_of(node) in ("add", "__add__", "__radd__") and ones and _reads_weight(node):
                weight = "zero_centred"
    return NormSpec("layer" if centred else "rms", size, numbers[0], weight, getattr(module, "bias", None) is not None)


def _reads_weight(node: fx.Node) -> bool:
    todo = list(node.all_input_nodes)
    while todo:
        current = todo.pop()
        if current.op == "placeholder":
            return False
        if current.op == "get_attr":
            return current.target == "weight"
        todo += current.all_input_nodes
    return False
