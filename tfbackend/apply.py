"""Stage 5: a Plan becomes live modules. Takes no decision; what it does is written in the Plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from tfbackend.fusers.base import Rewrite
from tfbackend.graph.interface import POSITIONS
from tfbackend.layers.build import build_layer, local_sizes
from tfbackend.layers.context import BuildContext
from tfbackend.layers.stages import Stage, leave_out
from tfbackend.layerspecs import FixedRopeSpec, GrownTableSpec, LayerSpec
from tfbackend.plan import Plan
from tfbackend.source.buffers import buffers_as_locals
from tfbackend.source.forward import SourceError, forward_source, generate_class


def apply_plan(
    plan: Plan,
    base: PreTrainedModel,
    prefix: str,
    context: BuildContext,
    directory: Path,
    stage: Stage | None = None,
) -> PreTrainedModel:
    """Put the plan's layers into `base` and give edited classes to its sites.

    Args:
        base: the base model on meta; changed in place.
        prefix: path of the base model in the served tree.
        directory: where generated forwards are written.
        stage: of this rank, where there are several.

    Returns:
        `base`, with every parameter on the context's device.
    """
    if stage is not None:
        leave_out(base, stage)
    here: Callable[[str], bool] = stage.has if stage is not None else lambda _: True
    replace_layers(plan, base, prefix, context, here)
    for path in filter(here, dict.fromkeys((*plan.forwards, *plan.methods))):
        site = base.get_submodule(path)
        texts = [text[path] for text in (plan.forwards, plan.methods) if path in text]
        site.__class__ = generate_class(type(site), texts, directory)
    for path in filter(here, plan.numbered):
        setattr(base.get_submodule(path), POSITIONS, None)
    _bare_forwards(base, directory, plan.forwards)
    materialise(base, context)
    return base


def replace_layers(
    plan: Plan, base: nn.Module, prefix: str, context: BuildContext, here: Callable[[str], bool] = lambda _: True
) -> None:
    """Put those of the plan's layers that are `here` into `base`, and nothing else."""
    for path, rewrites in plan.by_site.items():
        if here(path):
            _apply_site(base, path, rewrites, f"{prefix}.{path}", context)


def _apply_site(base: nn.Module, path: str, rewrites: tuple[Rewrite, ...], prefix: str, context: BuildContext) -> None:
    parent_path, _, name = path.rpartition(".")
    parent, site = base.get_submodule(parent_path), base.get_submodule(path)
    for rewrite in rewrites:
        if isinstance(rewrite.layer, FixedRopeSpec):
            _fix_rope(site, rewrite.layer)
        elif isinstance(rewrite.layer, GrownTableSpec):
            rewrite.layer.grow(site)
        elif rewrite.layer is not None:
            setattr(parent, name, build_layer(rewrite.layer, prefix, context, site))
        for child in rewrite.removes:
            delattr(site, child)
        specs: dict[str, LayerSpec] = dict(rewrite.children)
        for child, spec in specs.items():
            site.add_module(child, build_layer(spec, f"{prefix}.{child}", context, site))
        for key, value in rewrite.attributes:
            merged = specs.get(key.removesuffix("_sizes"))
            setattr(site, key, local_sizes(merged, context.tp_size) if merged is not None else value)


def _fix_rope(module: nn.Module, spec: FixedRopeSpec) -> None:
    """Let the module rescale to the longest context once, then take the rescaling away."""
    with torch.no_grad(), torch.device("cpu"):
        last = torch.tensor([[spec.max_len - 1]])
        module(torch.zeros(1, 1, 1), last)
    bare = inspect.unwrap(type(module).forward)
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": bare, "__module__": __name__})


def _bare_forwards(base: PreTrainedModel, directory: Path, edited: Collection[str]) -> None:
    """Strip the decorators from the forwards of whole models.

    They fill in defaults that the engine passes anyway and record outputs that it does not ask for; being closures,
    they keep a compiled model from being saved. A buffer that the forward assigns becomes a local name on the way.
    """
    for path, module in base.named_modules():
        decorated = hasattr(type(module).forward, "__wrapped__") or path in edited
        if not isinstance(module, PreTrainedModel) or not decorated:
            continue
        try:
            source = forward_source(type(module))
        except SourceError:
            continue
        module.__class__ = generate_class(type(module), buffers_as_locals(source, module._buffers.keys()), directory)


def materialise(base: nn.Module, context: BuildContext) -> None:
    """Give a place in memory to every parameter that no vLLM layer made; buffers are real and only move, but for those
    that a class makes like a parameter, which the checkpoint has."""
    wide = _kept_in_float32(base, context.dtype)
    for path, module in base.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            full = f"{path}.{name}"
            dtype = torch.float32 if any(part in full for part in wide) else parameter.dtype
            data = torch.empty(parameter.shape, dtype=dtype, device=context.device)
            module._parameters[name] = nn.Parameter(data, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=context.device)
            elif buffer is not None and buffer.device != context.device:
                module._buffers[name] = buffer.to(context.device)


def share_parameters(root: nn.Module, pairs: Iterable[tuple[str, str]]) -> None:
    """Let each parameter be the one that it is tied to: blocks that a model repeats have one set of weights.

    Args:
        root: the served module tree.
        pairs: (place, place of the one that it shares). Those that differ in shape are left apart, for loading to name.
    """
    live = dict(root.named_parameters(remove_duplicate=False))
    for place, source in pairs:
        if place in live and source in live and live[place].shape == live[source].shape:
            path, _, name = place.rpartition(".")
            root.get_submodule(path)._parameters[name] = live[source]


_UNSETTLED = "tfb_unsettled"
"""Attribute of a module that changes weights: its plain attributes before it did."""


def settle(base: nn.Module, methods: Iterable[tuple[str, str]]) -> None:
    """Let modules change the weights that were just loaded, as their first forward would; call it after each loading.

    Args:
        methods: (module path, name of its method).
    """
    for path, method in methods:
        module = base.get_submodule(path)
        plain = {name: x for name, x in vars(module).items() if isinstance(x, (bool, int, float, str))}
        vars(module).update(vars(module).setdefault(_UNSETTLED, plain))
        with torch.no_grad():
            getattr(module, method)()


def _kept_in_float32(base: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Fragments of the names of parameters that Transformers keeps in float32 whatever the model's dtype."""
    kept = set(getattr(base, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(base, "_keep_in_fp32_modules", None) or ())
    return tuple(kept)
