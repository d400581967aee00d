"""Models whose experts and attention Transformers routes in code of its own, beyond what the matrix asks of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serve import probes
from tests.serve.engine import MAX_TOKENS, Harness, Request, Served
from tests.serve.judge import SAME_COMPUTATION, judge
from tests.serve.matrix.checkpoint import make_and_ask
from tests.serve.tiny import make_prompts

pytestmark = pytest.mark.engine

CHUNK = 32


def ask(harness: Harness, name: str, prompts: list[list[int]], folder: str = "") -> list[Any]:
    first = make_prompts()  # of which the third says whether the model is causal
    expected = harness.ask_oracle(
        make_and_ask, name, folder or harness.checkpoint(name), [*first, *prompts], MAX_TOKENS
    )
    answers: list[Any] = expected.answers
    return answers[len(first) :]


def serve(harness: Harness, name: str, *batches: list[list[int]], **options: Any) -> Served:
    """Serve the batches; each is what Transformers answers."""
    expected = [ask(harness, name, prompts) for prompts in batches]
    frozen = tuple(tuple(map(tuple, prompts)) for prompts in batches)
    outcome = harness.serve(Request(harness.checkpoint(name), frozen, timeout=280, **options))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served: Served = outcome.value
    assert all(cls.startswith("tfbackend.models.") for cls in served.model_class)
    for answers, batch in zip(expected, served.batches, strict=True):
        verdict = judge(answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
        assert verdict.equal, verdict
    return served


@pytest.mark.parametrize("limit", [24, 256])
def test_chunks_of_attention_and_of_prefill(harness: Harness, limit: int) -> None:
    """Prompts that end before, at and after the edge of a chunk, several chunks long, and decoding over an edge."""
    prompts = make_prompts(lengths=(3 * CHUNK + 9, 5, 2 * CHUNK, 2 * CHUNK - 1, 2 * CHUNK + 1), seed=21)
    args = {"max_num_batched_tokens": limit, "enable_chunked_prefill": True}
    serve(harness, "llama4_text", prompts, engine_args=args)


def test_chunks_in_the_prefix_cache(harness: Harness) -> None:
    shared, *tails = make_prompts(lengths=(3 * CHUNK + 5, 9, 20), seed=22)
    args = {"enable_prefix_caching": True}
    serve(harness, "llama4_text", [shared + tails[0]], [shared + tails[1], shared], engine_args=args)


@pytest.mark.parametrize("name", ["llama4_text", "jetmoe"])
def test_compiled(harness: Harness, name: str) -> None:
    args = {"enforce_eager": False}
    served = serve(harness, name, make_prompts(), engine_args=args, inspect=probes.seen_as_compiled)
    assert served.inspected[0][0] >= 1


def test_two_ranks(harness: Harness) -> None:
    args = {"tensor_parallel_size": 2}
    served = serve(harness, "llama4_text", make_prompts(), engine_args=args, inspect=probes.parameter_count)
    files = Path(harness.checkpoint("llama4_text")).glob("*.safetensors")
    whole = sum(file.stat().st_size for file in files) / 4  # float32
    assert max(served.inspected) < 0.65 * whole, "the ranks hold whole experts"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama4_text", "attention_chunk_size", 512),
        ("llama4_text", "attn_temperature_tuning", False),
        ("longcat_flash", "routed_scaling_factor", 1.0),
    ],
)
def test_what_is_judged_shows(harness: Harness, tmp_path: Path, name: str, field: str, value: Any) -> None:
    """Transformers itself answers otherwise without the feature: an engine that dropped it would be found out."""
    answers = ask(harness, name, make_prompts())
    folder = Path(shutil.copytree(harness.checkpoint(name), tmp_path / name))
    config = json.loads((folder / "config.json").read_text())
    assert config[field] != value
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    others = ask(harness, name, make_prompts(), str(folder))
    tokens = [list(other.tokens) for other in others]
    assert not judge(answers, tokens, [list(other.logprobs) for other in others]).equal
