"""The entry point: idempotent, cheap, silent when told so, and clear about versions."""

import os
import subprocess
import sys

import pytest

from tfbackend.errors import VersionError
from tfbackend.plugin import _CLASSES, check_versions

vllm_registry = pytest.importorskip("vllm.model_executor.models.registry")

CHECK = """
import os, sys, time
import vllm
from vllm.model_executor.models.registry import ModelRegistry
from tfbackend.plugin import register

def where():
    return ModelRegistry.models["TransformersForCausalLM"].module_name

os.environ["TFBACKEND_DISABLE"] = "1"
register()
print("disabled", where())
del os.environ["TFBACKEND_DISABLE"]
start = time.perf_counter()
register()
print("took", time.perf_counter() - start)
register()
print("registered", where())
print("imported", [name for name in ("tfbackend.models", "tfbackend.plan") if name in sys.modules])
print("devices", __import__("torch").cuda.is_initialized())
"""


@pytest.fixture(scope="module")
def said():
    """What a fresh process says of registering: word -> rest of the line."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TFBACKEND_")}
    env["VLLM_PLUGINS"] = ""
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_registers_by_name_twice_and_at_once(said):
    assert said["registered"] == "tfbackend.models"
    assert said["imported"] == "[]", "names are strings until a model is served"
    assert float(said["took"]) < 0.05
    assert said["devices"] == "False"


def test_disabled_leaves_vllms_own_backend(said):
    assert said["disabled"].startswith("vllm.")


def test_classes_are_those_of_models():
    from tests.test_models import EXPECTED

    assert set(_CLASSES) == set(EXPECTED)


def test_entry_point_names_register():
    from importlib.metadata import entry_points

    found = [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "tfbackend"]
    assert found == ["tfbackend.plugin:register"]


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.1", "0.33.0", "0.33.0rc1", "0.33.1.dev5+gabc", "0.32.0+cpu"])
def test_supported_versions_pass(vllm):
    check_versions(vllm, "5.16.0")
    check_versions(vllm, "6.0.0.dev0")


@pytest.mark.parametrize(
    ("vllm", "transformers", "words"),
    [
        ("0.31.2", "5.16.0", ["vLLM 0.31.2", "vLLM 0.32 or 0.33"]),
        ("0.34.0", "5.16.0", ["vLLM 0.34.0", "vLLM 0.32 or 0.33"]),
        ("1.0.0", "5.16.0", ["vLLM 1.0.0"]),
        ("0.32.0", "5.15.9", ["Transformers 5.15.9", "Transformers 5.16 or later"]),
        ("0.32.0", "4.57.0", ["Transformers 4.57.0"]),
    ],
)
def test_other_versions_are_refused_with_what_is_supported(vllm, transformers, words):
    with pytest.raises(VersionError) as caught:
        check_versions(vllm, transformers)
    for word in [*words, "TFBACKEND_ANY_VLLM=1"]:
        assert word in str(caught.value)


def test_any_version_may_be_tried(monkeypatch):
    import vllm

    from tfbackend.plugin import register

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.delenv("TFBACKEND_DISABLE", raising=False)
    monkeypatch.delenv("TFBACKEND_ANY_VLLM", raising=False)
    with pytest.raises(VersionError):
        register()
    monkeypatch.setenv("TFBACKEND_ANY_VLLM", "1")
    monkeypatch.setattr(vllm_registry.ModelRegistry, "register_model", lambda *args: None)
    register()
