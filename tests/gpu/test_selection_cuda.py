"""The choice of blocks on a CUDA device, and invariants of the branches for any input."""

import pytest
import torch

from nsa_core import NSAConfig, available_backends, nsa_attention, select_blocks
from nsa_core.backends import BACKENDS

PAPER = NSAConfig()
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=[*BACKENDS, "flash"])
def backend(request):
    """Every backend that runs here; flash for the window beside the kernels."""
    reason = available_backends(torch.device("cuda"), BF16, "win")[request.param]
    if reason is not None:
        pytest.skip(reason)
    return (
        {"cmp": "triton", "slc": "triton", "select": "triton", "win": "flash"}
        if request.param == "flash"
        else request.param
    )


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_selection_is_the_references(make_case, dtype):
    case = make_case(3000, dtype=dtype)
    ours, want = (case.blocks(PAPER, name) for name in ("triton", "reference"))
    assert (ours != want).any(-1).float().mean() < 1e-3  # only scores that differ in the last bits may swap


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_ties_go_to_the_lower_index(make_case, dtype):
    """Equal keys make all blocks away from the ends equally important."""
    case = make_case(3000, dtype=dtype)
    same = case.k[:, :1].expand_as(case.k)
    assert torch.equal(*(select_blocks(case.q, same, PAPER, backend=name) for name in ("triton", "reference")))


@pytest.mark.parametrize(("tokens", "at"), [(4096, 1300), (65_536, 20_000)])
def test_a_needle_is_what_comes_out(make_case, tokens, at):
    """A key with a very large score for the last query, in a block that its compressed token makes it choose."""
    case = make_case(tokens, 4, 2)
    with torch.no_grad():
        case.q[:, -1] = case.q[:, -1:, ::2].repeat_interleave(2, 2)[:, 0]
        case.k[:, at : at + 64] = 4 * case.q[:, -1:, ::2]
        case.v[:, at : at + 64] = 3
        ones = torch.ones_like(case.gates)
        out = nsa_attention(case.q, case.k, case.v, ones, PAPER, branches=("slc",), backend="triton")
    assert (out[:, -1] - 3).abs().max() < 0.05


def test_nothing_before_t_changes_when_later_tokens_do(make_case, backend):
    case, t = make_case(1501), 1277
    other = make_case(1501, seed=1)
    chooser = backend if isinstance(backend, str) else "triton"
    with torch.no_grad():
        out, blocks = nsa_attention(*case.leaves, PAPER, backend=backend), case.blocks(PAPER, chooser)
        for x, y in zip(case.leaves, other.leaves, strict=True):
            x[:, t:] = 30 * y[:, t:]
        changed = nsa_attention(*case.leaves, PAPER, backend=backend)
    assert torch.equal(out[:, :t], changed[:, :t])
    assert not torch.equal(out[:, t], changed[:, t])
    assert torch.equal(blocks[:, :t], case.blocks(PAPER, chooser)[:, :t])


def test_no_gradient_comes_from_a_query_that_sees_nothing_of_it(make_case):
    """Later queries and keys get exact zeros from an output before them."""
    case, t = make_case(1501), 1277
    out = nsa_attention(*case.leaves, PAPER, backend="triton")
    grads = torch.autograd.grad(out[:, :t].square().sum(), case.leaves)
    assert all(x[:, t - 1].any() for x in grads)
    assert not any(x[:, t:].any() for x in grads)
