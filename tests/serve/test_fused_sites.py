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


def _rival_sites(name: str) -> dict[str, int]:
    """The rival's counts; for a variant that it refuses, those of its architecture's main variant."""
    measured = json.loads(INTREE.read_text())
    if measured[name]["verdict"].startswith("refused"):
        name = VARIANTS[name].model_type
    sites = measured[name]["sites"]
    assert sites.get("attention"), f"{name} was not measured"
    return sites


@pytest.mark.parametrize("name", VARIANTS)
def test_at_least_as_many_as_the_rival(harness: Harness, name: str) -> None:
    theirs = _rival_sites(name)
    harness.expected(name)
    outcome = harness.serve(harness.plain_request(name))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.model_class == [OURS]
    ours = outcome.value.inspected[0]
    fewer = {kind: (n, _by_kind(theirs)[kind]) for kind, n in _by_kind(ours).items() if n < _by_kind(theirs)[kind]}
    assert not fewer, f"(ours, the rival's): {fewer}"
    more_left = {kind: (ours[kind], theirs.get(kind, 0)) for kind in LEFT if ours.get(kind, 0) > theirs.get(kind, 0)}
    assert not more_left, f"left unfused (ours, the rival's): {more_left}"
