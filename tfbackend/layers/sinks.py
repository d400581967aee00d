"""Attention sinks: one logit per head that takes its share of each softmax and gives nothing."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from tfbackend.layers.context import BuildContext


def own_sinks(site: nn.Module, name: str, context: BuildContext) -> nn.Parameter:
    """Replace the parameter `name` of `site` by the sinks of this rank's heads, and return them.

    An attention layer keeps the tensor that it is built with, so it has to be the one that will be loaded: a parameter
    that is still on meta would be replaced later, behind the layer's back.
    """
    whole = site._parameters[name]
    assert whole is not None
    data = torch.empty(whole.shape[0] // context.tp_size, dtype=whole.dtype, device=context.device)
    sinks = nn.Parameter(data, requires_grad=False)
    set_weight_attrs(sinks, {"weight_loader": sharded_weight_loader(0)})
    site._parameters[name] = sinks
    return sinks
