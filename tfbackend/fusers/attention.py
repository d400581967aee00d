"""Attention that goes through Transformers' attention interface -> an attention layer over the KV cache.

    attention_interface(self, q, k, v, mask, scaling=self.scaling, softcap=..., s_aux=self.sinks)

The forward stays as it is: the interface calls `self.attn`. Where a module calls it several times in one forward of the
model, from different places or because the model loops over its layers, it calls `self.attn`, `self.attn_2` ... in
turn, each with a KV cache of its own; how many calls there are must not change from one forward to the next.

Heads, scale, soft cap and sinks are read from the call that the model makes; the window is read from what the mask
hides. A keyword that changes the result and has no place in AttentionSpec is a Miss. Attention that a model wrote out
comes here through `inline_attention`, with its numbers. A keyword that says which keys to attend to is none up to the
length of context of which it says all. One that gives a bias for each query and key was made to give tables by
distance beforehand, see distances.py, and the interface hands those to the layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tfbackend.fusers.base import Match, Miss, Rewrite, Site
from tfbackend.graph.interface import CALLS, DISTANCES, HARMLESS, LAYERS, InlineNumbers
from tfbackend.graph.observe import TOKENS, AttentionCall, OwnParameter, TableSize, Unread
from tfbackend.graph.selection import PICKED, Selection
from tfbackend.layerspecs import AttentionSpec


class AttentionFuser:
    name: ClassVar[str] = "attention"

    def match(self, site: Site) -> Match | Miss:
        calls = site.observation.attention.get(site.qualname, [])
        if "attn" in site.taken:
            return Miss(self.name, site.qualname, "another rewrite put an attention layer here", near=False)
        if not calls:
            return Miss(self.name, site.qualname, "does not call the attention interface", near=False)
        return Match({}, claims=frozenset({"attn"}))

    def rewrite(self, site: Site, match: Match) -> Rewrite | Miss:
        calls = site.observation.attention[site.qualname]
        problem = self._problem(site, calls)
        if problem:
            return Miss(self.name, site.qualname, problem, site.place())
        names = _layer_names(len(calls))
        context = (site.observation.selection, site.serving.max_model_len)
        children = tuple((name, spec_of(call, *context)) for name, call in zip(names, calls, strict=True))
        specs = list(dict.fromkeys(spec for _, spec in children))
        times = f", a layer for each of {len(calls)} calls" if len(calls) > 1 else ""
        rounded = any(inline.rounded for call in calls if (inline := _inline(call)) is not None)
        return Rewrite(
            qualname=site.qualname,
            fuser=self.name,
            summary="; ".join(map(str, specs)) + times + (_ROUNDED if rounded else ""),
            children=children,
            attributes=(*(((LAYERS, names), (CALLS, 0)) if len(calls) > 1 else ()), *_distances(specs)),
            claims=frozenset(names),
        )

    def _problem(self, site: Site, calls: list[AttentionCall]) -> str:
        for name in _layer_names(len(calls)):
            if hasattr(site.module, name):
                return f"already has an attribute called {name}"
        if len(calls) > 1 and any(call.keywords.get("s_aux") is not None for call in calls):
            return f"calls the attention interface {len(calls)} times in one forward, with sinks"
        if site.serving.tp_size > 1 and any(_table(call) for call in calls):
            return "its bias by distance is for the heads of all ranks; serve it with --tensor-parallel-size 1"
        if len(calls) > 1 and any(_table(call) for call in calls):
            return f"calls the attention interface {len(calls)} times in one forward, with a bias by distance"
        if not site.serving.whole_prompts and any(call.mask is not None and call.mask.both for call in calls):
            return "a token sees those after it, for which each call would have to hold whole prompts"
        context = (site.observation.selection, site.serving.max_model_len)
        return next(filter(None, (call_problem(call, *context) for call in calls)), "")


def call_problem(call: AttentionCall, selection: Selection | str | None = None, longest: int | None = None) -> str:
    """What of a call of the attention interface no attention layer can do; "" for nothing."""
    if call.mask is None:
        return call.mask_problem
    if spec_of(call, selection, longest).chunk and (problem := _chunk_problem(call)):
        return f"hides what is not of a token's chunk of {call.mask.chunk}, with {problem}"
    if call.mask.both and (problem := _both_problem(call)):
        return f"a token sees those after it, with {problem}"
    if call.query[0] != 1 or call.key[2] != call.query[2]:
        return f"query {tuple(call.query)} and key {tuple(call.key)} are not of the same tokens"
    if call.query[2] != TOKENS:
        return f"it attends over an axis of {call.query[2]} and not over the {TOKENS} tokens of the observed run"
    if call.query[1] % call.key[1]:
        return f"{call.query[1]} query heads do not divide into {call.key[1]} KV heads"
    for key, value in call.keywords.items():
        problem = _keyword_problem(key, value, call)
        if key == PICKED and isinstance(value, torch.Tensor):
            problem = _picked_problem(selection)
        if problem:
            return problem
    return ""


def _picked_problem(selection: Selection | str | None) -> str:
    """Why what attention is told of keys may not be left out."""
    why = selection if isinstance(selection, str) else "" if selection else "which keys it picks is not known"
    return f"the keyword {PICKED} would be dropped: {why}" if why else ""


def _chunk_problem(call: AttentionCall) -> str:
    """What vLLM's attention in chunks has no place for."""
    if call.keywords.get("s_aux") is not None:
        return "sinks"
    if call.keywords.get("softcap"):
        return "a soft cap"
    if (inline := _inline(call)) is not None and inline.key_bias:
        return "a bias for each key"
    if _table(call):
        return "a bias by distance"
    return "value heads of another width" if call.value[3] != call.query[3] else ""


