import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.inspection.conftest import SMALL
from tests.inspection.golden import GOLDEN
from tfbackend.cli import app

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"
CONFIGS = GOLDEN / "configs"
HUGE = ("deepseek-v3", "llama-3.1-405b", "qwen3-235b-a22b")


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


@pytest.fixture
def config(tmp_path):
    """Writes a small llama's config.json, some of it changed, and gives its folder."""

    def write(**changes):
        values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL, **changes}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return write


def test_help_answers_at_once_without_torch():
    code = "import sys, tfbackend.cli; print(sorted({'torch', 'transformers', 'vllm', 'rich'} & set(sys.modules)))"
    assert "torch" not in subprocess.check_output([sys.executable, "-c", code], text=True)
    taken = []
    for _ in range(3):
        before = os.times()
        subprocess.run(
            [sys.executable, "-c", "from tfbackend.cli import app; app(['--help'])"], check=True, capture_output=True
        )
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(taken) < 0.5


def test_own_help_names_every_flag():
    result = CliRunner().invoke(app, ["inspect", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for flag in ("--tp", "--pp", "--ep", "--dtype", "--json", "--diff", "--html", "--gpu-memory", "--full"):
        assert flag in result.output


def test_it_needs_no_vllm(config):
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from tfbackend.cli import app\n"
        f"app(['inspect', {str(config())!r}, '--full', '--html', {str(config() / 'page.html')!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "TransformersForCausalLM" in result.stdout


@pytest.mark.parametrize("model", [SMOLLM2, CONFIGS / "smollm2-135m.json"], ids=["checkpoint", "config"])
def test_the_first_screen_is_one_screen(model):
    if not model.exists():
        pytest.skip("make demo makes it")
    result = invoke(model, "--gpu-memory", "141GB")
    assert result.exit_code == 0
    lines = result.output.rstrip("\n").split("\n")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("✔") and lines[0].endswith("serves")
    order = [result.output.index(word) for word in ("Rewritten", "qkv_proj", "Memory", "Weights", "--tree")]
    assert order == sorted(order)
    # 134,515,008 elements of 2 bytes; 30 layers x (key, value) x 3 heads x 64 x 2 bytes
    assert "269.0 MB of weights" in result.output
    assert "23,040 B of KV cache a token" in result.output


def test_a_long_list_of_findings_still_leaves_the_verdict_first():
    result = invoke(CONFIGS / "deepseek-v3.json", "--tp", 8)
    assert result.output.splitlines()[0].startswith(("✘", "!", "✔"))
    assert result.output.count("\n") < 70


@pytest.mark.parametrize(
    ("changes", "arguments", "status"),
    [
        ({}, [], 0),
        (
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 32,
                }
            },
            [],
            1,
        ),
        ({}, ["--tp", "3"], 2),
        ({"hidden_act": "no such thing"}, [], 2),
        ({"model_type": "no such model"}, [], 2),
        ({"rms_norm_eps": float("nan")}, [], 2),
    ],
    ids=["serves", "with a loss", "three ranks", "bad activation", "unknown model", "not a number"],
)
def test_the_exit_status(config, changes, arguments, status):
    result = invoke(config(**changes), *arguments)
    assert result.exit_code == status, result.output
    assert not result.exception or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["./nowhere"], "There is no such folder or file"),
        (["nobody/nothing"], "There is no such folder, and the Hugging Face Hub cannot be reached"),
        (["what is this?"], "neither a path nor the id of a repository"),
        ([CONFIGS / "qwen3-4b.json", "--gpu-memory", "much"], "not an amount of memory"),
        ([CONFIGS / "qwen3-4b.json", "--dtype", "int8"], "not a dtype to serve in"),
        ([CONFIGS / "qwen3-4b.json", "--html", "/nowhere/page.html"], "The page cannot be written"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_is_one_sentence(arguments, says):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith("tfbackend: error: ")
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_an_empty_folder(tmp_path):
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "config" in result.stderr


def test_an_error_as_json():
    result = invoke("./nowhere", "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert (found["status"], found["verdict"]) == (2, "does not serve")
    assert "no such folder" in found["error"]


def keys_of(value):
    """Every key path of a JSON value, list entries joined."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from (f"{key}.{rest}" for rest in keys_of(item))
    elif isinstance(value, list):
        for item in value:
            yield from keys_of(item)


def test_json_is_what_the_documentation_says(tiny_checkpoint):
    """Every key that is written is described, and every key that is described is written."""
    result = invoke(tiny_checkpoint, "--json", "--tp", "2", "--gpu-memory", "24GB")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == "tfbackend.inspect/1"
    text = (ROOT / "docs" / "inspect.md").read_text()
    described = {row.group(1) for row in re.finditer(r"^\| `([\w.\[\]]+)` \|", text, re.MULTILINE)}
    free = ("weights.counts.", "weights.rules.", "versions")
    keys = {re.sub(r"^modules\.(children\.)+", "modules.", key) for key in keys_of(found)}
    written = {key for key in keys if not key.startswith(free)}
    assert written - described == set()
    # Lists without an entry here, and what only models that pool have.
    empty = ("problems.", "losses.", "modules.misses.", "weights.unfilled.", "pooling.")
    assert {key for key in described - written if not key.startswith(empty)} == set()


@pytest.fixture
def tiny_checkpoint(config):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = config()
    LlamaForCausalLM(LlamaConfig(**SMALL)).to(torch.bfloat16).save_pretrained(folder)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_json_says_what_the_screen_says(tiny_checkpoint):
    found = json.loads(invoke(tiny_checkpoint, "--json").stdout)
    screen = invoke(tiny_checkpoint).output
    assert found["verdict"] in screen
    assert found["weights"]["counts"] == {"placed": 21, "dropped": 1}
    assert "21 placed, 1 dropped" in screen
    assert "legacy-buffer" in screen
    assert f"{found['memory']['kv_bytes_per_token']:,} B of KV cache" in screen


def test_diff_shows_both_sides_in_colour():
    result = CliRunner().invoke(
        app, ["inspect", str(CONFIGS / "qwen3-4b.json"), "--diff"], env={"FORCE_COLOR": "1", "COLUMNS": "200"}
    )
    assert result.exit_code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert re.search(r"^-.*self\.q_proj\(hidden_states\)", plain, re.MULTILINE)
    assert re.search(r"^\+.*self\.qkv_proj\(hidden_states\)", plain, re.MULTILINE)
    assert re.search(r"\x1b\[[0-9;]*m\s*-\s+.*self\.gate_proj", result.output)


def test_full_names_every_parameter_and_tensor(tiny_checkpoint):
    output = CliRunner().invoke(app, ["inspect", str(tiny_checkpoint), "--full"], env={"COLUMNS": "200"}).output
    assert "model.layers.0-1.self_attn.qkv_proj.weight" in output
    assert "model.layers.1.self_attn.k_proj.weight" in output
    assert "all-reduce after model.layers.0-1.mlp.down_proj" in output


def test_the_page_is_written_whole_or_not_at_all(config):
    page = config() / "page.html"
    assert invoke(config(), "--html", page).exit_code == 0
    assert page.read_text().rstrip().endswith("</html>")
    assert [path.name for path in page.parent.iterdir() if "tmp" in path.name] == []


def test_a_cache_that_cannot_be_written_costs_only_time(config, monkeypatch):
    monkeypatch.setenv("TFBACKEND_CACHE", os.devnull)
    assert invoke(config()).exit_code == 0


def test_json_alone_is_on_standard_output(config):
    result = invoke(config(), "--json")
    json.loads(result.stdout)
    assert result.stderr == ""


@pytest.mark.parametrize("name", HUGE)
def test_huge_models_take_little(name, tmp_path):
    """Under 15 s of processor time and 2 GB. Wall time depends on what else this machine does, so it has some slack."""
    code = (
        "import resource, sys\nfrom tfbackend.cli import app\n"
        "try:\n    app(sys.argv[1:])\nfinally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)\n"
    )
    started = time.monotonic()
    command = [sys.executable, "-c", code, "inspect", str(CONFIGS / f"{name}.json"), "--tp", "8", "--json"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"TFBACKEND_CACHE": str(tmp_path)}
    )
    assert result.returncode in (0, 1, 2), result.stderr
    assert json.loads(result.stdout)["error"] is None
    seconds, kilobytes = map(float, result.stderr.split()[-2:])
    assert seconds < 15
    assert time.monotonic() - started < 60
    assert kilobytes < 2_000_000
