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
from dataclasses import dataclass

from tfbackend.graph.query import CASTS, SHAPE_ONLY
from tfbackend.source.edits import Edit, apply_edits
from tfbackend.source.forward import ForwardSource, SourceError


def cut(source: ForwardSource, start: ast.expr, end: ast.expr, replacement: str, by: str) -> str:
    """The text of `source` with `end` replaced and everything computed from `start` before it gone.

    Raises:
        SourceError: that cannot be done safely.
    """
    gone = removal(source, start, end, by)
    gone.check(ast.parse(replacement, mode="eval"))
    edits = [Edit(*source.offsets(end), replacement, by), *gone.edits]
    return _without_leftovers(apply_edits(source.text, edits), set(gone.reads))


@dataclass(frozen=True)
class Removal:
    """What taking a computation out leaves to be said of it.

    Attributes:
        edits: that take out its statements; the expression it ends in is not touched.
        lost: names that no longer have their values there.
        reads: names that the statements read.
    """

    edits: tuple[Edit, ...]
    lost: frozenset[str]
    reads: frozenset[str]

    def check(self, *expressions: ast.AST) -> None:
        """Whether expressions that are to stand at the end read what is gone.

        Raises:
            SourceError: they do.
        """
        if missing := self.lost & set(_read(expressions, None)):
            raise SourceError(f"{', '.join(sorted(missing))} would no longer be computed")


def removal(source: ForwardSource, start: ast.expr, end: ast.expr, by: str, instead: str = "") -> Removal:
    """Take out everything that is computed from `start` before `end`; `instead` is a statement for where it started.

    Raises:
        SourceError: that cannot be done safely.
    """
    cutter = _Cutter(source, start, end)
    cutter.block(source.tree.body, ())
    if not cutter.ended:
        raise SourceError("the end of the computation was not met after its start")
    edits: list[Edit] = []
    nothing: list[tuple[str, _Block]] = []
    for gone in cutter.gone:
        kept = [n for n in gone.names if n in cutter.wanted and not _known(n, gone.block, nothing)]
        nothing += [(name, gone.block) for name in kept]
        texts = [instead] if instead and _inside(start, [gone.statement]) else []
        texts += [" = ".join([*kept, "None"])] if kept else []
        edits.append(Edit(*source.offsets(gone.statement), "; ".join(texts) or "pass", by))
    reads = frozenset(name for gone in cutter.gone for name in gone.reads)
    return Removal(tuple(edits), frozenset(cutter.lost_at_end), reads)


_Block = tuple[int, ...]
"""Where a statement stands: the numbers of the blocks around it, outermost first."""


@dataclass(frozen=True)
class _Gone:
    """A statement to be taken out, the names that it would have bound and those that it read."""

    statement: ast.stmt
    names: tuple[str, ...]
    reads: frozenset[str]
    block: _Block


def _known(name: str, block: _Block, nothing: Sequence[tuple[str, _Block]]) -> bool:
    """Whether the name was set to None earlier, on every way to this block."""
    return any(name == other and block[: len(outer)] == outer for other, outer in nothing)


class _Cutter:
    """Walks statements in the order of the text.

    Attributes:
        lost: names whose values are no longer computed.
        gone: statements to be taken out.
        wanted: lost names that the remaining text still reads.
        ended, lost_at_end: whether the end was met, and what was lost then.
    """

    def __init__(self, source: ForwardSource, start: ast.expr, end: ast.expr) -> None:
        self.source, self.start, self.end = source, start, end
        self.lost: set[str] = set()
        self.gone: list[_Gone] = []
        self.wanted: set[str] = set()
        self.ended = False
        self.lost_at_end: set[str] = set()

    def block(self, statements: Sequence[ast.stmt], place: _Block) -> None:
        for statement in statements:
            if isinstance(statement, (ast.If, ast.With)):
                self._compound(statement, place)
            elif isinstance(statement, (ast.For, ast.While, ast.Try, ast.FunctionDef, ast.ClassDef, ast.Match)):
                if self._concerned([statement]) or _inside(self.end, [statement]):
                    raise SourceError(f"the computation runs through a {type(statement).__name__}")
                self.lost -= _stored([statement])
            else:
                self._simple(statement, place)

    def _compound(self, statement: ast.If | ast.With, place: _Block) -> None:
        heads = [statement.test] if isinstance(statement, ast.If) else [item.context_expr for item in statement.items]
        if not self._concerned(heads):
            self.block(statement.body, (*place, 2 * statement.lineno))
            self.block(statement.orelse if isinstance(statement, ast.If) else [], (*place, 2 * statement.lineno + 1))
            return
        if _inside(self.end, [statement]) or any(isinstance(n, ast.Return) for n in ast.walk(statement)):
            raise SourceError("what is computed decides where the function goes on")
        self._drop(statement, place)

    def _simple(self, statement: ast.stmt, place: _Block) -> None:
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
            self._drop(statement, place)

    def _concerned(self, nodes: Iterable[ast.AST]) -> bool:
        nodes = list(nodes)
        return _inside(self.start, nodes) or bool(self.lost & set(_read(nodes, None)))

    def _keep(self, statement: ast.stmt) -> None:
        self.wanted |= self.lost & set(_read([statement], self.end))

    def _drop(self, statement: ast.stmt, place: _Block) -> None:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                raise SourceError("what is computed is kept on an object")
        names = _stored([statement])
        self.lost |= names
        self.gone.append(_Gone(statement, tuple(sorted(names)), frozenset(_read([statement], None)), place))


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