def _both_problem(call: AttentionCall) -> str:
    """What vLLM's attention without a cache has no place for."""
    if call.keywords.get(PICKED) is not None:
        return "a choice of keys"
    return (
        "bounds on its context"
        if (inline := _inline(call)) is not None and inline.max_context
        else _chunk_problem(call)
    )


def _layer_names(calls: int) -> tuple[str, ...]:
    return ("attn", *(f"attn_{number}" for number in range(2, calls + 1)))


def _table(call: AttentionCall) -> tuple[str, TableSize] | None:
    """The keyword of a call that gives tables of biases by distance, and their size."""
    return next(((key, value) for key, value in call.keywords.items() if isinstance(value, TableSize)), None)


def _distances(specs: list[AttentionSpec]) -> tuple[tuple[str, str], ...]:
    return tuple((DISTANCES, spec.distance_bias) for spec in specs if spec.distance_bias)


_ROUNDED = "; Transformers rounds its ALiBi bias to bfloat16, which is not done here"


def _inline(call: AttentionCall) -> InlineNumbers | None:
    numbers: InlineNumbers | None = call.keywords.get("inline")
    return numbers


def spec_of(call: AttentionCall, selection: Selection | str | None = None, longest: int | None = None) -> AttentionSpec:
    """The layer that a call asks for, in contexts in which the keys that it picks are all keys; a chunk that none of
    `longest` tokens gets to the end of hides nothing."""
    bound = selection.bound if isinstance(selection, Selection) else None
    chunk = call.mask.chunk if call.mask else None
    sinks, scale, inline = call.keywords.get("s_aux"), call.keywords.get("scaling"), _inline(call)
    keyword, size = _table(call) or (None, None)
    return AttentionSpec(
        num_heads=call.query[1],
        num_kv_heads=call.key[1],
        head_dim=call.query[3],
        v_head_dim=call.value[3],
        scale=float(scale) if scale is not None else call.query[3] ** -0.5,
        window=inline.window if inline else call.mask.window if call.mask else None,
        chunk=None if chunk is None or (longest is not None and chunk >= longest) else chunk,
        soft_cap=call.keywords.get("softcap"),
        sinks=sinks.name if sinks is not None else None,
        alibi_slopes=inline.alibi_slopes if inline else None,
        key_bias=inline.key_bias if inline else False,
        both=bool(call.mask and call.mask.both),
        distance_bias=keyword,
        extent=size.extent if size else 0,
        max_context=inline.max_context if inline else bound if call.keywords.get(PICKED) is not None else None,
    )


def _keyword_problem(key: str, value: Any, call: AttentionCall) -> str:
    heads = call.query[1]
    if value is None or key in HARMLESS:
        return ""
    if isinstance(value, TableSize):
        fits = value.heads in (1, heads) and value.tokens == call.query[2]
        return "" if fits else f"its bias by distance is for {value.heads} heads and {value.tokens} tokens"
    if key == "inline" and isinstance(value, InlineNumbers):
        return ""
    if key in ("scaling", "softcap"):
        return "" if isinstance(value, (int, float)) else f"{key} is a {type(value).__name__}, not a number"
    if key == "dropout":
        return "" if value == 0.0 else f"dropout {value} in evaluation"
    if key == "is_causal":
        both = call.mask is not None and call.mask.both
        return (
            ""
            if isinstance(value, bool) and value is not both
            else f"is_causal is {value}, and its mask says otherwise"
        )
    if key == "s_aux":
        if not isinstance(value, OwnParameter):
            return "its attention sinks are no parameter of the module"
        return "" if tuple(value.shape) == (heads,) else f"its sinks are {tuple(value.shape)} for {heads} heads"
    if key == "key_bias" and (inline := _inline(call)) and inline.key_bias:
        wanted = (1, call.key[1], call.key[2])
        return "" if tuple(value.shape) == wanted else f"its bias is {tuple(value.shape)} where keys are {wanted}"
    why = f": {value.why}" if isinstance(value, Unread) else ""
    return f"the keyword {key} would be dropped{why}"
