"""Gradients of every backend against the float64 oracle; memory and recomputation of the chunked one."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from jobs.measure.memory import measure_peak
from nsa_core import NSAConfig, compress, dense_attention, nsa_attention, routes, select_blocks
from nsa_core.loss import head_cross_entropy

NAMES = ("output", "q", "k", "v", "gates")


def gradients(leaves, run):
    """Output, and gradients of a fixed random projection of it, so that none is zero by symmetry."""
    out = run()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    out.backward(weights)
    found = [out.detach(), *(x.grad for x in leaves)]
    for x in leaves:
        x.grad = None
    return found


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=0.1)).item()


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize(
    ("tokens", "batch", "heads", "kv_heads", "dim", "value_dim"),
    [
        *((tokens, 2, 4, 2, 16, 16) for tokens in (1, 7, 8, 17, 64, 131)),
        *((90, 1, heads, kv_heads, 16, 24) for heads, kv_heads in ((3, 3), (6, 1), (12, 2), (32, 2))),
        *((90, 1, 4, 2, *dims) for dims in ((64, 96), (96, 64), (192, 128), (256, 256))),
    ],
)
def test_a_backend_agrees_with_the_oracle(
    fast_backend, make_case, config, tokens, batch, heads, kv_heads, dim, value_dim
):
    case = make_case(tokens, heads, kv_heads, dim, value_dim, batch)
    case.gates.data -= 0.3  # gates may be below zero
    exact = case.to(torch.float64)
    expected = gradients(exact.leaves, lambda: nsa_attention(*exact.leaves, config, backend="reference"))
    actual = gradients(case.leaves, lambda: nsa_attention(*case.leaves, config, backend=fast_backend))
    assert actual[0].shape == (batch, tokens, heads, value_dim)
    for name, got, want in zip(NAMES, actual, expected, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, want) < 2e-5, name


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_gradients_of_each_branch_are_numerical_derivatives(fast_backend, make_case, branch):
    config = NSAConfig(4, 2, 4, 2, 0, 1, 5)
    case = make_case(11, 2, 1, 3, dtype=torch.float64)
    # Differences must not move the selection: it passes no gradient, but it jumps.
    k_cmp = compress(case.k, config).detach()

    def run(q, k, v, gates):
        keys = {"k_cmp": k_cmp} if branch == "slc" else {}
        return nsa_attention(q, k, v, gates, config, branches=(branch,), backend=fast_backend, **keys)

    assert torch.autograd.gradcheck(run, case.leaves, eps=1e-7, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_an_eager_run(fast_backend, make_case, config, dtype):
    """A backend is at most twice as far from float64 as the eager naive run, with the same blocks."""
    case = make_case(150, dtype=dtype)
    blocks = [select_blocks(case.q, case.k, config, backend=name) for name in (fast_backend, "reference", "naive")]
    assert all(torch.equal(blocks[0], other) for other in blocks[1:])
    exact = case.to(torch.float64)
    expected = gradients(exact.leaves, lambda: nsa_attention(*exact.leaves, config, backend="reference"))
    eager = gradients(case.leaves, lambda: nsa_attention(*case.leaves, config, backend="naive"))
    actual = gradients(case.leaves, lambda: nsa_attention(*case.leaves, config, backend=fast_backend))
    for name, got, other, want in zip(NAMES, actual, eager, expected, strict=True):
        assert got.dtype == dtype
        assert relative_error(got, want) <= 2 * relative_error(other, want), name
    largest = [(x[0].double() - expected[0]).abs().max() for x in (actual, eager)]
    assert largest[0] <= 2 * largest[1]


def test_autocast_around_the_backward_changes_no_bit_and_float64_stays(make_case, config):
    case = make_case(70)
    with torch.autocast("cpu", torch.bfloat16):
        out = nsa_attention(*case.leaves, config, backend="chunked")
        within = torch.autograd.grad(out.sum(), case.leaves, retain_graph=True)
        assert nsa_attention(*case.to(torch.float64).leaves, config).dtype == torch.float64
    assert all(map(torch.equal, within, torch.autograd.grad(out.sum(), case.leaves)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(make_case, config, reentrant):
    case = make_case(130)
    plain = gradients(case.leaves, lambda: nsa_attention(*case.leaves, config, backend="chunked"))

    def call(q, k, v, gates):
        return nsa_attention(q, k, v, gates, config, backend="chunked")

    again = gradients(case.leaves, lambda: checkpoint(call, *case.leaves, use_reentrant=reentrant))
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), [(4, 4, 16, 16), (6, 2, 16, 24), (4, 2, 24, 16)])
def test_dense_attention_is_causal_and_names_its_kernel(make_case, window, heads, kv_heads, dim, value_dim):
    case = make_case(60, heads, kv_heads, dim, value_dim)
    exact, config = case.to(torch.float64), NSAConfig(window=window or 60)
    oracle = {"branches": ("win",), "backend": "reference", "scale": 0.5}
    ones = torch.ones_like(exact.gates)
    with routes.capture() as runs:
        actual = gradients(case.leaves[:3], lambda: dense_attention(*case.leaves[:3], window=window, scale=0.5))
    assert [(run.branch, run.kernel.split("-")[0]) for run in runs] == [("dense", "chunked" if window else "sdpa")]
    expected = gradients(exact.leaves[:3], lambda: nsa_attention(*exact.leaves[:3], ones, config, **oracle))
    assert all(relative_error(got, want) < 1e-5 for got, want in zip(actual, expected, strict=True))


def extra_memory(make_case, tokens, name, backward):
    case = make_case(tokens, heads=6, kv_heads=1, dim=32)
    config = NSAConfig(16, 8, 32, 8, 1, 2, 128)
    out = torch.ones(1, tokens, 6, 32)

    def run():
        if backward:
            torch.autograd.grad(nsa_attention(*case.leaves, config, backend=name), case.leaves, out)
        else:
            with torch.no_grad():
                nsa_attention(*case.leaves, config, backend=name)

    return measure_peak(run, torch.device("cpu"), 0).extra


@pytest.fixture
def one_thread():
    """One thread: with thousands of small products on a busy machine a second one only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("backward", [False, True])
def test_extra_memory_is_linear_when_chunked_and_square_when_naive(make_case, backward):
    def exponent(name, short, long):
        sizes = [extra_memory(make_case, tokens, name, backward) for tokens in (short, long)]
        return math.log(sizes[1] / sizes[0]) / math.log(long / short)

    assert 0.7 <= exponent("chunked", 1024, 4096) <= 1.08
    assert exponent("naive", 256, 1024) >= 1.7


def test_a_penalty_on_gradients_is_refused(make_case, config):
    """Not dropped without a word, also where the incoming gradient has no derivative of its own."""
    case = make_case(96, 4, 2)
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    losses = {case.q: nsa_attention(*case.leaves, config).sum(), x: head_cross_entropy(x, weight, torch.arange(5), 4)}
    for leaf, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            gradient.sum().backward()
