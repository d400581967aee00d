"""Hands the tensors of a checkpoint to the live parameters, and lets nothing go wrong in silence.

vLLM's weight loaders slice before they compare, so a tensor that is too large is cut to size, and one that is too small
ends in a bare assert. Here each tensor is held against the shape that the Transformers model has for it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.weight_utils import default_weight_loader, maybe_remap_kv_scale_name
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

from tfbackend.errors import CheckpointError
from tfbackend.layers.reading import readable
from tfbackend.weights import Dropped, Ledger, Placement, Shard, WeightMap
from tfbackend.weights.drops import drop

_WIDE_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ABSENT = (PPMissingLayer, StageMissingLayer)
"""What vLLM puts where another stage has a layer, or nobody: a language model that embeds needs no head."""
_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def load(
    root: nn.Module,
    weight_map: WeightMap,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    quantized: bool = False,
    source: str = "",
) -> tuple[set[str], Ledger]:
    """Load a checkpoint into the served modules, completely or not at all.

    Args:
        root: the served module tree, with the base model at `model` and the head at `lm_head`.
        weight_map: places by checkpoint name, of the same model.
        weights: (name, full unsharded tensor), in any order.
        quantized: whether vLLM made the layers for a quantized checkpoint.
        source: the folder or name of the checkpoint, for messages.

    Returns:
        Names of all parameters and buffers that are loaded, and the accounts.

    Raises:
        MissingTensorError: a parameter, or a shard of it, was not filled.
        UnexpectedTensorError: a tensor has no place, or two have the same.
        ShapeMismatchError: a tensor has not the shape, or the kind of dtype, of its place.
        CheckpointError: a file cannot be read to its end.
    """
    live = _Live(root, weight_map, quantized)
    ledger = weight_map.new_ledger()
    for placement, tensor in weight_map.stream(readable(weights, source), ledger, present=live.has_stage_of):
        if placement.unties:
            live.untie(placement)
        found = live.find(placement, tensor)
        if isinstance(found, Placement):
            _load_one(found, tensor, live, weight_map, ledger, quantized)
        elif isinstance(found, Dropped):
            ledger.drop(placement.source_name, found)
        else:
            ledger.unexpected(placement.source_name)
    ledger.check(live.expected())
    return live.all_names(live.loaded), ledger


def _load_one(
    placement: Placement, tensor: torch.Tensor, live: _Live, weight_map: WeightMap, ledger: Ledger, quantized: bool
) -> None:
    """Load a tensor that fits into a place that is free; otherwise book why not, and go on to the next."""
    target = live.tensors[placement.target]
    turned = placement.transposed and not (quantized and tensor.dtype not in _WIDE_FLOATS)
    misfit = _misfit(placement, target, tensor, weight_map, quantized)
    if misfit is not None:
        ledger.misfit(placement.source_name, str(placement), found=misfit[0], needed=misfit[1])
        return
    if not ledger.claim(placement):
        return
    tensor = tensor.t() if turned else tensor
    if placement.cleared:
        tensor = tensor.index_fill(0, torch.tensor(placement.cleared, device=tensor.device), 0)
    loader: Any = getattr(target, "weight_loader", default_weight_loader)
    assert loader is not default_weight_loader or not target.is_meta, f"{placement.target} was left on meta"
    if placement.shard is None:
        loader(target, tensor)
    else:
        loader(target, tensor, placement.shard)
    live.loaded.add(placement.target)


class _Live:
    """The parameters and buffers that exist on this rank.

    Attributes:
        tensors: by name; a shared parameter has all its names.
        loaded: names that were filled, one for each shared parameter.
    """

    def __init__(self, root: nn.Module, weight_map: WeightMap, quantized: bool) -> None:
        self._root = root
        self._targets = weight_map.targets
        self._quantized = quantized
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._elsewhere = tuple(f"{n}." for n, m in self._modules.items() if isinstance(m, _ABSENT))
        self.tensors: dict[str, torch.Tensor] = dict(root.named_parameters(remove_duplicate=False))
        # Of the buffers, only those that the Transformers model saves; vLLM's layers have others of their own.
        self._buffers = {n: b for n, b in root.named_buffers(remove_duplicate=False) if n in self._targets}
        self.tensors.update(self._buffers)
        # A shared parameter is booked under the name that the map fills it by.
        self._first: dict[int, str] = {}
        for name in sorted(self.tensors, key=lambda name: name not in self._targets):
            self._first.setdefault(id(self.tensors[name]), name)
        self.loaded: set[str] = set()

    def has_stage_of(self, target: str) -> bool:
        """Whether this pipeline stage has the module that `target` is in."""
        return not target.startswith(self._elsewhere)

    def find(self, placement: Placement, tensor: torch.Tensor) -> Placement | Dropped | None:
        """The placement with the live name of its target, or the rule that drops the tensor, or None."""
        target = placement.target
        if target in self.tensors:
            return replace(placement, target=self._first[id(self.tensors[target])])
        if not self._quantized:
            return None
        scale = maybe_remap_kv_scale_name(target, self.tensors)
        if scale is None:
            return drop("unused-cache-scale")
        if scale != target:
            return replace(placement, target=scale, shard=None)
        if target.endswith(".bias") and not tensor.any():
            return drop("zero-bias")
        if target.endswith(".g_idx") and _in_order(tensor):
            return drop("ordered-group-index")
        return None

    def untie(self, placement: Placement) -> None:
        """Give a tied parameter storage of its own, like that of the one it shared.

        Raises:
            CheckpointError: the module of the parameter is itself the one of the other.
        """
        path, _, leaf = placement.target.rpartition(".")
        shared = self.tensors.get(placement.target)
        owners = [n for n, t in self.tensors.items() if t is shared]
        module = self._modules.get(path)
        others = [n for n in owners if self._modules[n.rpartition(".")[0]] is not module]
        if shared is None or module is None or not others:
            raise CheckpointError(
                "The config ties two parameters that differ in the checkpoint.",
                where=f"{placement.source_name} for {placement.target}",
                needed="a tensor equal to that of the parameter it is tied to",
                remedy="""Serve it with --hf-overrides '{"tie_word_embeddings": false}'""",
            )
        own = nn.Parameter(torch.empty_like(shared), requires_grad=False)
        own.__dict__.update(shared.__dict__)
        own.__dict__.pop("weight_loader", None)
        if hasattr(module, "weight_loader"):
            own.weight_loader = module.weight_loader  # type: ignore[attr-defined]
        setattr(module, leaf, own)
        self.tensors[placement.target] = own
        self._first[id(own)] = placement.target
        if self._first[id(shared)] == placement.target:
            self._first[id(shared)] = others[0]

    def expected(self) -> dict[str, tuple[Shard, ...]]:
        """What has to be filled: each parameter once, whatever it is called, and the saved buffers."""
        names = [name for name, tensor in self.tensors.items() if self._first[id(tensor)] == name]
        return {name: self._shards(name) for name in names if self._must_be_filled(name)}

    def all_names(self, names: Iterable[str]) -> set[str]:
        """The names with those that share their parameters."""
        ids = {id(self.tensors[name]) for name in names}
        return {name for name, tensor in self.tensors.items() if id(tensor) in ids}

    def _shards(self, name: str) -> tuple[Shard, ...]:
        owner, own = self._modules[name.rpartition(".")[0]], getattr(self.tensors[name], "shards", None)
        if own is not None:
            return tuple(own)
        if isinstance(owner, QKVParallelLinear):
            return ("q", "k", "v")
        if isinstance(owner, MergedColumnParallelLinear):
            return tuple(range(len(owner.output_sizes)))
        return ()

    def _must_be_filled(self, name: str) -> bool:
        """Always, but for the parameters that a quantization method made: of those, each layer's largest.

        Which of the others (scales, zero points, group indices) a checkpoint has differs by method and by quantizer.
        """
        owner = self._modules[name.rpartition(".")[0]]
        method = getattr(owner, "quant_method", None)
        if not self._quantized or name in self._targets or method is None or isinstance(method, _UNQUANTIZED):
            return True
        sizes = {n: p.numel() * p.element_size() for n, p in owner.named_parameters(recurse=False)}
        leaf = name.rpartition(".")[2]
        # A layer with scalars only is attention, with the scales of its KV cache; those have defaults.
        return self.tensors[name].ndim > 0 and leaf == max(sizes, key=lambda n: sizes[n])


def _in_order(index: torch.Tensor) -> bool:
    """Whether the group of each input is that of its place, groups being of one size."""
    if index.ndim != 1 or index.is_floating_point() or not index.numel():
        return False
    size = int((index == 0).sum())
    return size > 0 and torch.equal(index.long(), torch.arange(len(index), device=index.device) // size)


def _misfit(
    placement: Placement, target: torch.Tensor, tensor: torch.Tensor, weight_map: WeightMap, quantized: bool
) -> tuple[str, str] | None:
    """(found, needed) where a tensor has not the shape or the kind of dtype of its place, else None."""
    expected = weight_map.expected(placement.canonical)
    if quantized and (expected is None or tensor.dtype not in _WIDE_FLOATS):
        return None  # packed: only the quantization method knows its shape
    if expected is not None and tensor.shape != expected.shape:
        return _spell(tensor), _spell(expected)
    if not hasattr(target, "weight_loader") and tensor.shape != target.shape:
        return _spell(tensor), f"{_spell(target)}, as the layer was built"
    if not quantized and not _castable(tensor.dtype, target.dtype):
        return str(tensor.dtype), f"{target.dtype}" + (" or another float dtype" * (target.dtype in _WIDE_FLOATS))
    return None


def _castable(found: torch.dtype, needed: torch.dtype) -> bool:
    return found == needed or (found in _WIDE_FLOATS and needed in _WIDE_FLOATS)


def _spell(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))
