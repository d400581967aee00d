"""Models that Transformers does not have, in spellings of their own, each against its own code."""

from collections import Counter

import pytest

from tests.serve.engine import MAX_TOKENS, OURS, Harness, Request
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.probes import rewrites_by_fuser
from tests.serve.remotes import REMOTES, make_remote
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

FUSED = {
    "packed": {"attention": 2, "packed_qkv": 2, "glu": 2, "norm": 5, "embedding": 1, "linear": 4},
    "parallel": {"attention": 2, "packed_qkv": 2, "norm": 3, "embedding": 1, "linear": 6},
    "oddnorm": {"attention": 2, "qkv": 2, "rope": 2, "glu": 2, "norm": 7, "embedding": 1, "linear": 4},
    "written": {"attention": 2, "qkv": 2, "norm": 5, "embedding": 1, "linear": 6},
    "shifted": {"attention": 2, "qkv": 2, "norm": 4, "embedding": 1, "linear": 6},
    "handtied": {"attention": 2, "qkv": 2, "glu": 2, "embedding": 1, "linear": 4},
    "sloped": {"attention": 2, "packed_qkv": 2, "norm": 2, "embedding": 1, "linear": 6},
    "counting": {"attention": 2, "qkv": 2, "norm": 4, "embedding": 1, "linear": 6},
}
"""What is there to be fused, counted by hand. The rotation of packed stays as it is, since the star in its call hides
cos and sin; of the norms of oddnorm, the two that clip do; those of handtied call their weight a gain."""

ONE_RANK = ("written", "shifted", "handtied", "sloped", "counting")
"""Written without a thought of ranks: their code counts the heads of all, or they have no layers to share out."""


@pytest.mark.parametrize(("name", "ranks"), [(n, r) for n in REMOTES for r in (1, 2) if r == 1 or n not in ONE_RANK])
def test_served_as_its_own_code_says(harness: Harness, name: str, ranks: int) -> None:
    prompts, folder = make_prompts(), harness.checkpoint(name)
    expected = harness.ask_oracle(make_remote, name, folder, prompts, MAX_TOKENS)
    args = {"trust_remote_code": True, "tensor_parallel_size": ranks}
    request = Request(folder, (tuple(map(tuple, prompts)),), engine_args=args, inspect=rewrites_by_fuser, timeout=280)
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert set(served.model_class) == {OURS}
    (batch,) = served.batches
    verdict = judge(expected, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict
    if ranks == 1:
        assert Counter(served.inspected[0]) == Counter(FUSED[name])
