"""What is left of a function once a computation was taken out, as text; and what is not cut."""

import ast
import textwrap

import pytest

from tfbackend.source.cut import cut
from tfbackend.source.forward import ForwardSource, SourceError


def source_of(text):
    text = textwrap.dedent(text).strip() + "\n"
    tree = ast.parse(text).body[0]
    return ForwardSource(text, "there.py", 1, 0, source_of, tree)


def expression(source, text):
    """The one expression of a source that reads `text`."""
    (found,) = [n for n in ast.walk(source.tree) if isinstance(n, ast.expr) and source.segment(n) == text]
    return found


def done(text, start="q @ k", end="w @ v", replacement="attend(q, k, v)"):
    source = source_of(text)
    return cut(source, expression(source, start), expression(source, end), replacement, "test").strip()


def plain(text):
    return textwrap.dedent(text).strip()


def test_what_lies_between_goes_and_what_the_caller_gets_is_none():
    text = """
    def forward(self, q, k, v, mask=None):
        s = q @ k
        s = s / self.scale
        if mask is not None:
            s = s + mask
        w = s.softmax(-1)
        w = self.drop(w)
        out = w @ v
        return self.out(out), w
    """
    assert done(text) == plain("""
    def forward(self, q, k, v, mask=None):
        w = None
        out = attend(q, k, v)
        return self.out(out), w
    """)


def test_only_the_branch_with_the_computation_changes():
    text = """
    def forward(self, q, k, v, alibi):
        if alibi is None:
            s = q @ k
            w = s.softmax(-1)
            out = w @ v
        else:
            s = (q @ k.T) + alibi
            out = s.softmax(-1) @ v
        return out
    """
    assert done(text) == plain("""
    def forward(self, q, k, v, alibi):
        if alibi is None:
            out = attend(q, k, v)
        else:
            s = (q @ k.T) + alibi
            out = s.softmax(-1) @ v
        return out
    """)


def test_checks_and_values_that_only_served_what_is_gone_go_too():
    text = """
    def _attn(self, q, k, v):
        count, size = q.size(-2), k.size(-2)
        zeros = torch.zeros(count, size)
        hidden = self.bias[:, :, size - count : size]
        s = zeros + q @ k
        if s.size() != (count, size):
            raise ValueError(f"{s.size()}")
        lowest = torch.finfo(s.dtype).min
        s = torch.where(hidden, s, lowest)
        w = s.softmax(-1)
        return w @ v
    """
    assert done(text) == plain("""
    def _attn(self, q, k, v):
        return attend(q, k, v)
    """)


def test_what_others_read_or_what_acts_stays():
    text = """
    def forward(self, q, k, v, cache):
        k, v = cache.update(k, v)
        size = k.size(-2)
        extra = self.bias(size)
        s = q @ k
        s += extra
        w = s.softmax(-1)
        out = w @ v
        return out.view(size, -1)
    """
    assert done(text) == plain("""
    def forward(self, q, k, v, cache):
        k, v = cache.update(k, v)
        size = k.size(-2)
        extra = self.bias(size)
        out = attend(q, k, v)
        return out.view(size, -1)
    """)


def test_a_name_that_is_computed_anew_is_kept():
    text = """
    def forward(self, q, k, v):
        x = q @ k
        w = x.softmax(-1)
        x = self.norm(v)
        out = w @ v
        return out + x
    """
    assert "x = self.norm(v)" in done(text)


def test_several_results_of_one_statement_are_all_none():
    text = """
    def forward(self, q, k, v):
        s, t = (q @ k), 1
        w = s.softmax(-1)
        out = w @ v
        return out, s, t
    """
    assert "    s = t = None\n" in done(text)


def test_statements_that_share_a_line_with_others_are_left_to_them():
    text = """
    def forward(self, q, k, v):
        n = q.size(0); m = k.size(0)
        s = (q @ k) * n
        w = s.softmax(-1)
        out = w @ v
        return out * m
    """
    assert "n = q.size(0); m = k.size(0)" in done(text)


REFUSED = {
    "decides": (
        """
        def forward(self, q, k, v):
            s = q @ k
            if s.max() > 3:
                return v
            w = s.softmax(-1)
            return w @ v
        """,
        "decides where the function goes on",
    ),
    "kept": (
        """
        def forward(self, q, k, v):
            s = q @ k
            self.scores = s
            w = s.softmax(-1)
            return w @ v
        """,
        "kept on an object",
    ),
    "loop": (
        """
        def forward(self, q, k, v):
            for _ in range(2):
                s = q @ k
            w = s.softmax(-1)
            return w @ v
        """,
        "runs through a For",
    ),
    "early": (
        """
        def forward(self, q, k, v):
            if self.raw:
                return q @ k
            w = v
            return w @ v
        """,
        "returns before",
    ),
    "lost": (
        """
        def forward(self, q, k, v):
            s = q @ k
            q = s + 1
            w = s.softmax(-1)
            return w @ v
        """,
        "q would no longer be computed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    text, words = REFUSED[name]
    with pytest.raises(SourceError, match=words):
        done(text)
