"""vLLM's kernels for a CPU on sizes that no vector register divides, against the plain-torch recurrence."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("vllm")

PROMPT, TOKENS = 6, 9


@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "state"),
    [(4, 8, 2, 5), (6, 24, 3, 20), (4, 64, 1, 128), (2, 80, 2, 64), (3, 7, 1, 3), (8, 32, 2, 17)],
)
def test_scan_of_a_prompt_and_steps(heads, head_dim, groups, state):
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import (
        _mamba_chunk_scan_combined_fwd_cpu as scan,
    )
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update

    draw = torch.Generator().manual_seed(heads)
    x, dt = (torch.randn((TOKENS, heads, *more), generator=draw) for more in ((head_dim,), ()))
    b, c = (torch.randn((TOKENS, groups, state), generator=draw) for _ in range(2))
    decay, skip, bias = -torch.rand(heads, generator=draw), torch.randn(heads), torch.randn(heads, generator=draw)
    wanted = _one_by_one(x, F.softplus(dt + bias), decay, *(y.repeat_interleave(heads // groups, 1) for y in (b, c)))
    wanted = wanted + skip[:, None] * x
    given, pages = torch.empty_like(x), torch.zeros(3, heads, head_dim, state)
    first = slice(0, PROMPT)
    ends = torch.tensor([0, PROMPT], dtype=torch.int32)
    more = {"D": skip, "dt_bias": bias, "dt_softplus": True}
    pages[1] = scan(x[first], dt[first], decay, b[first], c[first], 256, given[first], cu_seqlens=ends, **more)[0]
    slot = torch.tensor([[1]], dtype=torch.int32)
    wide = {"D": skip[:, None].expand(-1, head_dim), "dt_bias": bias[:, None].expand(-1, head_dim)}
    for at in range(PROMPT, TOKENS):
        row = slice(at, at + 1)
        selective_state_update(
            *(pages, x[row], dt[row, :, None].expand(-1, -1, head_dim)),
            *(decay[:, None, None].expand(-1, head_dim, state), b[row], c[row]),
            **wide,
            dt_softplus=True,
            state_batch_indices=slot,
            dst_state_batch_indices=slot,
            out=given[row],
        )
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-4)


def _one_by_one(x, dt, decay, b, c):
    """The definition, token by token in float64."""
    x, dt, decay, b, c = (y.double() for y in (x, dt, decay, b, c))
    state, made = x.new_zeros(*x.shape[1:], b.shape[-1]), []
    for at in range(len(x)):
        state = torch.exp(dt[at] * decay)[:, None, None] * state
        state = state + torch.einsum("h,hp,hn->hpn", dt[at], x[at], b[at])
        made.append(torch.einsum("hpn,hn->hp", state, c[at]))
    return torch.stack(made).float()


def test_limits_are_met_before_the_softplus():
    """What the layer does to a time step before the kernels see it, against the clamp after them."""
    from tfbackend.layers.native import limited

    dt, bias = torch.linspace(-30, 30, 61)[:, None], torch.tensor([-2.0, 0.0, 3.0])
    for low, high in ((0.0, 0.1), (1e-3, float("inf")), (1e-3, 0.1), (0.0, float("inf"))):
        wanted = F.softplus(dt + bias).clamp(low, high)
        torch.testing.assert_close(F.softplus(limited(dt, bias, (low, high)) + bias), wanted, rtol=1e-4, atol=1e-9)
