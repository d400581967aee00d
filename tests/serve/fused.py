"""Counts the fused sites of a live model, whoever built it."""

from collections import Counter
from typing import Any

KINDS = ("qkv", "merged", "norm", "embedding", "attention", "linear")


def count_sites(model: Any) -> dict[str, int]:
    """Count the modules of a served model by kind of fused site (a module that is none counts for nothing).

    A site is an instance of one of vLLM's layers, subclasses included, or of a class of ``tfbackend.layers`` that says
    which kind it is in ``fused_kind``. What was left as it was counts under ``left_linear``, ``left_embedding`` and
    ``left_norm``.
    """
    counts: Counter[str] = Counter()
    for module in model.modules():
        kind = _kind(module)
        if kind:
            counts[kind] += 1
    return dict(counts)


def _kind(module: Any) -> str | None:
    from vllm.model_executor.layers import layernorm, linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if type(module).__module__.split(".")[:2] == ["tfbackend", "layers"] and hasattr(module, "fused_kind"):
        assert module.fused_kind in KINDS, f"{type(module)}: unknown fused_kind {module.fused_kind!r}"
        return module.fused_kind
    if isinstance(module, linear.QKVParallelLinear):
        return "qkv"
    if isinstance(module, linear.MergedColumnParallelLinear):
        return "merged"
    if isinstance(module, linear.LinearBase):
        return "linear"
    if isinstance(module, VocabParallelEmbedding):
        return "embedding"
    if any(base.__module__ == layernorm.__name__ for base in type(module).__mro__):
        return "norm"
    return "attention" if _is_attention(module) else _left(module)


def _is_attention(module: Any) -> bool:
    return any(base.__module__.startswith("vllm.") and base.__name__ == "Attention" for base in type(module).__mro__)


def _left(module: Any) -> str | None:
    """Which kind of site a module would have been."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return "left_linear"
    if isinstance(module, nn.Embedding):
        return "left_embedding"
    named_norm = type(module).__name__.rstrip("0123456789P").endswith("Norm")
    return "left_norm" if named_norm and not any(True for _ in module.children()) else None
