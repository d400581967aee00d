"""What is above the line runs without vLLM, and only what is below it may name vLLM."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tfbackend"
BELOW = (
    "adapt.py",
    "apply.py",
    "layers/",
    "mixins/",
    "models.py",
    "plugin.py",
    "cli/serve.py",
    "cli/bench.py",
    "verification/engine.py",
    "verification/pooling_engine.py",
    "verification/workers.py",
)
"""The files of DESIGN's tree that may import vLLM; the command line does so lazily."""

BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
"""

SPECS = {
    *("deltaspec", "expertspec", "groupedspec", "loopedspec", "mlaspec", "moespec"),
    *("nativespec", "shortconvspec", "ssdspec", "standinspec", "statespec", "tablespec"),
}

PLANS = (
    BLOCKED
    + """
import torch
from transformers import LlamaConfig
from tfbackend import errors, head, layerspecs, meta, mixing, plan, proof, report, serving, weights
from tfbackend.fusers import FUSERS

config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=64, pad_token_id=0)
built = meta.build(config, torch.float32)
made = plan.make_plan(built, serving.ServingSpec())
assert made.counts["qkv"] == made.counts["glu"] == made.counts["attention"] == 1, made.counts
weights.build_weight_map(built.model, made)
assert "LlamaForCausalLM" in report.report(made)
assert not any(name.split(".")[0] == "vllm" for name in sys.modules)
print("planned")
"""
)


def files():
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(path):
    return path.startswith(BELOW)


def test_a_model_is_planned_with_vllm_blocked():
    done = subprocess.run([sys.executable, "-c", PLANS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("planned")


@pytest.mark.parametrize("path", [p for p in files() if not is_below(p)])
def test_nothing_above_the_line_names_vllm_or_what_is_below(path):
    below = tuple(f"tfbackend.{part.removesuffix('.py').rstrip('/').replace('/', '.')}" for part in BELOW)
    named = list(imports(path))
    ours = [] if path.startswith("cli/") else [n for n in named if any(f"{n}.".startswith(f"{b}.") for b in below)]
    assert [name for name in named if name.split(".")[0] == "vllm"] + ours == []


@pytest.mark.parametrize("path", files())
def test_nothing_comes_from_the_backend_that_vllm_brings(path):
    assert [name for name in imports(path) if "models.transformers" in name] == []


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("errors.py", set()),
        ("serving.py", set()),
        ("activations.py", set()),
        ("expertspec.py", {"activations"}),
        ("loopedspec.py", {"expertspec"}),
        ("groupedspec.py", set()),
        ("moespec.py", {"expertspec"}),
        ("mlaspec.py", {"serving"}),
        ("layerspecs.py", {"activations", *SPECS}),
        ("nativespec.py", {"deltaspec", "shortconvspec", "ssdspec", "statespec"}),
        ("deltaspec.py", {"serving", "shortconvspec"}),
        ("shortconvspec.py", {"serving"}),
        ("ssdspec.py", {"serving", "shortconvspec"}),
        ("standinspec.py", set()),
        ("statespec.py", set()),
        ("tablespec.py", set()),
        ("source/edits.py", {"errors"}),
        ("source/forward.py", set()),
        ("graph/query.py", set()),
    ],
)
def test_the_lowest_stones_lean_on_nothing(folder, allowed):
    used = {name.split(".")[1] for name in imports(folder) if name.startswith("tfbackend.")}
    assert used <= allowed


@pytest.mark.parametrize("path", [p for p in files() if p.startswith("fusers/") and p != "fusers/__init__.py"])
def test_fusers_do_not_know_the_planner(path):
    used = {name.split(".")[1] for name in imports(path) if name.startswith("tfbackend.")}
    assert used <= {"fusers", "graph", "source", "activations", "serving", "errors", "layerspecs", *SPECS}


def test_files_and_functions_stay_short():
    long_files = {p: n for p in files() if (n := len((PACKAGE / p).read_text().splitlines())) > 420}
    assert long_files == {}
    long_functions = {}
    for path in files():
        for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 50:
                long_functions[f"{path}:{node.name}"] = node.end_lineno - node.lineno
    assert long_functions == {}
