"""The Triton backend on a CUDA device: values, gradients, selection, determinism, memory, no host synchronisation."""

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention, select_blocks
from nsa_core.backends import BACKENDS
from nsa_core.functional import compress

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAPER = NSAConfig()
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=24)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def operands(tokens, heads, kv_heads, dim, dtype, value_dim=None, batch=1, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    value_dim = value_dim or dim
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim)]
    tensors = [torch.randn(batch, tokens, *s, generator=generator, device="cuda").to(dtype) for s in shapes]
    gates = torch.rand(batch, tokens, heads, 3, generator=generator, device="cuda").to(dtype)
    return [x.requires_grad_() for x in (*tensors, gates)]


def gradients(out, leaves):
    weights = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


def run(leaves, config, backend="triton"):
    return gradients(nsa_attention(*leaves, config, backend=backend), leaves)


def with_blocks(leaves, blocks, config, backend):
    """Output and gradients by `backend` with given blocks."""
    q, k, v, gates = leaves
    cmp, slc, win = gates.unbind(-1)
    scale, ways = q.shape[-1] ** -0.5, BACKENDS[backend]
    out = ways.compressed(q, compress(k, config), compress(v, config), cmp, config, 0, scale)
    out = out + ways.selected(q, k, v, slc, blocks, config, scale) + ways.window(q, k, v, win, config.window, scale)
    return gradients(out, leaves)


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "value_dim", "dtype"),
    [
        (1000, 12, 2, 64, 64, BF16),
        (777, 4, 4, 128, 128, BF16),
        (1200, 32, 2, 128, 128, BF16),
        (900, 6, 2, 96, 64, FP16),
        (900, 16, 2, 32, 32, BF16),
        (900, 3, 1, 192, 128, BF16),
        (700, 4, 2, 256, 256, FP16),
    ],
)
def test_half_precision_is_as_good_as_an_eager_run(tokens, heads, kv_heads, dim, value_dim, dtype):
    leaves = operands(tokens, heads, kv_heads, dim, dtype, value_dim)
    blocks = select_blocks(*leaves[:2], PAPER, backend="triton")
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = with_blocks(wide, blocks, PAPER, "naive")
    eager = with_blocks(leaves, blocks, PAPER, "naive")
    ours = with_blocks(leaves, blocks, PAPER, "triton")
    whole = run(leaves, PAPER)
    for got, at_once, other, want in zip(ours, whole, eager, exact, strict=True):
        assert distance(got, want) <= 2 * distance(other, want)
        assert distance(at_once, want) <= 2 * distance(other, want)


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 100, 777])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 64), (4, 4, 128), (16, 1, 32)])
def test_float32_is_the_oracle(tokens, heads, kv_heads, dim):
    leaves = operands(tokens, heads, kv_heads, dim, FP32)
    exact = run([x.detach().double().requires_grad_() for x in leaves], SMALL, "reference")
    for got, want in zip(run(leaves, SMALL), exact, strict=True):
        assert (got - want).abs().max() <= 1e-4 * max(1, want.abs().max())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_selection_is_the_references(dtype):
    q, k, *_ = operands(3000, 12, 2, 64, dtype)
    ours, want = (select_blocks(q, k, PAPER, backend=name) for name in ("triton", "reference"))
    assert (ours != want).any(-1).float().mean() < 1e-3  # only scores that differ in the last bits may swap
    same = k[:, :1].expand_as(k)
    assert torch.equal(*(select_blocks(q, same, PAPER, backend=name) for name in ("triton", "reference")))


def test_a_needle_is_found_far_away():
    q, k, *_ = operands(65536, 4, 2, 64, BF16)
    with torch.no_grad():
        k[:, 20000:20032] = 4 * q[:, -1:, ::2]
    blocks = select_blocks(q[:, -1:], k, PAPER, backend="triton")
    assert (blocks == 20000 // 64).any(-1).all()


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(5000, 12, 2, 64), (9000, 32, 8, 128)])
def test_the_same_input_gives_the_same_bits_twice(tokens, heads, kv_heads, dim):
    leaves = operands(tokens, heads, kv_heads, dim, BF16)
    first = run(leaves, PAPER)
    run(operands(700, 4, 2, 128, BF16), SMALL)
    assert all(torch.equal(x, y) for x, y in zip(first, run(leaves, PAPER), strict=True))


def test_all_queries_choose_one_block():
    """One block that every query selects, and far more work in it than in others."""
    leaves = operands(4000, 12, 2, 64, BF16)
    with torch.no_grad():
        leaves[1][:, 1280:1344] = leaves[0].mean(1, keepdim=True)[:, :, ::6] * 50
    blocks = select_blocks(*leaves[:2], PAPER, backend="triton")
    exact = with_blocks([x.detach().double().requires_grad_() for x in leaves], blocks, PAPER, "chunked")
    for got, want in zip(with_blocks(leaves, blocks, PAPER, "triton"), exact, strict=True):
        assert distance(got, want) < 8e-3


def test_nothing_before_t_changes_when_later_tokens_do():
    leaves = operands(3000, 12, 2, 64, BF16)
    out = nsa_attention(*leaves, PAPER, backend="triton")
    with torch.no_grad():
        for x in leaves:
            x[:, 1777:] = 1 - x[:, 1777:]
    assert torch.equal(out[:, :1777], nsa_attention(*leaves, PAPER, backend="triton")[:, :1777])


def test_inputs_need_not_be_contiguous():
    leaves = operands(600, 8, 2, 64, BF16)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    assert all(torch.equal(x, y) for x, y in zip(run(leaves, PAPER), run(strided, PAPER), strict=True))


def test_gates_of_zero_and_one():
    leaves = operands(900, 12, 2, 64, FP32)
    with torch.no_grad():
        leaves[3].copy_((leaves[3] > 0.5).float())
    exact = run([x.detach().double().requires_grad_() for x in leaves], SMALL, "chunked")
    for got, want in zip(run(leaves, SMALL), exact, strict=True):
        assert distance(got, want) < 1e-5


def test_nothing_waits_for_the_device_and_a_graph_captures_it():
    leaves = operands(3000, 12, 2, 64, BF16)
    run(leaves, PAPER)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(leaves, PAPER)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = nsa_attention(*leaves, PAPER, backend="triton")
    graph.replay()
    assert torch.equal(captured, nsa_attention(*leaves, PAPER, backend="triton"))


def test_extra_memory_is_linear():
    peaks = []
    for tokens in (16384, 131072):
        leaves = operands(tokens, 12, 2, 64, BF16)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(leaves, PAPER)
        peaks.append((torch.cuda.max_memory_allocated() - before) / tokens)
    assert peaks[1] <= peaks[0] * 1.02
