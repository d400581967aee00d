"""Graphs of forwards: their spans, what they write in place, where they end, and what tells two sites apart."""

import pytest
import torch
from torch import nn

from tests.sites import WIDTH, decide
from tfbackend.graph.kinds import kind_key
from tfbackend.graph.query import between, name_of, sources, through_casts
from tfbackend.graph.tracing import trace
from tfbackend.source.forward import SourceError, forward_source

X = torch.empty(1, 7, WIDTH, device="meta")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.a(x).float()
        return self.b(y.relu())


def traced(cls):
    return trace(cls().to("meta"), (X,), {})


def test_children_are_leaves_and_spans_cover_their_calls():
    graph = traced(Plain)
    source = forward_source(Plain)
    (first,), (second,) = graph.calls("a"), graph.calls("b")
    assert source.segment(source.expression(first.meta["span"])) == "self.a(x)"
    whole = source.segment(source.expression(second.meta["span"]))
    assert "".join(whole.split()) == "self.b(y.relu())"
    assert graph.complete
    assert graph.output is second
    assert first.meta["val"].shape == (1, 7, WIDTH)


def test_queries():
    graph = traced(Plain)
    (first,), (second,) = graph.calls("a"), graph.calls("b")
    assert [name_of(n) for n in between(first, second)] == ["float", "relu"]
    assert sources(second.args[0], lambda n: n.op == "call_module") == [first]
    relu = second.args[0]
    assert through_casts(relu) is relu
    assert through_casts(relu.args[0]) is first


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        y = x * 1.0
        self.write(y)
        return y


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1),
        lambda y: y.__iadd__(1),
        lambda y: y.view(-1).zero_(),
        lambda y: y.__setitem__(0, 0.0),
        lambda y: torch.add(y, 1, out=y),
        lambda y: y[0].copy_(y[0]),
        lambda y: torch.relu_(y),
        lambda y: torch._foreach_mul_([y], 2.0),
    ],
)
def test_writes_in_place_are_seen(write):
    assert len(trace(Writes(write), (X,), {}).mutations) >= 1


@pytest.mark.parametrize("read", [lambda y: y + 1, lambda y: y.view(-1), lambda y: y.contiguous(), lambda y: y.float()])
def test_reads_are_no_writes(read):
    assert trace(Writes(read), (X,), {}).mutations == ()


class Ends(Plain):
    def forward(self, x):
        y = self.a(x)
        if y.sum().item() > 0:
            return y
        return self.b(y)


class Asserts(Plain):
    def forward(self, x):
        y = self.a(x)
        assert y is None, "never"
        return self.b(y)


@pytest.mark.parametrize(("cls", "error"), [(Ends, "RuntimeError"), (Asserts, "AssertionError: never")])
def test_partial_trace_says_where_and_why_it_ended(cls, error):
    graph = traced(cls)
    assert not graph.complete
    assert error in graph.ended
    assert "test_tracing.py:" in graph.ended
    assert len(graph.calls("a")) == 1


class Sometimes(Plain):
    """The same module, asked in two manners."""

    def forward(self, x):
        return self.inner(x) + self.inner(x, scale=True)

    def __init__(self):
        super().__init__()

        class Inner(Plain):
            def forward(self, x, scale=False):
                y = self.a(x) + self.b(x)
                return y * 2 if scale else y

        self.inner = Inner()


def test_site_that_is_called_in_two_manners_is_not_edited():
    plan = decide(Sometimes)
    assert plan.reason("merged_column", "site.inner") == "silent"
    assert plan.rewrite("linear", "site.inner.a")
    assert not plan.planner.sites.get("site.inner")


class Numbered(nn.Module):
    def __init__(self, layer_idx, **more):
        super().__init__()
        self.layer_idx = layer_idx
        self.a = nn.Linear(WIDTH, WIDTH)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x, cache=None):
        if cache is not None:
            cache.update(x, self.layer_idx)
        return self.a(x)


class NumberInBranch(Numbered):
    def forward(self, x):
        return self.a(x) if self.layer_idx % 2 else x


class NumberInHelper(Numbered):
    @property
    def odd(self):
        return self.layer_idx % 2

    def forward(self, x):
        return self.a(x) if self.odd else x


CALL = [((X,), {})]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (lambda: Numbered(0), lambda: Numbered(1), True),
        (lambda: NumberInBranch(0), lambda: NumberInBranch(1), False),
        (lambda: NumberInHelper(0), lambda: NumberInHelper(1), False),
        (lambda: Numbered(0, eps=1e-5), lambda: Numbered(1, eps=1e-6), False),
        (lambda: Numbered(0, eps=1), lambda: Numbered(1, eps=True), False),
        (lambda: Numbered(0, sizes=[1, 2]), lambda: Numbered(1, sizes=[1, 3]), False),
        (lambda: Numbered(0, sizes=[1, 2]), lambda: Numbered(1, sizes=[1, 2]), True),
        (lambda: Numbered(0, act=torch.relu), lambda: Numbered(1, act=torch.tanh), False),
        (lambda: Numbered(0, act=torch.relu), lambda: Numbered(1, act=torch.relu), True),
        (lambda: Numbered(0, options={"clip": 1}), lambda: Numbered(1, options={"clip": 2}), False),
        (lambda: Numbered(0, inner=nn.GELU()), lambda: Numbered(1, inner=nn.GELU("tanh")), False),
        (lambda: Numbered(0, inner=nn.Linear(2, 3)), lambda: Numbered(0, inner=nn.Linear(2, 3, bias=False)), False),
    ],
)
def test_kinds(first, second, same):
    assert (kind_key(first(), CALL) == kind_key(second(), CALL)) == same


def test_calls_are_part_of_a_kind():
    module = Plain()
    other = torch.empty(1, 7, WIDTH, device="meta", dtype=torch.bfloat16)
    keys = [kind_key(module, calls) for calls in (CALL, [], CALL * 2, [((X,), {"flag": True})], [((other,), {})])]
    assert len(set(keys)) == len(keys)


def test_source_of_a_class_made_in_a_function_has_exact_spans():
    class Local(Plain):
        def forward(self, x, *, scale=2.0):
            return self.a(x) * scale + (lambda y: y)(self.b(x))

    graph = trace(Local().to("meta"), (X,), {})
    source = forward_source(Local)
    assert source.segment(source.expression(graph.calls("b")[0].meta["span"])) == "self.b(x)"
    with pytest.raises(SourceError, match="no place"):
        source.expression(None)
