"""Engines on a CPU whose gated delta rules are vLLM's layer, which there the plan would not choose.

`serve` has all of it as on a GPU (the layer, its weights and their shards, its pages, what vLLM says of each step) but
for the kernels: in their place stands the definition, in float32 and token by token. `serve_kernels` has vLLM's own
kernels for a CPU, which take bfloat16 and heads of 64 or 128.
"""

from typing import Any
from unittest import mock

from tests.serve import engine, stepping


def serve(request: engine.Request) -> engine.Served:
    """Runs in a forked child, as `engine.serve` does, and so do those below."""
    _choose()
    _compute_plainly()
    return engine.serve(request)


def step(*args: Any, **keywords: Any) -> stepping.Stepped:
    """`stepping.run` likewise."""
    _choose()
    _compute_plainly()
    return stepping.run(*args, **keywords)


def serve_kernels(request: engine.Request) -> engine.Served:
    """With vLLM's own kernels."""
    _choose()
    return engine.serve(request)


def _choose() -> None:
    from tfbackend.deltaspec import DeltaSpec

    mock.patch.object(DeltaSpec, "_kernel_problem", return_value="").start()


def _compute_plainly() -> None:
    import inspect

    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        _core(mixed_qkv, b, a, core_attn_out, layer_name)

    core.__annotations__ = inspect.get_annotations(gdn_attention.cpu_gdn_attention_core, eval_str=True)

    mock.patch.object(gdn_attention, "cpu_gdn_attention_core", core).start()


def _core(mixed: Any, b: Any, a: Any, made: Any, name: Any) -> None:
    """What a step gives for each of its requests, from the states in the pages of each and into them."""
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(name)]
    if context.attn_metadata is None:
        return
    step = context.attn_metadata[layer.prefix]
    ends, slots = step.non_spec_query_start_loc.tolist(), step.non_spec_state_indices_tensor.tolist()
    count = step.num_decodes + step.num_prefills
    begun = [True] * count if step.has_initial_state is None else step.has_initial_state.tolist()
    convs, rules = layer.kv_cache
    for request in range(count):
        rows = slice(ends[request], ends[request + 1])
        conv, rule = convs[slots[request]], rules[slots[request]]
        if not begun[request]:
            conv.zero_(), rule.zero_()
        seen = torch.cat((conv, mixed[rows]))
        conv.copy_(seen[len(seen) - len(conv) :])
        made[rows] = _rule(layer, _convolved(layer, seen, len(conv)), b[rows], a[rows], rule)


def _convolved(layer: Any, seen: Any, before: int) -> Any:
    import torch.nn.functional as F

    return F.silu(F.conv1d(seen.t()[None], layer.conv1d.weight, groups=seen.shape[1])[0]).t()


def _rule(layer: Any, mixed: Any, b: Any, a: Any, state: Any) -> Any:
    """The gated delta rule of this rank's heads; `state` [heads, value_dim, key_dim] is written into."""
    import torch
    import torch.nn.functional as F

    keys, dims = layer.key_dim // layer.tp_size, (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    parts = mixed.split([keys, keys, layer.value_dim // layer.tp_size], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
    each = v.shape[1] // q.shape[1]
    q, k = ((x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(each, 1) for x in (q, k))
    kept, strength = (-layer.A_log.exp() * F.softplus(a + layer.dt_bias)).exp(), b.sigmoid()
    given = []
    for at in range(len(v)):
        state.mul_(kept[at, :, None, None])
        new = strength[at, :, None] * (v[at] - torch.einsum("hvk,hk->hv", state, k[at]))
        state.add_(torch.einsum("hv,hk->hvk", new, k[at]))
        given.append(torch.einsum("hvk,hk->hv", state, q[at]) / dims[0] ** 0.5)
    return torch.stack(given)
