"""Whether a model, left to itself, numbers its tokens by looking at which tokens they are.

Some leave out padding: their first position is not 0, and a padding token in the middle of a prompt shifts those after
it. An engine knows positions, and which of the tokens before were padding only where each call holds whole prompts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tfbackend.graph.interface import RUN_ERRORS, answering, buffers_on_meta, passing_experts, unattended
from tfbackend.graph.masks import masks_that_answer
from tfbackend.graph.observe import TOKENS, Observation, call_keywords, model_inputs
from tfbackend.graph.rehearsal import Rehearsal

_LOOK_UPS = frozenset({"embedding", "index_select"})
_COUNTS = frozenset({"cumsum", "cumulative_sum"})


def numbers_by_tokens(base: nn.Module, vocabulary: str) -> str:
    """Paths of the tables in which the model looks up a count of token ids that it made itself.

    The base model runs on meta once more, without positions; "" where it has no such table, or does not run so.
    """
    tables = {id(m.weight): name for name, m in base.named_modules() if isinstance(m, nn.Embedding)}
    tables = {key: name for key, name in tables.items() if name != vocabulary}
    if not tables:
        return ""
    inputs = model_inputs(base, torch.device("meta"))
    if inputs.pop("position_ids", None) is None:
        return ""
    derived = _Derived(inputs["input_ids"], tables)
    # Where it ends early it wants positions, or has shown its tables by then.
    early = suppress(*RUN_ERRORS)
    meta = buffers_on_meta(base)
    with early, torch.no_grad(), meta, masks_that_answer(), answering(unattended), passing_experts(), derived:
        base(**inputs)
    return ", ".join(dict.fromkeys(derived.found))


class _Derived(TorchFunctionMode):
    """Follows whole numbers made of the token ids, and of a count of them, until they are looked up in `tables`."""

    def __init__(self, ids: torch.Tensor, tables: dict[int, str]) -> None:
        super().__init__()
        self.tables, self.found = tables, list[str]()
        self._kept: dict[int, torch.Tensor] = {id(ids): ids}
        self._counts: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(id(x) in self._kept for x in given):
            return result
        name = getattr(func, "__name__", "")
        counted = name in _COUNTS or any(id(x) in self._counts for x in given)
        if name in _LOOK_UPS:
            self.found += [self.tables[id(x)] for x in given if counted and id(x) in self.tables]
            return result
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and not made.dtype.is_floating_point:
                self._kept[id(made)] = made
                self._counts |= {id(made)} if counted else set()
        return result


@dataclass(frozen=True)
class TokenNumbering:
    """Positions as a model makes them of token ids: counted from `start` on without padding, which has `start - 1`.

    Attributes:
        padding: id of the padding token.
        start: position of the first token that is no padding.
        rows: places in the smallest table of positions.
    """

    padding: int
    start: int
    rows: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that there are places for."""
        return self.rows - self.start

    def number(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids [tokens] of whole prompts side by side, and places in them [tokens] -> positions [tokens]."""
        real = (ids != self.padding).to(positions.dtype)
        counts = real.cumsum(0)
        first = (torch.arange(ids.shape[0], device=ids.device) - positions).clamp(min=0)
        return (counts - counts[first] + real[first]) * real + (self.start - 1)

    def __str__(self) -> str:
        return f"positions counted from {self.start} on, without token {self.padding}"


def read_numbering(base: nn.Module, seen: Observation, vocabulary: str, padding: int | None) -> TokenNumbering | str:
    """How the model numbers its tokens by looking at which they are, or why that is not known.

    It runs on several prompts with and without positions; all that it then looks up must be the same.
    """
    if padding is None:
        return "its config names no padding token"
    tables = [n for n, m in base.named_modules() if isinstance(m, nn.Embedding) and n != vocabulary and n in seen.calls]
    rehearsal = Rehearsal(base, seen)
    try:
        plain = looked_up(rehearsal, tables, _inputs(rehearsal, _prompts(padding)[0], None))
        for table in tables:
            if plain[table].shape[-1] != TOKENS or plain[table].numel() != TOKENS:
                continue
            module = base.get_submodule(table)
            assert isinstance(module, nn.Embedding)
            found = TokenNumbering(padding, int(plain[table].flatten()[0]), module.num_embeddings)
            if all(_explains(found, rehearsal, tables, table, ids) for ids in _prompts(padding)):
                return found
    except RUN_ERRORS as error:
        return f"it does not run by itself: {type(error).__name__}: {error}"
    return "they are counted in no way that is known"


def renumbered(base: nn.Module, seen: Observation, vocabulary: str) -> str:
    """Paths of the tables of which the model looks up other rows when it is given the places of tokens as positions
    than when it is given none; "" where it does not, or does not run without."""
    tables = [n for n, m in base.named_modules() if isinstance(m, nn.Embedding) and n != vocabulary and n in seen.calls]
    if not tables or "position_ids" not in call_keywords(base, torch.zeros(0)):
        return ""
    rehearsal, ids, places = Rehearsal(base, seen), torch.arange(1, TOKENS + 1), torch.arange(TOKENS)
    try:
        own, ours = (looked_up(rehearsal, tables, _inputs(rehearsal, ids, given)) for given in (None, places))
    except RUN_ERRORS:
        return ""
    return ", ".join(name for name in tables if not bool((own[name] == ours[name]).all()))


def _prompts(padding: int) -> list[torch.Tensor]:
    """Prompts of TOKENS tokens, the first without padding."""
    ids = torch.tensor([n for n in range(TOKENS + 1) if n != padding][:TOKENS])
    made = [ids]
    for places in ((TOKENS - 1,), (0,), (2, 3), (0, 3, TOKENS - 1), range(TOKENS)):
        made.append(ids.index_fill(0, torch.tensor([*places]), padding))
    return made


def _explains(found: TokenNumbering, rehearsal: Rehearsal, tables: list[str], table: str, ids: torch.Tensor) -> bool:
    positions = found.number(ids, torch.arange(TOKENS))
    own, ours = (looked_up(rehearsal, tables, _inputs(rehearsal, ids, given)) for given in (None, positions))
    return torch.equal(own[table].flatten(), positions) and all(torch.equal(own[name], ours[name]) for name in tables)


def _inputs(rehearsal: Rehearsal, ids: torch.Tensor, positions: torch.Tensor | None) -> dict[str, Any]:
    inputs = {"input_ids": ids[None]} | call_keywords(rehearsal.twin, torch.zeros(0))
    inputs.pop("position_ids")
    return inputs | ({} if positions is None else {"position_ids": positions[None]})


def looked_up(rehearsal: Rehearsal, tables: list[str], inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Path of each table -> the rows that are first looked up in it in a call of TOKENS tokens."""
    rows: dict[str, torch.Tensor] = {}

    def visit(module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = rehearsal.paths[id(module)]
        rows.setdefault(path, (args[0] if args else kwargs["input"]).clone())
        return rehearsal.blank(path)

    rehearsal.run(dict.fromkeys(tables, visit), seed=6, hiding=True, inputs=inputs)
    return rows
