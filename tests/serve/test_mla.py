"""Latent attention over vLLM's cache of latents: the tokens of Transformers, and pages that hold a latent a token."""

from typing import Any

import pytest

from tests.serve import probes
from tests.serve.engine import Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.matrix.attempt import expect
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

NAMES = {
    "deepseek_v3": "a query of low rank, rotated in pairs",
    "deepseek_v3+halves": "rotated in halves",
    "deepseek_v3+yarn": "scores of another scale than that of the width",
    "deepseek_v2": "rotated by complex numbers",
    "deepseek_v2+wholequery": "a query from one linear",
    "glm4_moe_lite": "",
    "youtu": "of no type that vLLM knows for its latents",
}
LATENTS = {"MLAAttentionSpec 1x576 float32, 16 tokens of 36864 bytes"}
"""One head of 512 + 64 numbers, of 4 bytes each, once and not for keys and values: 16 * 576 * 4."""


def _serve(harness: Harness, name: str, env: dict[str, str] | None = None, **args: Any) -> Served:
    """Serve the prompts of mixed lengths, more than there are seats, and check that the answers are Transformers'."""
    expected = expect(harness, name)
    assert not isinstance(expected, str), expected
    args = {"attention_backend": "CPU_MLA", "max_num_seqs": 3, **args}
    prompts = tuple(map(tuple, make_prompts()))
    request = Request(
        harness.checkpoint(name), (prompts,), engine_args=args, inspect=probes.cache_pages_and_misses, timeout=280
    )
    outcome = harness.serve(request, env=env)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert all(served_by.startswith("tfbackend.models.") for served_by in served.model_class)
    batch = served.batches[0]
    verdict = judge(expected.answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict
    return served


@pytest.mark.parametrize("name", NAMES)
def test_pages_hold_latents(harness: Harness, name: str) -> None:
    pages, misses = _serve(harness, name).inspected[0]
    assert pages == LATENTS
    assert not [miss for miss in misses if miss.startswith(("mla", "attention", "qkv"))]


def test_compiled(harness: Harness) -> None:
    pages, _ = _serve(harness, "youtu", enforce_eager=False).inspected[0]
    assert pages == LATENTS


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2+wholequery"])
def test_two_ranks(harness: Harness, name: str) -> None:
    """Each rank has half of the heads and all of the latents."""
    served = _serve(harness, name, tensor_parallel_size=2)
    assert [pages for pages, _ in served.inspected] == [LATENTS] * 2


def test_whole_keys_and_values_where_compiled_ranks_share_a_cpu(harness: Harness) -> None:
    """Over latents the first tokens of this model had log-probabilities that were no numbers."""
    args = {"tensor_parallel_size": 2, "enforce_eager": False, "compilation_config": {"backend": "eager"}}
    for pages, _ in _serve(harness, "deepseek_v3", attention_backend=None, **args).inspected:
        assert {page.split()[0] for page in pages} == {"FullAttentionSpec"}


def test_whole_keys_and_values_where_the_user_says_so(harness: Harness) -> None:
    served = _serve(harness, "youtu", env={"VLLM_MLA_DISABLE": "1"}, attention_backend=None)
    pages, misses = served.inspected[0]
    assert {page.split()[0] for page in pages} == {"FullAttentionSpec"}
    assert "mla: keys and values are cached whole: VLLM_MLA_DISABLE is set" in misses


def test_whole_keys_and_values_where_there_is_no_kernel(harness: Harness) -> None:
    """Its blocks are then not the 16 tokens that the kernel over latents is for."""
    pages, misses = _serve(harness, "deepseek_v3+padded").inspected[0]
    assert {page.split()[0] for page in pages} == {"FullAttentionSpec"}
    assert all(" 128 tokens" in page for page in pages)
    assert [miss for miss in misses if "mla: keys and values are cached whole: CPU_MLA has no kernel" in miss]
