"""The variants of every LayerSpec that has a builder, and one live layer and one reference for each.

A table names for each field of a spec the other values it may have. Each such value is built, and must both show in the
reference and be equalled by the live layer: a builder that ignores a field fails.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tfbackend.layers.build import build_layer
from tfbackend.layers.context import BuildContext
from tfbackend.layerspecs import (
    COLWISE,
    LINEAR_STYLES,
    ROWWISE_PARTIAL,
    ActMulSpec,
    EmbeddingSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    NormSpec,
    QKVSpec,
)

TOKENS = 5

Table = list[tuple[LayerSpec, dict[str, tuple[Any, ...]]]]

TABLE: Table = [
    (LinearSpec(32, 48, True), {"in_features": (64,), "out_features": (24,), "bias": (False,),
                                 "style": tuple(s for s in LINEAR_STYLES if s != ROWWISE_PARTIAL)}),
    (LinearSpec(32, 48, False), {"style": (ROWWISE_PARTIAL,)}),  # vLLM's layer takes no bias in this style
    (MergedLinearSpec(32, (48, 16), True), {"in_features": (64,), "out_features": ((48, 32), (8, 8, 24)),
                                            "bias": (False,), "style": (COLWISE,)}),
    (QKVSpec(32, 16, 16, 4, 2, True), {"in_features": (64,), "head_dim": (32,), "v_head_dim": (32,), "num_heads": (8,),
                                       "num_kv_heads": (1, 4), "bias": (False,)}),
    (NormSpec("rms", 48, 1.0), {"kind": ("layer",), "size": (32, 18), "eps": (1e-3,),
                                "weight": ("zero_centred", "none"), "bias": ()}),
    (NormSpec("rms", 48, 1.0, "zero_centred"), {"eps": (1e-3,)}),
    (NormSpec("rms", 48, 1.0, "none"), {"eps": (1e-3,), "size": (18,)}),
    (NormSpec("layer", 48, 1.0, "plain", True), {"size": (32,), "eps": (1e-3,), "weight": ("zero_centred", "none"),
                                                 "bias": (False,)}),
    (NormSpec("layer", 48, 1.0, "zero_centred", False), {"eps": (1e-3,), "bias": (True,)}),
    (NormSpec("layer", 48, 1.0, "none", False), {"eps": (1e-3,), "bias": (True,)}),
    (ActMulSpec("silu"), {"activation": ("gelu", "gelu_tanh")}),
    (EmbeddingSpec(100, 32), {"num_embeddings": (90,), "dim": (64,), "scale": (5.5,)}),
]  # fmt: skip

# At world size one every style computes the same, and a merged layer has only one.
INVISIBLE = {(LinearSpec, "style"), (MergedLinearSpec, "style")}


def others(spec: LayerSpec, fields: dict[str, tuple[Any, ...]]) -> list[tuple[str, LayerSpec]]:
    """(field, the spec with another value of it)."""
    return [(name, replace(spec, **{name: value})) for name, values in fields.items() for value in values]


def context(dtype: torch.dtype) -> BuildContext:
    return BuildContext(dtype=dtype, device=torch.device("cpu"), quant_config=None, cache_config=None, tp_size=1)


def live(spec: LayerSpec, dtype: torch.dtype) -> nn.Module:
    """The built layer, its parameters drawn at random."""
    layer = build_layer(spec, "model.site", context(dtype), nn.Module())
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        assert parameter.dtype == dtype
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data.copy_(drawn * (0.5 if parameter.dim() == 1 else 0.2))
    return layer


def ready(layer: nn.Module) -> nn.Module:
    """What vLLM does with a layer once its weights are loaded: they may be packed for a kernel."""
    method = getattr(layer, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(layer)
    return layer


def reference(spec: LayerSpec, layer: nn.Module | None = None) -> nn.Module:
    """The spec's reference in float32 with the parameters of the live layer; of its own where there is none."""
    made = spec.reference().float()
    given = dict(layer.named_parameters()) if layer is not None else drawn_for(spec, made)
    names = {name for name, _ in made.named_parameters()}
    assert set(given) == names, f"the live layer has {sorted(given)}, the reference {sorted(names)}"
    for name, parameter in given.items():
        value = parameter.detach().float()
        value = value[: spec.num_embeddings] if isinstance(spec, EmbeddingSpec) else value
        setattr(made, name, nn.Parameter(value, requires_grad=False))
    return made


def drawn_for(spec: LayerSpec, made: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {name: p.shape for name, p in made.named_parameters()}
    if isinstance(spec, EmbeddingSpec):
        shapes = {"weight": torch.Size((spec.num_embeddings, spec.dim))}
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def inputs(spec: LayerSpec, dtype: torch.dtype) -> torch.Tensor:
    """[TOKENS, width], with a mean that is not 0."""
    generator = torch.Generator().manual_seed(5)
    if isinstance(spec, EmbeddingSpec):
        return torch.randint(0, spec.num_embeddings, (TOKENS,), generator=generator)
    width = spec.size if isinstance(spec, NormSpec) else getattr(spec, "in_features", 64)
    return (torch.randn(TOKENS, width, generator=generator, dtype=torch.float32) * 1.5 + 0.7).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to rounding; bfloat16 is held against float32 arithmetic on the same values."""
    bounds = {"rtol": 2e-2, "atol": 2e-2} if got.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.float(), wanted.float(), **bounds)
