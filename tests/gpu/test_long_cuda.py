"""131,072 and 1,048,576 tokens on a CUDA device: sampled rows against float64, and linear memory."""

from types import SimpleNamespace

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention

pytestmark = pytest.mark.large
PAPER = NSAConfig()
TOKENS = 131_072


def rows_of(tokens):
    """Rows without a compressed token, without and with a choice, at the bounds of blocks, and the last row."""
    return [0, 31, 1023, 1024, tokens // 3, tokens // 2 - 1, tokens // 2, tokens - 1]


def row_by_row(case, blocks, towards, dtype):
    """Output and gradients of `rows_of` in plain PyTorch, one query at a time with the keys that it may see.

    `towards` [rows,HQ,D] holds the gradients of their outputs. Gradients of q and the gates are per row; gradients of k
    and v [T,HKV,D] are float64 sums over the rows.
    """
    found, tokens = SimpleNamespace(out=[], dq=[], dgates=[], dk=0, dv=0), case.q.shape[1]
    for row, toward in zip(rows_of(tokens), towards, strict=True):
        seen = slice(0, row + 1)
        q, gates = (x[:, row : row + 1] for x in (case.q, case.gates))
        one = type(case)(q, case.k[:, seen], case.v[:, seen], gates).to(dtype)
        got = one.with_blocks(blocks[:, row : row + 1], PAPER, "naive", toward[None, None])
        out, dq, dk, dv, dgates = (x[0].double() for x in got)
        for held, x in ((found.out, out), (found.dq, dq), (found.dgates, dgates)):
            held.append(x)
        room = (0, 0, 0, 0, 0, tokens - row - 1)
        found.dk, found.dv = (held + torch.nn.functional.pad(x, room) for held, x in ((found.dk, dk), (found.dv, dv)))
    return [torch.cat(found.out), torch.cat(found.dq), found.dk, found.dv, torch.cat(found.dgates)]


@pytest.mark.parametrize("tokens", [TOKENS, 1_048_576])
def test_sampled_rows_are_as_good_as_an_eager_run(make_case, tokens):
    """dq and dgates are compared at the sampled rows, dk and dv with a gradient from the sampled rows alone."""
    case, rows = make_case(tokens), rows_of(tokens)
    blocks = case.blocks(PAPER)
    towards = torch.randn(case.q.shape[1:], generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(
        case.q.dtype
    )
    exact, eager = (row_by_row(case, blocks, towards[rows], dtype) for dtype in (torch.float64, case.q.dtype))
    out = nsa_attention(*case.leaves, PAPER, backend="triton")
    of_rows = torch.zeros_like(towards)
    of_rows[rows] = towards[rows]
    dq, *_, dgates = torch.autograd.grad(out, case.leaves, towards[None], retain_graph=True)
    _, dk, dv, _ = torch.autograd.grad(out, case.leaves, of_rows[None])
    ours = [out[0, rows], dq[0, rows], dk[0], dv[0], dgates[0, rows]]
    for got, other, want in zip(ours, eager, exact, strict=True):
        assert (got - want).norm() <= 2 * (other - want).norm()


def test_extra_memory_is_linear(make_case):
    peaks = []
    for tokens in (16_384, TOKENS):
        case = make_case(tokens)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.run(PAPER)
        peaks.append((torch.cuda.max_memory_allocated() - before) / tokens)
    assert peaks[1] <= peaks[0] * 1.02
