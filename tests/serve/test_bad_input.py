"""Every broken checkpoint ends in one clear error, soon: it names the thing, the place and, where we know it, the
remedy. None is served."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.serve import broken
from tests.serve.broken import CASES, Case
from tests.serve.engine import Harness
from tfbackend import meta
from tfbackend.errors import UnsupportedModelError
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec

pytestmark = pytest.mark.engine

SECONDS = 90  # for one engine start on a busy machine; a refusal takes 2


@pytest.fixture(scope="module")
def sound(harness: Harness) -> Path:
    """A checkpoint with nothing wrong."""
    folder = harness.root / "sound"
    harness.ask_oracle(broken.make_sound, str(folder))
    return folder


@pytest.fixture
def break_it(sound: Path, tmp_path: Path) -> Callable[[Case], Path]:
    """Makes the broken copy of a case."""

    def make(case: Case) -> Path:
        folder = tmp_path / case.name
        shutil.copytree(sound, folder)
        case.breaks(folder)
        return folder

    return make


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_clear_error(harness: Harness, break_it: Callable[[Case], Path], case: Case) -> None:
    folder = break_it(case)
    outcome = harness.call(broken.start, str(folder), case.engine_args, case.by_command, timeout=SECONDS)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    refusal = outcome.value
    assert refusal.error == case.error, refusal.message
    for phrase in case.says:
        assert phrase in refusal.message


@pytest.mark.parametrize("breaks", [broken.untouched, broken.pickled_tensors], ids=lambda breaks: breaks.__name__)
def test_what_is_not_broken_starts(
    harness: Harness, break_it: Callable[[Case], Path], breaks: Callable[[Path], None]
) -> None:
    """Or the errors above might have another cause. Pickles are refused for what they hold, not for being pickles."""
    folder = break_it(Case("sound", breaks, "", ()))
    outcome = harness.call(broken.start, str(folder), {}, True, timeout=SECONDS)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    assert outcome.value.error == "", outcome.value.message


@pytest.mark.parametrize(
    ("fields", "ranks", "says"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, "6 query heads, 4 ranks"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 KV heads, 2 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "3 KV heads, 4 ranks"),
        ({"intermediate_size": 190}, 4, "190 output features, 4 ranks"),
    ],
    ids=str,
)
def test_what_does_not_divide_over_ranks_is_refused_before_a_layer_is_built(
    fields: dict[str, int], ranks: int, says: str
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1, "head_dim": 16}
    config = LlamaConfig(**(sizes | {"num_attention_heads": 8, "num_key_value_heads": 2} | fields))
    with pytest.raises(UnsupportedModelError, match=rf"{says}.*--tensor-parallel-size"):
        make_plan(meta.build(config, torch.float32), ServingSpec(tp_size=ranks))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_divides_is_not_refused(ranks: int) -> None:
    """KV heads are repeated where there are more ranks than heads."""
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1, "head_dim": 16}
    config = LlamaConfig(**(sizes | {"num_attention_heads": 8, "num_key_value_heads": 2}))
    make_plan(meta.build(config, torch.float32), ServingSpec(tp_size=ranks))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "log_says", "last_line"),
    [
        ("no heads", "", ("num_attention_heads", "Needed: 1 or more")),
        ("missing norm", "MissingTensorError: 1 parameter or shard not filled", ("did not start", "the log above")),
    ],
)
def test_the_command_ends_with_one_line(
    harness: Harness, break_it: Callable[[Case], Path], name: str, log_says: str, last_line: tuple[str, ...]
) -> None:
    folder = break_it(next(case for case in CASES if case.name == name))
    flags = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "256", "--skip-tokenizer-init", "--port", "0"]
    code = "import sys; from tfbackend.cli import app; app(['serve', *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), *flags],
        env=os.environ
        | {
            "VLLM_CACHE_ROOT": str(harness.root / "cache" / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
        }
        | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 1, done.stdout[-3000:]
    assert lines[-1].startswith("tfbackend: error: "), done.stdout[-3000:]
    for phrase in last_line:
        assert phrase in lines[-1]
    assert log_says in done.stdout
