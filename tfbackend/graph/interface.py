"""Calls that a Transformers model makes and we answer: its attention and experts interfaces, and its rotary embeddings
on meta."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tfbackend.graph.routed import reads_values, stand_in

RUN_ERRORS = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, NameError),
    *(AssertionError, ArithmeticError, ImportError, SyntaxError),
)
"""What the forward of a model may raise when it runs in other circumstances than its author had in mind."""

HARMLESS = frozenset(
    "position_ids cache_position use_cache output_attentions output_hidden_states return_dict past_key_values "
    "past_key_value logits_to_keep position_embeddings sliding_window deterministic input_ids cu_seq_lens_q "
    "cu_seq_lens_k max_length_q max_length_k num_items_in_batch".split()
)
"""Keywords that Transformers' own eager attention ignores. The window counts only through the mask, there as here."""

Recorder = Callable[..., Any]
_recorders: list[Recorder] = []


def attention_interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers' attention modules call: [1, heads, tokens, dim] in, [1, tokens, heads, v_dim] out.

    While a recorder listens (a meta run, a trace, a proof) it answers; in the engine vLLM's attention layer, which
    `apply` put on the module, does.
    """
    if _recorders:
        return _recorders[-1](module, query, key, value, attention_mask, **keywords), None
    tokens, heads = query.shape[2], query.shape[1]
    attn = _next_layer(module)
    output = attn(
        query.transpose(1, 2).reshape(tokens, -1),
        key.transpose(1, 2).reshape(tokens, -1),
        value.transpose(1, 2).reshape(tokens, -1),
        **_biases(module, keywords),
    )
    return output.view(1, tokens, heads, -1), None


DISTANCES = "tfb_distances"
"""Attribute of a module that tells attention how its scores change with the distance: the keyword in which it does."""


def _biases(module: nn.Module, keywords: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What is added to scores, as the layers take it: for each key [tokens, KV heads], or for each query and distance
    [tokens, heads, extent]."""
    bias, named = keywords.get("key_bias"), getattr(module, DISTANCES, None)
    given = {} if bias is None else {"key_bias": bias[0].t()}
    return given if named is None else given | {"distance_bias": keywords[named][0].transpose(0, 1)}


