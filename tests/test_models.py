"""Every class that vLLM's registry names, with its method resolution order written out."""

import ast
from pathlib import Path

import pytest

models = pytest.importorskip("tfbackend.models")

FOLDER = Path(models.__file__).parent

EXPECTED = {
    "TransformersForCausalLM": [
        "tfbackend.models.TransformersForCausalLM",
        "tfbackend.mixins.causal.CausalMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsPP",
        "typing.Protocol",
        "typing.Generic",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "builtins.object",
    ],
    "TransformersMoEForCausalLM": [
        "tfbackend.models.TransformersMoEForCausalLM",
        "tfbackend.mixins.moe.MoEMixin",
        "tfbackend.mixins.causal.CausalMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsPP",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces.MixtureOfExperts",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
    "TransformersHybridForCausalLM": [
        "tfbackend.models.TransformersHybridForCausalLM",
        "tfbackend.mixins.hybrid.HybridMixin",
        "tfbackend.mixins.hybrid.StateMixin",
        "tfbackend.mixins.causal.CausalMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsPP",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces.HasInnerState",
        "vllm.model_executor.models.interfaces.IsHybrid",
        "vllm.model_executor.models.interfaces.SupportsMambaPrefixCaching",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
    "TransformersMoEHybridForCausalLM": [
        "tfbackend.models.TransformersMoEHybridForCausalLM",
        "tfbackend.mixins.moe.MoEMixin",
        "tfbackend.mixins.hybrid.HybridMixin",
        "tfbackend.mixins.hybrid.StateMixin",
        "tfbackend.mixins.causal.CausalMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsPP",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces.MixtureOfExperts",
        "vllm.model_executor.models.interfaces.HasInnerState",
        "vllm.model_executor.models.interfaces.IsHybrid",
        "vllm.model_executor.models.interfaces.SupportsMambaPrefixCaching",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
    "TransformersAttentionFreeForCausalLM": [
        "tfbackend.models.TransformersAttentionFreeForCausalLM",
        "tfbackend.mixins.hybrid.AttentionFreeMixin",
        "tfbackend.mixins.hybrid.StateMixin",
        "tfbackend.mixins.causal.CausalMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsPP",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces.HasInnerState",
        "vllm.model_executor.models.interfaces.IsAttentionFree",
        "vllm.model_executor.models.interfaces.SupportsMambaPrefixCaching",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
    "TransformersMoEAttentionFreeForCausalLM": [
        "tfbackend.models.TransformersMoEAttentionFreeForCausalLM",
        "tfbackend.mixins.moe.MoEMixin",
        "tfbackend.mixins.hybrid.AttentionFreeMixin",
        "tfbackend.mixins.hybrid.StateMixin",
        "tfbackend.mixins.causal.CausalMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsPP",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces.MixtureOfExperts",
        "vllm.model_executor.models.interfaces.HasInnerState",
        "vllm.model_executor.models.interfaces.IsAttentionFree",
        "vllm.model_executor.models.interfaces.SupportsMambaPrefixCaching",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
    "TransformersEmbeddingModel": [
        "tfbackend.models.TransformersEmbeddingModel",
        "tfbackend.mixins.pooling.EmbeddingMixin",
        "tfbackend.mixins.pooling.PoolingMixin",
        "tfbackend.mixins.alone.AloneMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces_base.VllmModelForPooling",
        "vllm.model_executor.models.interfaces_base.VllmModel",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
    "TransformersMoEEmbeddingModel": [
        "tfbackend.models.TransformersMoEEmbeddingModel",
        "tfbackend.mixins.moe.MoEMixin",
        "tfbackend.mixins.pooling.EmbeddingMixin",
        "tfbackend.mixins.pooling.PoolingMixin",
        "tfbackend.mixins.alone.AloneMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces.MixtureOfExperts",
        "vllm.model_executor.models.interfaces_base.VllmModelForPooling",
        "vllm.model_executor.models.interfaces_base.VllmModel",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
    "TransformersForSequenceClassification": [
        "tfbackend.models.TransformersForSequenceClassification",
        "tfbackend.mixins.pooling.SequenceClassificationMixin",
        "tfbackend.mixins.pooling.PoolingMixin",
        "tfbackend.mixins.alone.AloneMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces.SupportsCrossEncoding",
        "vllm.model_executor.models.interfaces_base.VllmModelForPooling",
        "vllm.model_executor.models.interfaces_base.VllmModel",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
    "TransformersMoEForSequenceClassification": [
        "tfbackend.models.TransformersMoEForSequenceClassification",
        "tfbackend.mixins.moe.MoEMixin",
        "tfbackend.mixins.pooling.SequenceClassificationMixin",
        "tfbackend.mixins.pooling.PoolingMixin",
        "tfbackend.mixins.alone.AloneMixin",
        "tfbackend.mixins.base.Base",
        "torch.nn.modules.module.Module",
        "vllm.model_executor.models.interfaces.SupportsLoRA",
        "vllm.model_executor.models.interfaces.SupportsQuant",
        "vllm.model_executor.models.interfaces.MixtureOfExperts",
        "vllm.model_executor.models.interfaces.SupportsCrossEncoding",
        "vllm.model_executor.models.interfaces_base.VllmModelForPooling",
        "vllm.model_executor.models.interfaces_base.VllmModel",
        "typing.Protocol",
        "typing.Generic",
        "builtins.object",
    ],
}


def served():
    return {
        name: cls for name, cls in vars(models).items() if isinstance(cls, type) and cls.__module__ == models.__name__
    }


def test_every_class_is_written_out_here():
    assert set(served()) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_method_resolution_order(name):
    order = [f"{cls.__module__}.{cls.__qualname__}" for cls in getattr(models, name).__mro__]
    assert order == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_no_protocol_initialises_before_the_module(name):
    """A Protocol's __init__ calls no super(): the module's must come first."""
    order = getattr(models, name).__mro__
    first = next(cls for cls in order if "__init__" in vars(cls))
    assert first.__module__.startswith("tfbackend.mixins")
    protocols = [i for i, cls in enumerate(order) if getattr(cls, "_is_protocol", False)]
    modules = [i for i, cls in enumerate(order) if cls.__module__ == "torch.nn.modules.module"]
    assert max(modules) < min(protocols)


@pytest.mark.parametrize("name", EXPECTED)
def test_names_are_those_that_vllm_compares(name):
    """vLLM's own, and those that it is made to choose for models with state; test_plugin.py has the choice."""
    from vllm.model_executor.models import registry

    plain = name.replace("Hybrid", "").replace("AttentionFree", "")
    assert plain in registry._TRANSFORMERS_BACKEND_MODELS
    assert (name in registry._TRANSFORMERS_BACKEND_MODELS) == (name == plain)


@pytest.mark.parametrize("name", EXPECTED)
def test_what_vllm_reads_of_state_from_the_class(name):
    from vllm.model_executor.models import interfaces

    cls, stateful = getattr(models, name), "Hybrid" in name or "AttentionFree" in name
    assert bool(interfaces.is_hybrid(cls)) == ("Hybrid" in name)
    assert bool(interfaces.is_attention_free(cls)) == ("AttentionFree" in name)
    assert bool(interfaces.has_inner_state(cls)) == stateful
    assert bool(interfaces.supports_mamba_prefix_caching(cls)) == stateful


def test_mixins_call_super_once_and_name_no_parent():
    for path in (FOLDER / "mixins").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            parents = {base.id for base in cls.bases if isinstance(base, ast.Name)}
            for function in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                named = [
                    ast.unparse(call)
                    for call in calls
                    if isinstance(call.func, ast.Attribute)
                    and isinstance(call.func.value, ast.Name)
                    and call.func.value.id in parents
                ]
                supers = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "super"]
                assert named == [], f"{path.name}: {function.name} names its parent"
                assert len(supers) <= 1, f"{path.name}: {function.name} calls super {len(supers)} times"
