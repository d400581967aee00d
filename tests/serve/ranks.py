"""Architectures served on several ranks, each beside Transformers: `python -m tests.serve.ranks [NAME ...]`.

vLLM 0.32 runs pipeline stages on a CPU only where torch.compile runs, so those are traced, and not lowered.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.serve import probes
from tests.serve.engine import Harness, Request, Served
from tests.serve.judge import Verdict, judge
from tests.serve.matrix.attempt import expect
from tests.serve.tiny import make_prompts

TRACED: Mapping[str, Any] = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "one rank": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2, **TRACED},
    "TP 2 x PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **TRACED},
    "EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
NAMES = {
    "llama": "plain",
    "gpt2": "packed Conv1D, positions added to the embedding",
    "qwen3": "norms of each head's query and key",
    "gemma2": "a scaled embedding, windows on some layers",
    "gpt_bigcode": "one KV head on two ranks",
    "olmo2": "norms over the whole width of query and key",
    "phi3": "packed projections",
    "qwen3_moe": "experts",
    "deepseek_v3": "latents, shared experts, a dense first layer",
    "cohere": "attention and feed-forward side by side",
    "gpt_neox": "likewise, packed head by head",
    "falcon": "likewise, attention written out",
}
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3")


def serve(harness: Harness, name: str, way: str) -> tuple[Served | str, Verdict | None]:
    """What the ranks gave, or why there is nothing, and how it compares with Transformers."""
    expected = expect(harness, name)
    if isinstance(expected, str):
        return f"Transformers: {expected}", None
    prompts = tuple(map(tuple, make_prompts()))
    args = dict(WAYS[way])
    request = Request(harness.checkpoint(name), (prompts,), engine_args=args, inspect=probes.query_heads, timeout=280)
    outcome = harness.serve(request)
    if not outcome.ok:
        ours = re.findall(r"tfbackend\.errors\.(\w+: .*)", outcome.log)  # a rank's error, of which vLLM says nothing
        return ours[-1] if ours else f"{outcome.error}\n{outcome.tail(40)}", None
    batch = outcome.value.batches[0]
    return outcome.value, judge(expected.answers, batch.tokens, batch.logprobs)


def _cell(served: Served | str, verdict: Verdict | None) -> str:
    if isinstance(served, str) or verdict is None:
        return str(served).splitlines()[0]
    ours = all(name.startswith("tfbackend.models.") for name in served.model_class)
    return ("equal" if verdict.equal else f"WRONG {verdict.fault}") + ("" if ours else f" {served.model_class}")


def main(argv: Sequence[str]) -> int:
    """Print a row for each architecture and a column for each way; 1 if any is not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*NAMES])
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=[*WAYS])
    asked = parser.parse_args(argv)
    console, table, failed = Console(width=150), Table("architecture", *asked.ways), False
    harness = Harness()
    for name in asked.names:
        cells = []
        for way in asked.ways:
            idle = way.startswith("EP") and name not in WITH_EXPERTS
            cells.append("" if idle else _cell(*serve(harness, name, way)))
            console.print(name, way, cells[-1] or "no experts", markup=False)
        failed |= any(cell not in ("", "equal") for cell in cells)
        table.add_row(name, *cells)
    harness.close()
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