def latest_place(positions: torch.Tensor, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for the positions of queries, shaped as `positions`, and of keys where a bias is to be given as a
    table: each query is the last of `extent` tokens, and those are the keys."""
    keys = torch.arange(extent, dtype=positions.dtype, device=positions.device)
    return torch.full_like(positions, extent - 1), keys.view(*positions.shape[:-1], extent)


EXPERT_SWITCHES = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def has_experts_interface(module: nn.Module) -> bool:
    """Whether the module's forward asks Transformers' experts interface what to do."""
    return all(hasattr(module, switch) for switch in EXPERT_SWITCHES) and hasattr(type(module).forward, "__wrapped__")


def experts_interface(module: nn.Module, hidden_states: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
    """What Transformers' experts call with [tokens, hidden] and the ids and weights [tokens, top_k] of their router.

    Answers with the layer that `apply` or a proof put on the module, else as Transformers would, else, on meta, with a
    tensor of the right shape.
    """
    routed: Any = module._modules.get("routed")
    if routed is not None:
        output: torch.Tensor = routed(hidden_states, *args, *keywords.values())
        return output
    if hidden_states.is_meta:
        return torch.empty_like(hidden_states)
    output = inspect.unwrap(type(module).forward)(module, hidden_states, *args, **keywords)
    return output


LAYERS, CALLS = "tfb_attention_layers", "tfb_attention_calls"
"""Attributes of a module that calls the interface several times in one forward of the model: the names of its
attention layers, one for each call, and how many of them have been made."""


def _next_layer(module: Any) -> Any:
    """The attention layer for this call, each call having keys and values of its own."""
    names = getattr(module, LAYERS, None)
    if names is None:
        return module.attn
    call = module.tfb_attention_calls
    if call >= len(names):
        raise RuntimeError(f"attention is called more than the {len(names)} times that were seen when it was planned")
    module.tfb_attention_calls = call + 1
    return getattr(module, names[call])


GROUPED = "tfb_grouped"
"""Attribute of the class of a module that is a stack of linears, each for a group of rows: its GroupedLinearSpec."""


@dataclass(frozen=True)
class InlineNumbers:
    """What attention that a model writes out by itself was found to do; see AttentionSpec for the fields.

    Attributes:
        scale: multiplies q.k before the softmax.
        window: how many latest tokens a token sees; None for all.
        alibi_slopes: one for each head, or None.
        rounded: whether the original rounds its ALiBi bias to bfloat16.
        key_bias: whether each key has a bias.
        max_context: tokens beyond which the original leaves some out.
        both: whether a token sees those after it too.
    """

    scale: float
    window: int | None = None
    alibi_slopes: tuple[float, ...] | None = None
    rounded: bool = False
    key_bias: bool = False
    max_context: int | None = None
    both: bool = False


def inline_attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What stands where a model wrote attention out by itself: [1, heads, tokens, dim] in and out, as `value` is typed.

    While planning, `module.inline_numbers` tells a recorder what the original was found to do.
    """
    keywords = _measured(module)
    output, _ = attention_interface(module, query.to(value.dtype), key.to(value.dtype), value, None, **keywords)
    return output.transpose(1, 2)


def key_biased_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """What stands where a model calls its interface with a mask that only adds `bias` [1, KV heads, tokens] to the
    scores of each key; shapes as of `attention_interface`."""
    return attention_interface(module, query, key, value, None, key_bias=bias, **_measured(module))


def _measured(module: nn.Module) -> dict[str, Any]:
    numbers: InlineNumbers | None = getattr(module, "inline_numbers", None)
    return {} if numbers is None else {"scaling": numbers.scale, "is_causal": not numbers.both, "inline": numbers}


POSITIONS = "tfb_positions"
"""Attribute of a module that numbers tokens itself: the positions [tokens] of the call that is running, or None."""

_positions: list[torch.Tensor] = []


def token_positions(module: nn.Module, counted: torch.Tensor, start: int) -> torch.Tensor:
    """What stands where a model counted tokens [tokens] from `start`: their positions where those are known."""
    positions = _known_positions(module)
    if positions is None:
        return counted
    _check_count(counted.shape[0], positions)
    return positions.to(counted.dtype) + start


def token_rows(module: nn.Module, table: torch.Tensor, axis: int, start: int, taken: torch.Tensor) -> torch.Tensor:
    """What stands where a model took rows [start : start + tokens] of `table` along `axis`: those of the positions."""
    positions = _known_positions(module)
    if positions is None:
        return taken
    _check_count(taken.shape[axis], positions)
    return table.index_select(axis, positions + start)


def _known_positions(module: nn.Module) -> torch.Tensor | None:
    return _positions[-1] if _positions else getattr(module, POSITIONS, None)


def _check_count(count: int, positions: torch.Tensor) -> None:
    if _positions and count != positions.shape[0]:
        raise RuntimeError(f"it counts {count} things where there are {positions.shape[0]} tokens")


@contextmanager
def positions_given(positions: torch.Tensor) -> Iterator[None]:
    """While planning: let modules that number tokens themselves use `positions` [tokens]."""
    _positions.append(positions)
    try:
        yield
    finally:
        _positions.pop()


def unattended(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """A recorder for runs in which only the shape of what attention gives counts."""
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


@contextmanager
def answering(recorder: Recorder) -> Iterator[None]:
    """Let `recorder(module, query, key, value, mask, **keywords) -> tensor` answer the attention interface."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Swap real buffers for meta ones, so that they mix with meta activations; the real ones come back."""
    kept = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None and not b.is_meta]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.to("meta")
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


@contextmanager
def as_it_was(base: nn.Module) -> Iterator[None]:
    """While entered, modules of `base` may write into their attributes; afterwards those are what they were."""
    own = frozenset(vars(nn.Module())) - {"training"}
    kept = [(module, {n: v for n, v in vars(module).items() if n not in own}) for module in base.modules()]
    try:
        yield
    finally:
        for module, attributes in kept:
            for name in [name for name in vars(module) if name not in own and name not in attributes]:
                del vars(module)[name]
            vars(module).update(attributes)


def rescales(module: nn.Module) -> bool:
    """Whether a rotary embedding recomputes its frequencies from the positions of each call."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    if not any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
        return False
    return inspect.unwrap(type(module).forward) is not type(module).forward


def call_on_meta(
    original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, looped: set[type[nn.Module]] | None = None
) -> Any:
    """Call a module on meta tensors; a rotary embedding that would look at position values is spared the look.

    Experts that look at which of them have tokens are answered for. Their class is put into `looped`.
    """
    if rescales(module):
        return inspect.unwrap(type(module).forward)(module, *args, **kwargs)
    try:
        return original(module, *args, **kwargs)
    except RUN_ERRORS as error:
        output = stand_in(args, kwargs) if reads_values(error) else None
        if output is None:
            raise
        if looped is not None:
            looped.add(type(module))
        return output


@contextmanager
def calls_made_by(call: Callable[[Callable[..., Any], nn.Module, Any, Any], Any]) -> Iterator[None]:
    """While entered, `call(original, module, args, kwargs)` is what calling any module comes to; `original(module,
    *args, **kwargs)` calls it as it was called before."""
    original = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, args, kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def passing_experts() -> AbstractContextManager[None]:
    """Answer, in a run on meta tensors, for experts that look at which of them have tokens."""
    return calls_made_by(call_on_meta)