_HARMLESS = SHAPE_ONLY | CASTS | {"size", "dim", "numel", "zeros", "ones", "empty", "full", "arange", "tensor", "max"}
_HARMLESS |= {"min", "finfo", "zeros_like", "ones_like", "tril", "triu", "int", "float", "len", "sqrt", "expand"}
"""Names of functions and methods that do nothing but to give a value."""


def _without_leftovers(text: str, read_there: set[str]) -> str:
    """The text without what only served what is gone: values that it read and nobody else does, blocks left empty."""
    while True:
        tree = ast.parse(text).body[0]
        assert isinstance(tree, ast.FunctionDef)
        wanted, lines, found = _wanted(tree, read_there), text.split("\n"), False
        for block in _blocks(tree):
            idle = [s for s in block if _is_idle(s, wanted, read_there) and _has_lines_to_itself(lines, s)]
            if len(idle) == len(block):  # something has to stand there
                first, *idle = idle
                idle = idle if isinstance(first, ast.Pass) else [first, *idle]
            for statement in idle:
                found = True
                read_there |= set(_read([statement], None))
                _take_out(lines, statement, alone=len(idle) == len(block))
        if not found:
            return text
        text = "\n".join(line for line in lines if line != _TAKEN)


_TAKEN = "\0"


def _has_lines_to_itself(lines: list[str], statement: ast.stmt) -> bool:
    assert statement.end_lineno is not None
    before = lines[statement.lineno - 1].encode()[: statement.col_offset]
    after = lines[statement.end_lineno - 1].encode()[statement.end_col_offset :].strip()
    return not before.strip() and (not after or after.startswith(b"#"))


def _take_out(lines: list[str], statement: ast.stmt, *, alone: bool) -> None:
    assert statement.end_lineno is not None
    first, count = lines[statement.lineno - 1], statement.end_lineno - statement.lineno + 1
    indent = first[: len(first) - len(first.lstrip())]
    lines[statement.lineno - 1 : statement.end_lineno] = [f"{indent}pass" if alone else _TAKEN, *[_TAKEN] * (count - 1)]


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list) and block:
                yield block


def _wanted(tree: ast.FunctionDef, read_there: set[str]) -> set[str]:
    """Names that are read by more than assignments which might go."""
    spare = [s for block in _blocks(tree) for s in block if _may_go(s, read_there)]
    inside = {id(node) for s in spare for node in ast.walk(s)}
    outside = (node for node in ast.walk(tree) if id(node) not in inside and isinstance(node, ast.Name))
    wanted = {name.id for name in outside if isinstance(name.ctx, ast.Load)}
    while more := {n for s in spare if _stored([s]) & wanted for n in _read([s], None)} - wanted:
        wanted |= more
    return wanted


def _is_idle(statement: ast.stmt, wanted: set[str], read_there: set[str]) -> bool:
    if isinstance(statement, ast.If):
        return _is_harmless(statement.test) and all(isinstance(s, ast.Pass) for s in statement.body + statement.orelse)
    return isinstance(statement, ast.Pass) or (_may_go(statement, read_there) and not _stored([statement]) & wanted)


def _may_go(statement: ast.stmt, read_there: set[str]) -> bool:
    """Whether a statement gives names to values and does nothing else, one of them for what is gone."""
    if not isinstance(statement, ast.Assign) or not _is_harmless(statement.value):
        return False
    targets = [x for target in statement.targets for x in ast.walk(target) if isinstance(x, ast.expr)]
    names_only = all(isinstance(x, (ast.Name, ast.Tuple)) for x in targets)
    return names_only and bool(_stored([statement]) & read_there)


def _is_harmless(value: ast.expr) -> bool:
    calls = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    names = [f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else "" for f in calls]
    return all(name in _HARMLESS for name in names) and not any(isinstance(n, ast.NamedExpr) for n in ast.walk(value))
