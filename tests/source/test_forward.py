"""Sources of forwards, edits of them, and the classes that are made of the result."""

import importlib.util
import sys
import textwrap

import pytest
import torch
from torch import nn

from tfbackend.errors import PlanConflictError
from tfbackend.source.edits import Edit, apply_edits
from tfbackend.source.forward import SourceError, forward_source, generate_class


def test_edits_apply_in_the_order_of_their_places():
    assert apply_edits("a + b", [Edit(4, 5, "d"), Edit(0, 1, "c")]) == "c + d"
    assert apply_edits("äöü = x", [Edit(6, 7, "y")]) == "äöü = y"
    assert apply_edits("ab", [Edit(0, 1, "x"), Edit(1, 2, "y")]) == "xy"
    assert apply_edits("same", []) == "same"


def test_edits_that_overlap_name_their_fusers():
    with pytest.raises(PlanConflictError, match="one and two"):
        apply_edits("abcdef", [Edit(0, 4, "", "one"), Edit(3, 6, "", "two")])


class Base(nn.Module):
    def forward(self, x, scale=3):
        """ünïcödé"""
        return x * scale


class Inherits(Base):
    pass


def load(tmp_path, text, name="made_for_this_test"):
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_inherited_forward_runs_with_the_names_of_its_own_file(tmp_path):
    there = load(
        tmp_path,
        """
        from torch import nn
        FACTOR = 5
        class Far(nn.Module):
            def forward(self, x):
                return x * FACTOR
    """,
    )
    FACTOR = 7  # noqa: F841

    class Near(there.Far):
        pass

    source = forward_source(Near)
    made = generate_class(Near, source.text.replace("x *", "2 * x *"), tmp_path)
    assert issubclass(made, Near)
    assert made()(torch.ones(1)).item() == 10
    del sys.modules["made_for_this_test"]


def test_generated_classes_live_in_files_named_by_their_content(tmp_path):
    text = forward_source(Base).text
    first = generate_class(Base, text.replace("x * scale", "x - scale"), tmp_path)
    again = generate_class(Base, text.replace("x * scale", "x - scale"), tmp_path)
    other = generate_class(Base, text.replace("x * scale", "x + scale"), tmp_path)
    assert first is again
    assert first.__module__ != other.__module__
    assert first()(torch.tensor(10.0)).item() == 7
    assert other()(torch.tensor(10.0)).item() == 13
    assert first.__name__ == "Base"
    assert {p.suffix for p in tmp_path.iterdir() if p.is_file()} == {".py"}
    assert first.forward.__code__.co_filename.startswith(str(tmp_path))


def test_classes_of_one_name_and_text_do_not_share_a_base(tmp_path):
    """Two models may bring classes that read alike and differ in what their methods do."""

    def make(number):
        class Twin(nn.Module):
            def value(self):
                return number

            def forward(self, x):
                return x * self.value()

        return Twin

    one, two = (generate_class(cls, forward_source(cls).text, tmp_path) for cls in (make(1), make(2)))
    assert [cls()(torch.tensor(1.0)).item() for cls in (one, two)] == [1, 2]


DEFAULT = 1


def _late_default():
    class Late(nn.Module):
        def forward(self, x, scale=DEFAULT):
            return x * scale

    return Late


def test_default_is_the_one_of_the_definition_and_not_of_now(tmp_path, monkeypatch):
    cls = _late_default()
    monkeypatch.setitem(globals(), "DEFAULT", 100)
    made = generate_class(cls, forward_source(cls).text, tmp_path)
    assert made()(torch.tensor(2.0)).item() == 2


def test_annotations_need_not_exist_at_run_time(tmp_path):
    there = load(
        tmp_path,
        """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from torch import nn
        if TYPE_CHECKING:
            from somewhere import Cache
        class Annotated(nn.Module):
            def forward(self, x: Cache | None):
                return x
    """,
    )
    made = generate_class(there.Annotated, forward_source(there.Annotated).text, tmp_path)
    assert made()(3) == 3


class ClassBodyDefault(nn.Module):
    _SCALE = 2

    def forward(self, x, scale=_SCALE):
        return x * scale


class Alias(nn.Module):
    def _run(self, x):
        return x

    forward = _run


class Super(Base):
    def forward(self, x):
        return super().forward(x)


class Lambda(nn.Module):
    forward = lambda self, x: x  # noqa: E731


class Stars(nn.Module):
    def forward(*args):
        return args[1]


def _closing():
    factor = 2

    class Closing(nn.Module):
        def forward(self, x):
            return x * factor

    return Closing


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (ClassBodyDefault, "has a default, _SCALE, that only its class body knew"),
        (Alias, "another name of Alias._run"),
        (Super, "closes over __class__"),
        (_closing(), "closes over factor"),
        (Lambda, "no plain function"),
        (Stars, "does not name its module"),
        (nn.Bilinear.__mro__[-1], "AttributeError"),
    ][:-1],
)
def test_sources_that_cannot_be_compiled_elsewhere_say_why(cls, reason):
    with pytest.raises(SourceError, match=reason):
        forward_source(cls)


def test_source_that_is_not_there(tmp_path):
    scope = {"nn": nn}
    exec("class Ghost(nn.Module):\n    def forward(self, x):\n        return x\n", scope)
    with pytest.raises(SourceError, match=r"cannot be read|does not parse"):
        forward_source(scope["Ghost"])


def test_offsets_count_lines_as_the_parser_does(tmp_path):
    """A form feed or a Unicode line separator ends a line for str.splitlines, and not for Python."""
    there = load(
        tmp_path,
        (
            "from torch import nn\n"
            "class Odd(nn.Module):\n"
            "    def forward(self, x):\n"
            "        note = 'a\u2028b'  # \x0c\n"
            "        return self.f(x)\n"
        ),
        "odd_lines",
    )
    source = forward_source(there.Odd)
    call = source.tree.body[-1].value
    assert source.segment(call) == "self.f(x)"


def test_decorators_and_their_lines_are_not_part_of_the_text(tmp_path):
    there = load(
        tmp_path,
        """
        import functools
        from torch import nn
        def deco(f):
            @functools.wraps(f)
            def g(*a, **k): return f(*a, **k)
            return g
        class D(nn.Module):
            @deco
            @deco
            def forward(self, x):
                return self.f(x)
    """,
        "decorated",
    )
    source = forward_source(there.D)
    assert source.text.startswith("def forward(self, x):")
    assert source.place() == "decorated.py:11"
    assert source.place(source.tree.body[0]) == "decorated.py:12"


def test_fresh_names_avoid_all_that_the_forward_names():
    class Names(nn.Module):
        def forward(self, a, *b, c=1, **d):
            e = [f + 1 for f in b]
            return e, a, c, d

    source = forward_source(Names)
    assert [source.fresh(n) for n in "abcdefg"] == [*(f"{n}_2" for n in "abcdef"), "g"]
