"""SmolLM2-135M-Instruct, a real chat model: the same answers as Transformers."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.serve.engine import OURS, Harness, Request, Served
from tests.serve.judge import judge
from tests.serve.oracle import Answer, ask

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 24
QUESTION = "What is the capital of France?"
CHATS = (
    QUESTION,
    "Write a haiku about the sea.",
    "Translate to French: the cat sleeps on the chair.",
    "What is 12 * 7? Answer with the number only.",
    "List three colours.",
)
RAW = (
    "The",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village at the edge of a dark forest, there lived",
    '{"name": "Ada", "born": 1815, "field": "',
    "Les trois premiers mois de l'année sont janvier, février et",
)


def _make_checkpoint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoint", ROOT / "scripts" / "make_checkpoint.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder() -> str:
    """The checkpoint, which is made where it is missing: `make checkpoint`."""
    target = ROOT / ".cache" / "smollm2-135m-instruct"
    _make_checkpoint().make(target)
    return str(target)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [_chat(tokenizer, text) for text in CHATS] + [tokenizer(text)["input_ids"] for text in RAW]


@pytest.fixture(scope="module")
def expected(harness: Harness, folder: str, prompts: list[list[int]]) -> list[Answer]:
    return harness.ask_oracle(ask, folder, prompts, TOKENS)


def _chat(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _serve(harness: Harness, folder: str, prompts: list[list[int]], **engine_args: object) -> Served:
    request = Request(folder, (tuple(map(tuple, prompts)),), TOKENS, engine_args, timeout=400)
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.model_class == [OURS]
    return outcome.value


def test_prompts_are_varied(prompts: list[list[int]], expected: list[Answer]) -> None:
    assert len(prompts) == 10
    assert len({answer.tokens for answer in expected}) == 10
    assert len({len(prompt) for prompt in prompts}) > 5


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_float32(harness: Harness, folder: str, prompts: list[list[int]], expected: list[Answer], eager: bool) -> None:
    batch = _serve(harness, folder, prompts, enforce_eager=eager, max_num_seqs=10).batches[0]
    verdict = judge(expected, batch.tokens, batch.logprobs)
    assert verdict.equal, verdict
    assert verdict.compared > 0.9 * len(prompts) * TOKENS, verdict


def test_bfloat16_knows_the_capital_of_france(
    harness: Harness, folder: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The model is small and on the edge: a norm that rounds once, after its weight, is more exact and has made it
    babble. tests/layers/test_norm.py holds the rounding itself.

    Inductor rounds once too, whichever implementation it compiles, unless told to `emulate_precision_casts`: hence
    eager only.
    """
    served = _serve(harness, folder, [_chat(tokenizer, QUESTION)], enforce_eager=True, dtype="bfloat16")
    assert "Paris" in tokenizer.decode(served.batches[0].tokens[0])
