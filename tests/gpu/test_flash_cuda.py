"""Flash kernels on a CUDA device: every one installed, for dense attention and the window, against float64."""

from itertools import pairwise

import pytest
import torch

from jobs import adapters
from nsa_core import NSAConfig, dense_attention, nsa_attention, routes
from nsa_core.backends import dense, flash

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = [(12, 2, 64, 64, BF16), (8, 2, 128, 128, BF16), (4, 4, 96, 64, FP16), (6, 1, 20, 20, BF16)]


def usable(names, dtype=BF16, width=64):
    host = flash.here(torch.device("cuda"))
    return [name for name in names if dense.unusable(name, host, dtype, width) is None]


@pytest.fixture(params=dense.KERNELS)
def kernel(request):
    """A kernel of dense attention that can run here."""
    if request.param not in usable(dense.KERNELS):
        pytest.skip(f"{request.param} cannot run here")
    return request.param


@pytest.fixture(params=flash.PROVIDERS)
def provider(request):
    """A kernel with windows that can run here."""
    if request.param not in usable(flash.PROVIDERS):
        pytest.skip(f"{request.param} cannot run here")
    return request.param


def operands(tokens, heads, kv_heads, dim, value_dim, dtype, rows=None, batch=2, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(rows or tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, value_dim)]
    return [torch.randn(batch, *s, generator=generator, device="cuda").to(dtype).requires_grad_() for s in shapes]


def run(attend, leaves):
    """Output and gradients, and the kernels that ran."""
    with routes.capture() as runs:
        out = attend(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))], [run.kernel for run in runs]


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def ones_for(q):
    return torch.ones(*q.shape[:-1], 3, device=q.device, dtype=q.dtype)


def by(backend, window):
    """The window branch with gates of one, as a function of q, k and v."""
    config = NSAConfig(window=window)
    return lambda q, k, v: nsa_attention(q, k, v, ones_for(q), config, branches=("win",), backend=backend)


def assert_as_good_as_eager(attend, leaves, window, name):
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact, _ = run(by("chunked", window), wide)
    eager, _ = run(by("naive", window), leaves)
    got, kernels = run(attend, leaves)
    assert kernels == [name]
    for ours, other, want in zip(got, eager, exact, strict=True):
        assert ours.dtype == other.dtype
        floor = 1e-3 * want.numel() ** 0.5  # with a window of one, q and k have zero gradients
        assert (ours.double() - want).norm() <= 2 * (other.double() - want).norm() + floor


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim", "dtype"), HEADS)
def test_dense(kernel, heads, kv_heads, dim, value_dim, dtype):
    leaves = operands(777, heads, kv_heads, dim, value_dim, dtype)
    assert_as_good_as_eager(lambda *qkv: dense_attention(*qkv, backend=kernel), leaves, 777, kernel)


def test_a_compiled_whole_graph_gives_the_same_as_eager(kernel):
    leaves = operands(2_048, 12, 2, 64, 64, BF16)
    attend = torch.compile(lambda q, k, v: dense_attention(q, k, v, backend=kernel), fullgraph=True)
    eager, _ = run(lambda q, k, v: dense_attention(q, k, v, backend=kernel), leaves)
    compiled, _ = run(attend, leaves)
    assert torch.equal(compiled[0], eager[0])
    assert max(distance(got, want) for got, want in zip(compiled[1:], eager[1:], strict=True)) < 0.01


@pytest.mark.parametrize(
    ("window", "rows"), [*((window, 777) for window in (1, 2, 512, 776, 777, 5000)), (5000, 130), (100, 130)]
)
def test_windows_of_dense_attention_and_the_last_rows_behind_a_longer_k(provider, window, rows):
    leaves = operands(777, *HEADS[0], rows=rows)
    assert_as_good_as_eager(
        lambda *qkv: dense_attention(*qkv, window=window, backend=provider), leaves, window, provider
    )


@pytest.mark.parametrize("window", [1, 512, 5000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim", "dtype"), HEADS[:3])
def test_the_window_branch(provider, window, heads, kv_heads, dim, value_dim, dtype, monkeypatch):
    monkeypatch.setattr(flash, "PROVIDERS", (provider,))
    leaves = operands(1001, heads, kv_heads, dim, value_dim, dtype)
    assert_as_good_as_eager(by("flash", window), leaves, window, provider)


@pytest.mark.parametrize("window", [None, 100])
def test_packed_sequences_at_once_and_without_waiting(provider, window):
    bounds = torch.tensor([0, 1, 6, 706, 777], dtype=torch.int64, device="cuda")
    leaves = [x[0].detach().requires_grad_() for x in operands(777, *HEADS[0])]

    def attend(q, k, v):
        return dense_attention(q, k, v, cu_seqlens=bounds, window=window, backend=provider)

    def one_by_one(q, k, v):
        singles = ((q[None, a:b], k[None, a:b], v[None, a:b]) for a, b in pairwise(bounds.tolist()))
        return torch.cat([dense_attention(*single, window=window, backend=provider)[0] for single in singles])

    (want, _), (got, kernels) = run(one_by_one, leaves), run(attend, leaves)
    assert kernels == [provider]
    assert all(distance(x, y) < 5e-3 for x, y in zip(got, want, strict=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(attend, leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_inputs_that_no_flash_kernel_takes_fall_back():
    leaves = operands(300, 4, 2, 64, 64, FP32)
    got, kernels = run(dense_attention, leaves)
    assert kernels == ["sdpa-efficient"]
    assert distance(got[0], run(by("chunked", 300), leaves)[0][0]) < 1e-5
    for attend in (lambda *qkv: dense_attention(*qkv, window=50), lambda q, k, v: dense_attention(q[:, 200:], k, v)):
        assert run(attend, leaves)[1] == ["chunked"]
    assert run(lambda *qkv: dense_attention(*qkv, window=50), operands(300, 2, 2, 320, 320, BF16))[1] == ["chunked"]


@pytest.mark.parametrize("others", ["triton", "chunked"])
def test_the_window_beside_other_backends(others):
    q, k, v = operands(1300, *HEADS[0])
    gates = torch.rand(*q.shape[:-1], 3, device="cuda", dtype=BF16).requires_grad_()
    mixed = {"cmp": others, "slc": others, "select": others, "win": "flash"}

    def attend(backend):
        return run(lambda *x: nsa_attention(*x, NSAConfig(), backend=backend), [q, k, v, gates])

    (got, kernels), (want, _) = attend(mixed), attend(others)
    assert set(kernels) == {others, *usable(flash.PROVIDERS)[:1]}
    assert all(distance(x, y) < 8e-3 for x, y in zip(got, want, strict=True))


def test_gradients_are_reproducible_if_pytorch_is_deterministic(provider):
    leaves = operands(3001, *HEADS[0])
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(lambda *qkv: dense_attention(*qkv, window=512, backend=provider), leaves)[0] for _ in "12")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("window", [1, 512, 5000])
def test_peers_window_of_fixed_lengths_is_that_of_packed_ones(window):
    leaves = operands(1500, 16, 4, 128, 128, BF16)
    fixed, packed = (
        run(lambda q, k, v, kernel=kernel: adapters.window(q, k, v, NSAConfig(window=window), kernel), leaves)
        for kernel in (adapters.TORCH_FIXED, "torch-varlen")
    )
    assert fixed[1] == ["torch-fixed"]
    for got, want in zip(fixed[0], packed[0], strict=True):
        assert distance(got, want) < 1e-3
