"""Attention that a model writes out by itself, found in a graph of one forward on real numbers.

    softmax(query @ key^T * scale + mask [+ bias]) @ value

Where query, key and value are is read from the dataflow: the product whose first factor comes from a softmax and from
nothing else, and the one product that the softmax is computed from. What happens to the scores in between is not read
from the code but measured: with two draws of query and key all that is added stays and all that is scaled moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from itertools import product as product_of
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from tfbackend.graph.query import CASTS, PRODUCTS, SDPA, SHAPE_ONLY, SOFTMAX, name_of, sources, value_of
from tfbackend.graph.tracing import Trace

FRAMED = PRODUCTS | {SDPA}


class InlineError(Exception):
    """A module weighs tokens against tokens in a way that an attention layer does not. The message says which."""


@dataclass(frozen=True)
class InlineAttention:
    """One attention in a graph, heads over all, on real numbers.

    Attributes:
        start: the product of query and key; the whole where torch's own attention is called.
        end: the product with the values.
        query, key, value: [1, heads, tokens, dim]; key and value may have fewer heads.
        logits: what the softmax is taken of, [heads, tokens, tokens].
        visible: what it does not hide, of that shape.
        output: [1, heads, tokens, dim].
        back: what to write after such a stack to get what `end` gave.
    """

    start: fx.Node
    end: fx.Node
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    logits: torch.Tensor
    visible: torch.Tensor
    output: torch.Tensor
    back: str = ""

    @property
    def products(self) -> torch.Tensor:
        """query @ key^T, [heads, tokens, tokens]."""
        groups = self.query.shape[1] // self.key.shape[1]
        key = self.key.repeat_interleave(groups, 1)
        return (self.query.double() @ key.double().transpose(-1, -2))[0]


def find_inline(trace: Trace, module: nn.Module) -> InlineAttention:
    """The one attention that `module` writes out.

    Raises:
        InlineError: there is none or several, or one that is none.
    """
    if not trace.complete:
        raise InlineError(trace.ended)
    torchs = [n for n in trace.graph.nodes if name_of(n) == SDPA]
    softmaxes = [n for n in trace.graph.nodes if _is_softmax(n, module)]
    if len(torchs) + len(softmaxes) != 1:
        raise InlineError(f"it has {len(torchs) + len(softmaxes)} softmaxes in one forward")
    return _of_torch(torchs[0]) if torchs else _of_softmax(softmaxes[0], module)


def _is_softmax(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.Softmax
    return name_of(node) in SOFTMAX


def _of_softmax(softmax: fx.Node, module: nn.Module) -> InlineAttention:
    end = _weighted_sum(softmax, module)
    starts = sources(softmax, lambda n: name_of(n) in PRODUCTS)
    starts = [n for n in starts if name_of(n) in PRODUCTS and value_of(n).shape[-2:] == value_of(softmax).shape[-2:]]
    if len(starts) != 1:
        raise InlineError(f"its softmax is taken of {len(starts)} products")
    query, key, _ = _factors(starts[0])
    _, value, back = _factors(end)
    output = value_of(end).transpose(1, 2) if "transpose" in back else value_of(end)
    logits = softmax.args[0]
    if not isinstance(logits, fx.Node):
        raise InlineError("its softmax is called in an unusual way")
    return InlineAttention(
        *(starts[0], end, query, key.transpose(-1, -2), value),
        logits=_square(value_of(logits), query.shape[1]),
        visible=_square(value_of(softmax), query.shape[1]) > 0,
        output=_stacked(output, "output"),
        back=back,
    )


def _weighted_sum(softmax: fx.Node, module: nn.Module) -> fx.Node:
    """The product that takes the weights as its first factor, and nobody else but the caller."""
    todo, found = [softmax], list[fx.Node]()
    while todo:
        for user in todo.pop().users:
            if name_of(user) in PRODUCTS:
                found.append(user)
            elif _keeps_weights(user, module):
                todo.append(user)
            elif user.op != "output" and isinstance(user.meta.get("val"), torch.Tensor):
                raise InlineError(f"its weights go through {_called(user)}")
    if len(found) != 1:
        raise InlineError(f"its weights go into {len(found)} products")
    return found[0]


def _keeps_weights(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), nn.Dropout)
    return name_of(node) in CASTS | SHAPE_ONLY | {"dropout"}


def _called(node: fx.Node) -> str:
    return name_of(node) or str(node.target)


def _factors(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Both factors of a product as stacks [1, heads, rows, columns], and what turns such a product into the result."""
    left, right = [value_of(x) for x in tree_leaves((node.args, node.kwargs)) if isinstance(x, fx.Node)][-2:]
    back = ".squeeze(0)" if value_of(node).dim() == 3 else ""
    if name_of(node) == "einsum":
        left, right, back = _as_matrices(left, right, value_of(node))
    return _stacked(left, "a factor"), _stacked(right, "a factor"), back


