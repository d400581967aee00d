"""Parts of one module tree, put into another at the same paths."""

from __future__ import annotations

from torch import nn


def graft(owner: nn.Module, source: nn.Module, path: str, to: str = "") -> None:
    """Put the module, parameter or buffer at `path` of `source` into `owner`, at the same path or at `to`."""
    parent, _, leaf = path.rpartition(".")
    original = source.get_submodule(parent)
    parent, _, name = (to or path).rpartition(".")
    for part in parent.split(".") if parent else []:
        if part not in dict(owner.named_children()):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if leaf in original._modules:
        owner.add_module(name, original.get_submodule(leaf))
    elif leaf in original._parameters:
        owner.register_parameter(name, original._parameters[leaf])
    else:
        owner.register_buffer(name, original._buffers[leaf], leaf not in original._non_persistent_buffers_set)
