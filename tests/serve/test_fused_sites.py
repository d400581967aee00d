"""We fuse at least as many sites as vLLM's own backend does, kind by kind, in every variant.

The rival's counts are in intree.json, measured by ``python -m tests.serve.remeasure``.
"""

import json

import pytest

from tests.serve.engine import OURS, Harness
from tests.serve.remeasure import INTREE
from tests.serve.tiny import VARIANTS

pytestmark = pytest.mark.engine

# A packed projection may be built as either class; the others are told apart.
KINDS = {
    "packed": ("qkv", "merged"),
    "norm": ("norm",),
    "embedding": ("embedding",),
    "attention": ("attention",),
}
LEFT = ("left_linear", "left_embedding", "left_norm")


def _by_kind(sites: dict[str, int]) -> dict[str, int]:
    return {kind: sum(sites.get(part, 0) for part in parts) for kind, parts in KINDS.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_at_least_as_many_as_the_rival(harness: Harness, name: str) -> None:
    rival = json.loads(INTREE.read_text())[name]
    assert rival["sites"].get("attention") or rival["verdict"].startswith("refused"), "not measured"
    harness.expected(name)
    outcome = harness.serve(harness.plain_request(name))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.model_class == [OURS]
    ours, theirs = outcome.value.inspected[0], rival["sites"]
    fewer = {kind: (n, _by_kind(theirs)[kind]) for kind, n in _by_kind(ours).items() if n < _by_kind(theirs)[kind]}
    assert not fewer, f"(ours, the rival's): {fewer}"
    more_left = {kind: (ours[kind], theirs.get(kind, 0)) for kind in LEFT if ours.get(kind, 0) > theirs.get(kind, 0)}
    assert not more_left, f"left unfused (ours, the rival's): {more_left}"