def _as_matrices(
    left: torch.Tensor, right: torch.Tensor, product: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The axes of two factors put in the order in which a plain product of them gives `product`, or gives it with its
    heads behind its rows."""
    backs = [("", product), (".transpose(1, 2)", product.transpose(1, 2))] if product.dim() == 4 else []
    for a, b in product_of(permutations(range(left.dim())), permutations(range(right.dim()))):
        one, other = left.permute(a), right.permute(b)
        if one.dim() != other.dim() or one.shape[-1] != other.shape[-2] or one.shape[:-2] != other.shape[:-2]:
            continue
        for back, wanted in backs or [(".squeeze(0)", product)]:
            if (*one.shape[:-1], other.shape[-1]) == wanted.shape and torch.allclose(one @ other, wanted, atol=1e-4):
                return one, other, back
    raise InlineError("its einsum is no product of two stacks of matrices")


def _stacked(x: torch.Tensor, what: str) -> torch.Tensor:
    """[heads, rows, columns] or [1, heads, rows, columns] -> the latter."""
    x = x.unsqueeze(0) if x.dim() == 3 else x
    if x.dim() != 4 or x.shape[0] != 1:
        raise InlineError(f"{what} of shape {tuple(x.shape)} is no stack of heads")
    return x


def _square(x: torch.Tensor, heads: int) -> torch.Tensor:
    x = _stacked(x, "its softmax")[0]
    if x.shape[0] != heads or x.shape[1] != x.shape[2]:
        raise InlineError(f"its softmax of shape {tuple(x.shape)} does not weigh tokens against tokens")
    return x


def _of_torch(node: fx.Node) -> InlineAttention:
    """scaled_dot_product_attention, from what it is called with."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    query, key, value = (_stacked(value_of(given[name]), name) for name in names[:3])
    heads, tokens = query.shape[1], query.shape[2]
    if key.shape[1] not in (1, heads) and not given.get("enable_gqa"):
        raise InlineError(f"{heads} query heads do not go with {key.shape[1]} key heads")
    scale = given.get("scale")
    scores = query @ key.repeat_interleave(heads // key.shape[1], 1).transpose(-1, -2)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if given.get("is_causal"):
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
    if isinstance(mask := given.get("attn_mask"), fx.Node):
        added = value_of(mask)
        scores = scores.masked_fill(~added, -math.inf) if added.dtype == torch.bool else scores + added
    visible = scores.softmax(-1)[0] > 0
    return InlineAttention(node, node, query, key, value, scores[0], visible, _stacked(value_of(node), "output"))


@dataclass(frozen=True)
class Measured:
    """What lies between the products of query and key and the softmax.

    Attributes:
        scale: what the products are multiplied by.
        slopes: per head, how much is added for each token that a key is nearer; None where nothing is.
        rounded: whether the slopes hold to the precision of bfloat16 only.
    """

    scale: float
    slopes: tuple[float, ...] | None
    rounded: bool


def check_both_ways(one: InlineAttention, measured: Measured) -> None:
    """Whether of the tokens behind one the scores are made as of those before it.

    Raises:
        InlineError: they are not, or something is added to them.
    """
    added = one.logits.double() - measured.scale * one.products
    off = (added - added[..., :1]).abs().max().item()
    if measured.slopes is not None or not off <= _EXACT * one.logits.abs().max().item():
        raise InlineError("it adds something to the scores, and its tokens see those after them")


_EXACT = 1e-4
_ROUNDED = 2.0**-7
"""What two numbers, each rounded to bfloat16, may be off together, relative to the larger."""


def measure(one: InlineAttention, two: InlineAttention) -> Measured:
    """Compare two draws of one attention under a mask that hides nothing.

    Raises:
        InlineError: the scores are not scale * products + slope * distance.
    """
    seen = one.visible & two.visible & torch.ones_like(one.visible).tril()
    logits, products = one.logits.double() - two.logits.double(), one.products - two.products
    moved, by = logits[seen], products[seen]
    scale = _plain(((moved @ by) / (by @ by)).item())
    if not (moved - scale * by).abs().max() <= _EXACT * moved.abs().max():
        raise InlineError("its scores are no multiple of query times key, something added aside")
    added = torch.where(seen, one.logits.double() - scale * one.products, 0.0)
    size = one.logits[seen].abs().max().item()
    slopes, rounded = _slopes(added, seen, size)
    if slopes is not None and rounded:
        slopes = _before_rounding(slopes, scale, added, seen, size)
    return Measured(scale, slopes, rounded)


def _slopes(added: torch.Tensor, seen: torch.Tensor, size: float) -> tuple[tuple[float, ...] | None, bool]:
    """What is added to a key for each token that it is nearer, in every row alike. A constant of a row adds nothing."""
    tokens = added.shape[-1]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    own = added.diagonal(dim1=-2, dim2=-1)[..., None]
    rise = torch.where(seen, own - added, 0.0)
    steps = torch.where(seen, distance.double(), 0.0)
    slopes = (rise * steps).sum((-2, -1)) / (steps * steps).sum((-2, -1))
    off = (rise - slopes[:, None, None] * steps).abs().max().item()
    if rise.abs().max().item() <= _EXACT * size:
        return None, False
    if off > _ROUNDED * added.abs().max().item():
        raise InlineError("what it adds to the scores does not grow evenly with the distance of two tokens")
    rounded = off > _EXACT * size
    return tuple(map(_plain, slopes.tolist())), rounded


def _before_rounding(
    slopes: tuple[float, ...], scale: float, added: torch.Tensor, seen: torch.Tensor, size: float
) -> tuple[float, ...]:
    """The slopes that were rounded to bfloat16 before they were multiplied with positions and rounded once more, if
    that is how all that was added came about; else those given, the line through what it was rounded to."""
    exact = torch.tensor(slopes, dtype=torch.float64).div(scale).to(torch.bfloat16)
    positions = torch.arange(added.shape[-1], dtype=torch.bfloat16)
    again = (exact[:, None] * positions).double() * scale
    off = torch.where(seen, added - added[..., :1] - again[:, None, :], 0.0).abs().max().item()
    return tuple(map(_plain, (exact.double() * scale).tolist())) if off <= _EXACT * size else slopes


def check_rises(measured: Measured, rises: torch.Tensor, size: float) -> Measured:
    """Whether the slopes hold over a long context too, `rises` [heads, tokens] up to its last token.

    Raises:
        InlineError: they do not, not even to the precision of bfloat16.
    """
    assert measured.slopes is not None
    distance = torch.arange(rises.shape[-1] - 1, -1, -1).double()
    off = (rises - torch.tensor(measured.slopes).double()[:, None] * distance).abs()
    worst = off[~off.isnan()].max().item()
    if worst > _ROUNDED * size:
        raise InlineError("what it adds to the scores of far tokens does not grow as it does for near ones")
    return replace(measured, rounded=measured.rounded or worst > _EXACT * size)


def _plain(measured: float) -> float:
    """The number to the digits that float32 can be trusted with."""
    return float(f"{measured:.7g}")


def shared_heads(inline: InlineAttention) -> int:
    """How many heads in a row have one key and one value, because fewer were repeated."""
    heads = inline.key.shape[1]
    if inline.value.shape[1] != heads:
        raise InlineError(f"it has {heads} key heads and {inline.value.shape[1]} value heads")

    def alike(x: torch.Tensor, count: int) -> bool:
        return torch.equal(x, x[:, ::count].repeat_interleave(count, 1))

    divisors = [n for n in range(heads, 0, -1) if heads % n == 0]
    return next(n for n in divisors if alike(inline.key, n) and alike(inline.value, n))


def layouts(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(what to write after a name, the tensor so made) of the ways to get a stack [1, heads, tokens, dim] from x."""
    if x.dim() == 4:
        yield "", x
        yield ".transpose(1, 2)", x.transpose(1, 2)
        yield ".transpose(-1, -2)", x.transpose(-1, -2)
        yield ".permute(0, 2, 3, 1)", x.permute(0, 2, 3, 1)
    elif x.dim() == 3:
        yield ".unsqueeze(0)", x.unsqueeze(0)
        yield ".transpose(-1, -2).unsqueeze(0)", x.transpose(-1, -2).unsqueeze(0)
        yield ".transpose(0, 1).unsqueeze(0)", x.transpose(0, 1).unsqueeze(0)
