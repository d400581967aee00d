"""Taking a computation out of a function: the expression it ends in is replaced, and all that led only there goes.

    scores = query @ key.T                                  context = inline_attention(self, query, key, value)
    scores = scores + mask                        ->        return self.out(context), weights
    weights = scores.softmax(-1)
    context = weights @ value
    return self.out(context), weights                       (weights = None stands where the caller still gets them)

What is cut is followed by names, statement by statement in the order of the text. Everything here refuses when in
doubt; whether the rest still does the same is for a proof on numbers to say.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from tfbackend.source.edits import Edit, apply_edits
from tfbackend.source.forward import ForwardSource, SourceError


def cut(source: ForwardSource, start: ast.expr, end: ast.expr, replacement: str, by: str) -> str:
    """The text of `source` with `end` replaced and everything computed from `start` before it gone.

    Raises:
        SourceError: that cannot be done safely.
    """
    cutter = _Cutter(source, start, end)
    cutter.block(source.tree.body)
    if not cutter.ended:
        raise SourceError("the end of the computation was not met after its start")
    if missing := cutter.lost_at_end & set(_read([ast.parse(replacement, mode="eval")], None)):
        raise SourceError(f"{', '.join(sorted(missing))} would no longer be computed")
    edits = [Edit(*source.offsets(end), replacement, by)]
    for statement, names in cutter.gone:
        kept = [name for name in names if name in cutter.wanted]
        text = " = ".join([*kept, "None"]) if kept else "pass"
        edits.append(Edit(*source.offsets(statement), text, by))
    return _without_passes(apply_edits(source.text, edits))


class _Cutter:
    """Walks statements in the order of the text.

    Attributes:
        lost: names whose values are no longer computed.
        gone: statements to be taken out, with the names that they would have bound.
        wanted: lost names that the remaining text still reads.
        ended, lost_at_end: whether the end was met, and what was lost then.
    """

    def __init__(self, source: ForwardSource, start: ast.expr, end: ast.expr) -> None:
        self.source, self.start, self.end = source, start, end
        self.lost: set[str] = set()
        self.gone: list[tuple[ast.stmt, list[str]]] = []
        self.wanted: set[str] = set()
        self.ended = False
        self.lost_at_end: set[str] = set()

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, (ast.If, ast.With)):
                self._compound(statement)
            elif isinstance(statement, (ast.For, ast.While, ast.Try, ast.FunctionDef, ast.ClassDef, ast.Match)):
                if self._concerned([statement]) or _inside(self.end, [statement]):
                    raise SourceError(f"the computation runs through a {type(statement).__name__}")
                self.lost -= _stored([statement])
            else:
                self._simple(statement)

    def _compound(self, statement: ast.If | ast.With) -> None:
        heads = [statement.test] if isinstance(statement, ast.If) else [item.context_expr for item in statement.items]
        if not self._concerned(heads):
            self.block(statement.body)
            self.block(statement.orelse if isinstance(statement, ast.If) else [])
            return
        if _inside(self.end, [statement]) or any(isinstance(n, ast.Return) for n in ast.walk(statement)):
            raise SourceError("what is computed decides where the function goes on")
        self._drop(statement)

    def _simple(self, statement: ast.stmt) -> None:
        if _inside(self.end, [statement]):
            self.ended, self.lost_at_end = True, set(self.lost)
            self._keep(statement)
            self.lost -= _stored([statement])
        elif not self._concerned([statement]):
            self.lost -= _stored([statement])
        elif isinstance(statement, ast.Return):
            if _inside(self.start, [statement]):
                raise SourceError("the function returns before the computation ends")
            self._keep(statement)
        else:
            self._drop(statement)

    def _concerned(self, nodes: Iterable[ast.AST]) -> bool:
        nodes = list(nodes)
        return _inside(self.start, nodes) or bool(self.lost & set(_read(nodes, None)))

    def _keep(self, statement: ast.stmt) -> None:
        self.wanted |= self.lost & set(_read([statement], self.end))

    def _drop(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                raise SourceError("what is computed is kept on an object")
        names = _stored([statement])
        self.lost |= names
        self.gone.append((statement, sorted(names)))


def _inside(wanted: ast.AST, nodes: Iterable[ast.AST]) -> bool:
    return any(child is wanted for node in nodes for child in ast.walk(node))


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    names = (child for node in nodes for child in ast.walk(node) if isinstance(child, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _read(nodes: Iterable[ast.AST], without: ast.AST | None) -> Iterator[str]:
    """Names that are read, those of x += 1 included, not looking into `without`."""
    for node in nodes:
        if node is without:
            continue
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        yield from _read(ast.iter_child_nodes(node), without)


def _without_passes(text: str) -> str:
    """The text less every `pass` that its block can do without."""
    tree = ast.parse(text).body[0]
    lines = text.split("\n")
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(node, field, [])
            spare = [s for s in block if isinstance(s, ast.Pass)] if isinstance(block, list) else []
            for statement in spare[1:] if spare and len(spare) == len(block) else spare:
                if lines[statement.lineno - 1].strip() == "pass":
                    lines[statement.lineno - 1] = "\0"
    return "\n".join(line for line in lines if line != "\0")
