"""Regenerates intree.json: ``python -m tests.serve.remeasure [PATTERN ...]``.

For each variant it serves the standard prompts with vLLM's own backend (TFBACKEND_DISABLE=1) and writes down the fused
sites that it counted and whether the answers were Transformers'. Run it after a change of the table in configs.py or
of the supported vLLM; it takes about 8 minutes.
"""

import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

from tests.serve.engine import Harness
from tests.serve.judge import judge
from tests.serve.tiny import VARIANTS

INTREE = Path(__file__).with_name("intree.json")


def measure(harness: Harness, name: str) -> dict[str, Any]:
    """What vLLM's own backend makes of a variant."""
    expected = harness.expected(name)
    outcome = harness.serve(harness.plain_request(name), env={"TFBACKEND_DISABLE": "1"})
    if not outcome.ok:
        return {"sites": {}, "verdict": f"refused: {outcome.error}"}
    served = outcome.value
    if not served.model_class[0].startswith("vllm.model_executor.models.transformers."):
        raise RuntimeError(f"{name} was served by {served.model_class[0]}, which is not vLLM's own backend")
    verdict = judge(expected, served.batches[0].tokens, served.batches[0].logprobs)
    sites = dict(sorted(served.inspected[0].items()))
    return {"sites": sites, "verdict": "equal" if verdict.equal else f"wrong: {verdict.fault}"}


def main(patterns: list[str]) -> None:
    """Measure the variants that match (all if none is given) and update the file."""
    known = json.loads(INTREE.read_text()) if INTREE.exists() else {}
    chosen = [n for n in VARIANTS if not patterns or any(fnmatch.fnmatch(n, p) for p in patterns)]
    harness = Harness()
    try:
        for name in chosen:
            known[name] = measure(harness, name)
            print(name, known[name]["verdict"], known[name]["sites"], flush=True)
    finally:
        harness.close()
    lines = (f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in VARIANTS if name in known)
    INTREE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
