"""The entry point: idempotent, cheap, silent when told so, and clear about versions."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tfbackend.errors import VersionError
from tfbackend.plugin import _ATTENTION_FREE, _CLASSES, _HYBRID, _POOLING, _admit, _choose, check_versions

vllm_registry = pytest.importorskip("vllm.model_executor.models.registry")

CHECK = """
import os, sys, time
from types import SimpleNamespace
import vllm
from vllm.model_executor.models.registry import ModelRegistry
from tfbackend.plugin import register

def where():
    return ModelRegistry.models["TransformersForCausalLM"].module_name

def resolved(architecture, backend):
    config = SimpleNamespace(hf_config=SimpleNamespace(auto_map=None), model_impl="transformers")
    config._get_transformers_backend_cls = lambda: backend
    try:
        return ModelRegistry._try_resolve_transformers(architecture, config)
    except ValueError as error:
        return str(error)

os.environ["TFBACKEND_DISABLE"] = "1"
original = type(ModelRegistry)._try_resolve_transformers
register()
print("disabled", where())
print("untouched", type(ModelRegistry)._try_resolve_transformers is original)
print("bloom-disabled", resolved("BloomForCausalLM", "TransformersForCausalLM"))
del os.environ["TFBACKEND_DISABLE"]
start = time.perf_counter()
register()
print("took", time.perf_counter() - start)
once = type(ModelRegistry)._try_resolve_transformers
chooser = vllm.config.ModelConfig._get_transformers_backend_cls
register()
print("registered", where())
print("wrapped-once", type(ModelRegistry)._try_resolve_transformers is once)
print("bloom", resolved("BloomForCausalLM", "TransformersForCausalLM"))
print("bloom-multimodal", resolved("BloomForCausalLM", "TransformersMultiModalForSequenceClassification"))
print("resolved-before", resolved("TransformersHybridForCausalLM", "TransformersHybridForCausalLM"))
from vllm.config import CompilationConfig, ModelConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
print("splits", CompilationConfig._attention_ops.count("vllm::tfbackend_state"))
print("state-backend", MambaAttentionBackendEnum.CUSTOM.get_path())
print("set-up", [n for n in MODELS_CONFIG_MAP if n.startswith("Transformers")])
print("chooses-once", ModelConfig._get_transformers_backend_cls is chooser)
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


def test_models_that_write_attention_out_are_admitted_to_our_classes_only(said):
    refused = "The Transformers implementation of 'BloomForCausalLM' is not compatible with vLLM."
    assert said["bloom"] == "TransformersForCausalLM"
    assert said["bloom-multimodal"] == refused, "it would get a class of vLLM's own, which cannot serve it"
    assert said["wrapped-once"] == "True"
    assert said["bloom-disabled"] == refused
    assert said["untouched"] == "True"


def test_layers_with_state_are_made_known_once(said):
    assert said["resolved-before"] == "TransformersHybridForCausalLM", "vLLM asks for the resolved name again"
    assert said["splits"] == "1", "CUDA graphs must not be captured over the op"
    assert said["state-backend"] == "tfbackend.layers.state.StateBackend"
    assert said["set-up"] == str([*_ATTENTION_FREE, *_HYBRID, *_POOLING])
    assert said["chooses-once"] == "True"


@pytest.mark.parametrize(
    ("model_type", "fields", "plain", "chosen"),
    [
        ("llama", {}, "TransformersForCausalLM", "TransformersForCausalLM"),
        ("gemma2", {}, "TransformersForCausalLM", "TransformersForCausalLM"),
        ("mamba2", {}, "TransformersForCausalLM", "TransformersAttentionFreeForCausalLM"),
        ("falcon_h1", {}, "TransformersForCausalLM", "TransformersHybridForCausalLM"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"]},
            "TransformersForCausalLM",
            "TransformersHybridForCausalLM",
        ),
        ("lfm2", {"layer_types": ["full_attention"] * 2}, "TransformersForCausalLM", "TransformersForCausalLM"),
        ("jamba", {}, "TransformersMoEForCausalLM", "TransformersMoEHybridForCausalLM"),
        ("rwkv", {}, "TransformersForCausalLM", "TransformersAttentionFreeForCausalLM"),
        ("recurrent_gemma", {}, "TransformersForCausalLM", "TransformersHybridForCausalLM"),
        ("mamba2", {}, "TransformersForSequenceClassification", "TransformersForSequenceClassification"),
    ],
)
def test_class_is_chosen_by_the_cache_of_transformers(model_type, fields, plain, chosen):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**({"num_hidden_layers": 2} if fields else {}), **fields)

    class Config:
        hf_config = config
        runner, architectures = "auto", ("Model",)

        def _get_transformers_backend_cls(self):
            return plain

    _choose(Config)
    once = Config._get_transformers_backend_cls
    _choose(Config)
    assert Config._get_transformers_backend_cls is once
    assert Config()._get_transformers_backend_cls() == chosen


@pytest.mark.parametrize(
    ("architecture", "runner", "plain", "chosen"),
    [
        ("BertForQuestionAnswering", "pooling", "TransformersForCausalLM", "TransformersForSequenceClassification"),
        ("BertForQuestionAnswering", "auto", "TransformersForCausalLM", "TransformersForCausalLM"),
        ("Qwen2ForRewardModel", "pooling", "TransformersEmbeddingModel", "TransformersForSequenceClassification"),
        ("BertModel", "pooling", "TransformersEmbeddingModel", "TransformersEmbeddingModel"),
        (
            "T5GemmaForSequenceClassification",  # its config has two parts, and both are of text
            "pooling",
            "TransformersMultiModalForSequenceClassification",
            "TransformersForSequenceClassification",
        ),
        (
            "Gemma3ForSequenceClassification",
            "pooling",
            "TransformersMultiModalForSequenceClassification",
            "TransformersMultiModalForSequenceClassification",
        ),
    ],
)
def test_class_of_what_pools_is_chosen_by_what_it_gives(architecture, runner, plain, chosen):
    config = SimpleNamespace(get_text_config=lambda: None)

    class Config:
        hf_config = config

        def __init__(self):
            self.runner, self.architectures = runner, [architecture]

        def _get_transformers_backend_cls(self):
            return plain

    if chosen == "TransformersForCausalLM":
        from transformers import BertConfig

        Config.hf_config = BertConfig()
    _choose(Config)
    assert Config()._get_transformers_backend_cls() == chosen


def test_compatibility_is_claimed_no_longer_than_it_takes_to_resolve():
    from transformers import BloomForCausalLM

    class Registry:
        fails = False

        def _try_resolve_transformers(self, architecture, model_config):
            if self.fails:
                raise ValueError(architecture)
            return BloomForCausalLM.is_backend_compatible()

    _admit(Registry)
    ours, theirs = (SimpleNamespace(_get_transformers_backend_cls=lambda n=n: n) for n in (_CLASSES[0], "Other"))
    registry = Registry()
    assert registry._try_resolve_transformers("Bloom", ours) is True
    assert registry._try_resolve_transformers("Bloom", theirs) is False
    registry.fails = True
    with pytest.raises(ValueError, match="Bloom"):
        registry._try_resolve_transformers("Bloom", ours)
    assert BloomForCausalLM.is_backend_compatible() is False


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
