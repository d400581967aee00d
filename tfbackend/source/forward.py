"""The source text of a forward: parsed, tied to trace spans, and compiled again after edits.

Edits are made on the text and not on an unparsed tree, so that a generated forward reads like the one it came from. A
generated class is written to a real file named by its content: tracebacks show the code that ran, and vLLM's compile
cache, which hashes the files it traced, sees a new file when a rewrite changes.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import inspect
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

Span = tuple[int, int, int, int]


class SourceError(Exception):
    """The source of a forward cannot be had or does not lend itself to edits. The message says why."""


@dataclass(frozen=True)
class ForwardSource:
    """One forward.

    Attributes:
        text: its source, dedented, from the `def` line on.
        filename, first_line: where the `def` line stands.
        indent: columns (bytes) that dedenting took off every line.
        function: the unwrapped function object.
        tree: its parsed definition; line numbers count from 1 in `text`.
    """

    text: str
    filename: str
    first_line: int
    indent: int
    function: Callable[..., Any]
    tree: ast.FunctionDef

    @property
    def name(self) -> str:
        return self.tree.name

    @property
    def me(self) -> str:
        """What the forward calls its module, "self" as a rule."""
        return _positional(self.tree)[0].arg

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements, without a docstring unless there is nothing else."""
        body = self.tree.body
        return body[1:] if len(body) > 1 and ast.get_docstring(self.tree) is not None else body

    def place(self, node: ast.AST | None = None) -> str:
        """'file.py:line' of `node`, or of the definition."""
        line = self.first_line + (getattr(node, "lineno", 1) - 1)
        return f"{Path(self.filename).name}:{line}"

    def offsets(self, node: ast.AST) -> tuple[int, int]:
        """Start and end of `node` as character offsets into `text`."""
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        lines = _lines(self.text)
        before = sum(len(text) for text in lines[: line - 1])
        return before + len(lines[line - 1].encode()[:column].decode())

    def expression(self, span: Span | None) -> ast.expr:
        """The expression that a trace span covers exactly.

        Raises:
            SourceError: no expression has exactly that span.
        """
        if span is None:
            raise SourceError("an operation has no place in this forward")
        shift = self.first_line - 1
        wanted = (span[0] - shift, span[1] - self.indent, span[2] - shift, span[3] - self.indent)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr) and _span(node) == wanted:
                return node
        raise SourceError(f"no expression of the forward covers {Path(self.filename).name}:{span[0]} exactly")

    def segment(self, node: ast.AST) -> str:
        start, end = self.offsets(node)
        return self.text[start:end]

    def self_uses(self, child: str) -> list[ast.Attribute]:
        """Every `self.<child>` of the source, in whatever branch."""
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Attribute)
            and node.attr == child
            and isinstance(node.value, ast.Name)
            and node.value.id == self.me
        ]

    def scope_of(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around `node`, innermost first."""
        parents = {id(child): parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}
        current: ast.AST | None = parents.get(id(node))
        while current is not None:
            yield current
            current = parents.get(id(current))

    def fresh(self, stem: str) -> str:
        """A local name that the forward does not use."""
        used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        used |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        name, count = stem, 2
        while name in used:
            name, count = f"{stem}_{count}", count + 1
        return name


def _positional(tree: ast.FunctionDef) -> list[ast.arg]:
    return [*tree.args.posonlyargs, *tree.args.args]


def _lines(text: str) -> list[str]:
    """Lines as Python's parser counts them, ends kept; str.splitlines also breaks at form feeds and the like."""
    return [f"{line}\n" for line in text.split("\n")]


def _span(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


@lru_cache(maxsize=4096)
def _parse(function: Callable[..., Any]) -> ForwardSource:
    try:
        lines, start = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise SourceError(f"the source of {function.__qualname__} cannot be read: {error}") from error
    raw = "".join(lines)
    text = textwrap.dedent(raw)
    indent = len(raw) - len(raw.lstrip(" \t"))
    try:
        tree = ast.parse(text).body[0]
    except SyntaxError as error:
        raise SourceError(f"{function.__qualname__} does not parse on its own: {error}") from error
    if not isinstance(tree, ast.FunctionDef):
        raise SourceError(f"{function.__qualname__} is no plain function")
    head = "\n".join(text.split("\n")[tree.lineno - 1 :])
    shift = tree.lineno - 1
    bare = ast.parse(head).body[0]
    assert isinstance(bare, ast.FunctionDef)
    return ForwardSource(head, function.__code__.co_filename, start + shift, indent, function, bare)


def forward_source(cls: type[nn.Module]) -> ForwardSource:
    """The source of `cls.forward` beneath its decorators.

    Raises:
        SourceError: there is none, or it is a closure (`super()` counts as one), which cannot be compiled elsewhere.
    """
    source = function_source(inspect.unwrap(cls.forward))
    if source.name != "forward":
        raise SourceError(f"its forward is another name of {source.function.__qualname__}")
    return source


def function_source(function: Callable[..., Any], *, with_super: bool = False) -> ForwardSource:
    """The source of a method.

    Args:
        with_super: whether it may say `super()`, which source.supers has edits for.

    Raises:
        SourceError: there is none, or it cannot be compiled elsewhere.
    """
    source = _parse(function)
    if function.__code__.co_freevars and not (with_super and function.__code__.co_freevars == ("__class__",)):
        raise SourceError(f"{function.__qualname__} closes over {', '.join(function.__code__.co_freevars)}")
    if not _positional(source.tree):
        raise SourceError(f"{function.__qualname__} does not name its module")
    defaults = [*source.tree.args.defaults, *(d for d in source.tree.args.kw_defaults if d is not None)]
    for name in (node.id for default in defaults for node in ast.walk(default) if isinstance(node, ast.Name)):
        if name not in function.__globals__ and not hasattr(builtins, name):
            raise SourceError(f"{function.__qualname__} has a default, {name}, that only its class body knew")
    return source


def owner_name(method: str) -> str:
    """What the text of a method calls the class that it was written in."""
    return f"_Owner_{method}"


def _owners(originals: dict[str, Any]) -> dict[str, Any]:
    """What texts call the classes that methods were written in -> the classes."""
    owners = {}
    for name, original in originals.items():
        free = original.__code__.co_freevars
        if "__class__" in free:
            owners[owner_name(name)] = original.__closure__[free.index("__class__")].cell_contents
    return owners


def keep_defaults(made: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`made` with the very defaults of `original`: those of its text were evaluated again, perhaps to other values."""
    made.__defaults__ = original.__defaults__
    made.__kwdefaults__ = original.__kwdefaults__
    return made


_generated: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def generate_class(cls: type[nn.Module], texts: str | Sequence[str], directory: Path) -> type[nn.Module]:
    """A subclass of `cls` with `texts` for methods of the same names, from a file in `directory` named by its content.

    The namespace of the original module is copied into the new one, so a method sees the names it was written with.
    All come from one namespace.
    """
    texts = (texts,) if isinstance(texts, str) else tuple(texts)
    if (known := _generated.get((cls, texts))) is not None:
        return known
    originals = {name: inspect.unwrap(getattr(cls, name)) for name in map(defined_name, texts)}
    body = "\n".join(textwrap.indent(text, "    ") for text in texts)
    code = (
        f"# Generated by tfbackend from {cls.__module__}.{cls.__qualname__}.{', '.join(originals)}\n\n"
        "from __future__ import annotations\n\n\n"
        f"{_imports(body)}"
        f"class {cls.__name__}(_Base):\n{body}"
    )
    digest = hashlib.sha256(code.encode()).hexdigest()[:16]
    name = f"tfbackend_generated_{cls.__name__}_{digest}"
    path = directory / f"{name}.py"
    _write_once(path, code)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    kept = {key: value for key, value in vars(module).items() if key.startswith("__")}
    for original in originals.values():
        vars(module).update(original.__globals__)
    vars(module).update(kept)
    vars(module).update(_owners(originals), _Base=cls)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    made = vars(module)[cls.__name__]
    assert isinstance(made, type) and issubclass(made, nn.Module)
    for name, original in originals.items():
        keep_defaults(vars(made)[name], original)
    _generated[(cls, texts)] = made
    return made


_HELPERS = {
    "inline_attention": "inline_attention",
    "key_biased_attention": "key_biased_attention",
    "tfb_latest_place": "latest_place as tfb_latest_place",
    "tfb_token_positions": "token_positions as tfb_token_positions",
    "tfb_token_rows": "token_rows as tfb_token_rows",
}
"""What edited texts call -> how it is imported from tfbackend.graph.interface."""


def _imports(body: str) -> str:
    names = [spelled for name, spelled in _HELPERS.items() if f"{name}(" in body]
    return f"from tfbackend.graph.interface import {', '.join(names)}\n\n\n" if names else ""


def defined_name(text: str) -> str:
    """What the one function of a text is called."""
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition.name


@lru_cache(maxsize=1)
def scratch() -> Path:
    """A folder for generated classes where none is given."""
    return Path(tempfile.mkdtemp(prefix="tfbackend-"))


def _write_once(path: Path, code: str) -> None:
    """Several ranks write the same file at once; each sees a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text() == code:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(code)
    os.replace(temporary, path)
