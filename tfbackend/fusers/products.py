"""Which modules are linears: x [..., in] -> x @ weight + bias, whichever way round they keep their weight.

nn.Linear is known to be one. Any other module is one if the graph of its forward says so: one product of all of the
input with the module's own `weight`, and its `bias` added. Transformers' Conv1D, whose weight is [in, out], is such a
module; names of classes play no part.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass

import torch
from torch import fx, nn

from tfbackend.graph.kinds import tampered
from tfbackend.graph.query import name_of, value_of
from tfbackend.graph.tracing import Trace, trace

_TOKENS = 5
_IN_ORDER = frozenset("view reshape flatten contiguous unsqueeze squeeze".split())
"""Operations that change a shape and leave all elements in their order."""


@dataclass(frozen=True)
class LinearShape:
    """A linear as its module keeps it.

    Attributes:
        in_features, out_features: widths.
        bias: whether it has one, [out_features].
        transposed: whether `weight` is [in_features, out_features], not [out_features, in_features] as in nn.Linear.
    """

    in_features: int
    out_features: int
    bias: bool
    transposed: bool = False


_known: weakref.WeakKeyDictionary[nn.Module, LinearShape | None] = weakref.WeakKeyDictionary()


def linear_shape(module: nn.Module) -> LinearShape | None:
    """The linear that a meta module is, None where it is none or where more than its class's forward runs."""
    if tampered(module):
        return None
    if type(module) is nn.Linear:
        return LinearShape(module.in_features, module.out_features, module.bias is not None)
    if module not in _known:
        _known[module] = _product(module)
    return _known[module]


def _product(module: nn.Module) -> LinearShape | None:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    own = {name for name, parameter in module._parameters.items() if parameter is not None}
    if weight is None or weight.dim() != 2 or not weight.is_meta or own - {"weight", "bias"}:
        return None
    if module._modules or module._buffers or isinstance(module, nn.Embedding):
        return None
    if inspect.unwrap(type(module).forward) is not type(module).forward:
        return None
    for transposed in (True, False):
        rows, columns = weight.shape
        wide, out = (rows, columns) if transposed else (columns, rows)
        if bias is not None and tuple(bias.shape) != (out,):
            continue
        given = torch.empty((1, _TOKENS, wide), device="meta", dtype=weight.dtype)
        if _is_product(trace(module, (given,), {}), given, out, transposed, bias is not None):
            return LinearShape(wide, out, bias is not None, transposed)
    return None


def _is_product(made: Trace, given: torch.Tensor, out: int, transposed: bool, bias: bool) -> bool:
    node = made.output
    if not made.complete or made.mutations or not isinstance(node, fx.Node):
        return False
    if value_of(node).shape != (*given.shape[:-1], out) or value_of(node).dtype != given.dtype:
        return False
    node, added = _through_shapes(node), False
    if name_of(node) in ("add", "__add__", "__radd__") and len(node.args) == 2 and not node.kwargs:
        terms = [a for a in node.args if isinstance(a, fx.Node) and not _is_own(a, "bias")]
        if len(terms) != 1 or not any(_is_own(a, "bias") for a in node.args):
            return False
        node, added = _through_shapes(terms[0]), True
    parts = _factors(node)
    if parts is None:
        return False
    x, weight, inside = parts
    turned = _weight_way(weight)
    return (
        turned is transposed
        and (added + inside == int(bias))
        and isinstance(x, fx.Node)
        and value_of(x).shape[-1] == given.shape[-1]
        and value_of(_through_shapes(x)) is given
    )


def _factors(node: fx.Node) -> tuple[object, object, bool] | None:
    """(input, weight as [in, out] or what it was turned from, whether the own bias is added) of a matrix product."""
    name, args = name_of(node), node.args
    if node.kwargs:
        return None
    if name == "addmm" and len(args) == 3 and _is_own(args[0], "bias"):
        return args[1], args[2], True
    if name in ("matmul", "mm", "__matmul__") and len(args) == 2:
        return args[0], args[1], False
    if name == "linear" and len(args) in (2, 3):
        bias = len(args) == 3 and args[2] is not None
        if bias and not _is_own(args[2], "bias"):
            return None
        return args[0], ("turned", args[1]), bias
    return None


def _weight_way(weight: object) -> bool | None:
    """True where the product reads the own weight as [in, out], False as [out, in], None where it reads another."""
    straight = True
    if isinstance(weight, tuple):
        straight, weight = False, weight[1]
    while isinstance(weight, fx.Node) and name_of(weight) in ("t", "transpose") and not weight.kwargs:
        if name_of(weight) == "transpose" and {int(str(d)) % 2 for d in weight.args[1:]} != {0, 1}:
            return None
        straight, weight = not straight, weight.args[0]
    return straight if _is_own(weight, "weight") else None


def _is_own(node: object, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and node.target == name


def _through_shapes(node: fx.Node) -> fx.Node:
    while name_of(node) in _IN_ORDER and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
