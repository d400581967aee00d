"""Buffers that a forward assigns to itself, kept in local names instead: a compiled graph cannot replace a buffer.

self.table = self.table.to(x.device)        ->        tfb_table = self.table.to(x.device)
y = self.table[position_ids]                           y = tfb_table[position_ids]
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from tfbackend.source.edits import Edit, apply_edits
from tfbackend.source.forward import ForwardSource


def buffers_as_locals(source: ForwardSource, buffers: Collection[str]) -> str:
    """The text of the forward with each assignment of a buffer, and every read after it, moved to a local name.

    Only where the assignment is a statement of the forward itself, which every call passes before the reads.
    """
    edits: list[Edit] = []
    for statement in source.tree.body:
        for name in _assigned(source, statement, buffers):
            local = source.fresh(f"tfb_{name}")
            for use in source.self_uses(name):
                if isinstance(use.ctx, ast.Store) or use.lineno > (statement.end_lineno or statement.lineno):
                    edits.append(Edit(*source.offsets(use), local, "buffers"))
    return apply_edits(source.text, edits)


def _assigned(source: ForwardSource, statement: ast.stmt, buffers: Collection[str]) -> Iterator[str]:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return
    target = statement.targets[0]
    if isinstance(target, ast.Attribute) and target.attr in buffers:
        uses = source.self_uses(target.attr)
        stores = [use for use in uses if isinstance(use.ctx, ast.Store)]
        if target in uses and len(stores) == 1 and all(use.lineno >= statement.lineno for use in uses):
            yield target.attr
