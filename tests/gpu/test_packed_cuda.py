"""Packed sequences on a CUDA device: the results of each sequence by itself, without waiting for the device."""

import pytest
import torch
from torch import Tensor

from nsa_core import NSAConfig, nsa_attention, select_blocks

LENGTHS = [5, 2300, 0, 64, 1025, 1, 4100, 700]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def each_alone(case, config: NSAConfig, lengths: list[int], towards: Tensor) -> list[Tensor]:
    """Output and gradients, sequence by sequence."""
    outs = []
    for one in zip(*(x[0].split(lengths) for x in case.leaves), strict=True):
        if len(one[0]):
            outs.append(nsa_attention(*(x[None] for x in one), config, backend="triton")[0])
    out = torch.cat(outs)
    return [out, *torch.autograd.grad(out, case.leaves, towards)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [(12, 2, 64, torch.bfloat16), (16, 4, 128, torch.bfloat16), (32, 2, 128, torch.float16), (4, 2, 64, torch.float32)],
)
def test_packed_sequences_are_as_each_by_itself(make_case, heads, kv_heads, dim, dtype):
    """Blocks and tiles begin with each sequence; only sums over chunks of queries may differ in rounding."""
    config, cu = NSAConfig(), bounds(LENGTHS)
    case = make_case(sum(LENGTHS), heads, kv_heads, dim, dtype)
    chosen = select_blocks(case.q[0].detach(), case.k[0].detach(), config, cu_seqlens=cu, backend="triton")
    alone = [
        select_blocks(q[None], k[None], config, backend="triton")[0]
        for q, k in zip(*(x.detach()[0].split(LENGTHS) for x in (case.q, case.k)), strict=True)
        if len(q)
    ]
    assert (chosen != torch.cat(alone)).float().mean() < 1e-3
    towards = torch.randn(case.q.shape[1:], generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(dtype)
    want = each_alone(case, config, LENGTHS, towards)
    out = nsa_attention(*(x[0] for x in case.leaves), config, cu_seqlens=cu, backend="triton")
    got = [out, *torch.autograd.grad(out, case.leaves, towards)]
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    for ours, expected in zip(got, want, strict=True):
        assert (ours - expected).float().norm() <= bound * expected.float().norm()


def test_a_call_with_packed_sequences_does_not_wait_for_the_device(make_case):
    case, cu = make_case(sum(LENGTHS)), bounds(LENGTHS)
    call = [x[0] for x in case.leaves]
    nsa_attention(*call, NSAConfig(), cu_seqlens=cu).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        nsa_attention(*call, NSAConfig(), cu_seqlens=cu).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_short_sequences_than_a_grid_has_room_for(make_case):
    case = make_case(40, 4, 2, 32, batch=33_000)
    got = nsa_attention(*case.leaves, NSAConfig(), backend="triton")
    grads = torch.autograd.grad(got, case.leaves, torch.ones_like(got))
    few = [x.detach()[-5:].requires_grad_() for x in case.leaves]
    want = nsa_attention(*few, NSAConfig(), backend="triton")
    torch.testing.assert_close(got[-5:], want, rtol=1e-2, atol=1e-2)
    for ours, expected in zip(grads, torch.autograd.grad(want, few, torch.ones_like(want)), strict=True):
        torch.testing.assert_close(ours[-5:], expected, rtol=2e-2, atol=2e-2)
