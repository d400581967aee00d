"""Whole plans of tiny models as text, one file for each architecture in tests/golden/.

    TFBACKEND_WRITE_GOLDEN=1 python -m pytest tests/test_golden.py

writes the files anew. Read the difference against the modelling file of Transformers before committing it: such a file
says what is right, not what came out.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.serve.configs import VARIANTS
from tfbackend.meta import build
from tfbackend.plan import draft_plan
from tfbackend.report import report
from tfbackend.serving import ServingSpec

FOLDER = Path(__file__).parent / "golden"
ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere2", "granite", "gpt_neox"),
    *("stablelm-parallel", "opt", "gpt_bigcode", "smollm3"),
)


def plan_text(name: str, tp_size: int) -> str:
    """The report without the version, the counts of proofs and the lines of Transformers' files."""
    variant = VARIANTS[name]
    meta = build(AutoConfig.for_model(variant.model_type, **variant.fields), torch.float32)
    plan, refusals = draft_plan(meta, ServingSpec(tp_size=tp_size, max_model_len=512))
    text = "\n".join(line for line in report(plan).splitlines()[2:] if not line.startswith("Proven:"))
    assert "unproven" not in text
    biased = sorted({place for rewrite in plan.rewrites for place in _with_bias(rewrite)})
    edits = set(plan.forwards.values())
    wanted = re.compile(r"tfb_|act_and_mul|rotary")
    lines = [f"  {line.strip()}" for edited in sorted(edits) for line in edited.splitlines() if wanted.search(line)]
    parts = [re.sub(r"\n\n+", "\n\n", text).strip(), f"With a bias: {', '.join(biased) or 'none'}"]
    parts.append("\n".join(["Lines that changed", *lines]))
    parts += [f"Refused: {refusal.summary} {refusal.found or ''}".strip() for refusal in refusals]
    return re.sub(r" \(\w+\.py:\d+\)", "", "\n\n".join(parts)) + "\n"


def _with_bias(rewrite):
    """Names of the layers of a rewrite that add a bias."""
    whole = [(rewrite.qualname.rpartition(".")[2], rewrite.layer)]
    return [name for name, spec in [*whole, *rewrite.children] if getattr(spec, "bias", False)]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plan_is_the_golden_one(name, tp_size):
    path = FOLDER / f"{name}-tp{tp_size}.txt"
    text = plan_text(name, tp_size)
    if os.environ.get("TFBACKEND_WRITE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()
