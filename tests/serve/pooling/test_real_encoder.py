"""all-MiniLM-L6-v2, a real sentence encoder: the same vectors as Transformers with the mean of all tokens."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.engine import Harness
from tests.serve.pooling.checkpoint import mean_vectors
from tests.serve.pooling.engine import embed_texts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [
    "The cat sits outside.",
    "A cat is sitting in the garden, next to the old stone wall that the neighbours built.",
    "",
    "Der Kurs der Aktie fiel um drei Prozent.",
    "The share price fell by three per cent.",
    " ".join(["many words make a long text"] * 20),
]


@pytest.fixture(scope="module")
def folder() -> str:
    """The checkpoint, which is made where it is missing."""
    path = ROOT / "scripts" / "make_encoder.py"
    spec = importlib.util.spec_from_file_location("make_encoder", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make()
    return str(module.TARGET)


def test_vectors_are_those_of_transformers(harness: Harness, folder: str) -> None:
    wanted = torch.tensor(harness.ask_oracle(mean_vectors, folder, TEXTS))
    outcome = harness.call(embed_texts, folder, TEXTS, timeout=400)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served_by, vectors = outcome.value
    given: Any = torch.tensor(vectors)
    assert served_by == "tfbackend.models.TransformersEmbeddingModel"
    assert torch.nn.functional.cosine_similarity(given, wanted, dim=-1).min() > 0.9999
    assert (given - wanted).abs().max() < 2e-3
    alike, apart = (given[0] @ given[1]).item(), (given[0] @ given[4]).item()
    assert alike > apart + 0.3, "a cat is nearer to a cat than to a share price"
