# pyright: reportMissingImports=false
"""A branch's output added to the residual stream, and RMSNorm of the sum (arXiv 1910.07467), in one pass each way.

The gradient of the stream and that of the branch are the same numbers, float32 and rounded. PyTorch's compiler rounds
them in a pass of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._custom import operator
from ._launch import launch
from ._tiles import Tile, ceil_div, power_of_two

__all__ = ["add_norm"]

_FORWARD, _BACKWARD = 4096, 2048  # numbers of a tile, unless one row has more
_THREAD = 32  # numbers of a tile that a thread holds at most
_PROGRAMS = 4 * 132  # at most: what an H200 runs at a time, of shapes alone so that any device gives the same sums


@triton.jit
def _add_norm(X, DELTA, WEIGHT, SUM, NORMED, RSTD, rows, eps, DIM: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """SUM = X + DELTA [rows,DIM], NORMED = SUM · RSTD · WEIGHT, RSTD [rows] of SUM; M rows."""
    row, n = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M), tl.arange(0, N)
    ok, at = (row < rows)[:, None] & (n < DIM)[None, :], row[:, None] * DIM + n[None, :]
    weight = tl.load(WEIGHT + n, mask=n < DIM, other=0.0).to(tl.float32)
    x = tl.load(X + at, mask=ok, other=0.0) + tl.load(DELTA + at, mask=ok, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    tl.store(SUM + at, x, mask=ok)
    tl.store(NORMED + at, (x * rstd[:, None] * weight[None, :]).to(NORMED.dtype.element_ty), mask=ok)
    tl.store(RSTD + row, rstd, mask=row < rows)


@triton.jit
def _add_norm_backward(
    SUM, WEIGHT, RSTD, DSUM, DNORMED, DX, DDELTA, DWEIGHT, rows, turns,
    DIM: tl.constexpr, N: tl.constexpr, M: tl.constexpr, READ_ON: tl.constexpr,
):  # fmt: skip
    """DX and DDELTA [rows,DIM] of M rows a turn, and DWEIGHT [programs,DIM], summed over a program's turns.

    READ_ON: the sum has a gradient of its own, DSUM.
    """
    n = tl.arange(0, N)
    weight, dweight = tl.load(WEIGHT + n, mask=n < DIM, other=0.0).to(tl.float32), tl.zeros([N], tl.float32)
    for turn in range(turns):
        row = (tl.program_id(0) + turn * tl.num_programs(0)) * M + tl.arange(0, M).to(tl.int64)
        ok, at = (row < rows)[:, None] & (n < DIM)[None, :], row[:, None] * DIM + n[None, :]
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)
        x = tl.load(SUM + at, mask=ok, other=0.0) * rstd[:, None]
        dnormed = tl.load(DNORMED + at, mask=ok, other=0.0).to(tl.float32)
        own = tl.load(DSUM + at, mask=ok, other=0.0) if READ_ON else 0.0  # before the sums, which wait for the rest
        dweight += tl.sum(dnormed * x, 0)
        dx = dnormed * weight[None, :]
        dx = (dx - x * (tl.sum(dx * x, 1) / DIM)[:, None]) * rstd[:, None] + own
        tl.store(DX + at, dx, mask=ok)
        tl.store(DDELTA + at, dx.to(DDELTA.dtype.element_ty), mask=ok)
    tl.store(DWEIGHT + tl.program_id(0) * DIM + n, dweight, mask=n < DIM)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, float32, and its RMSNorm in delta's dtype, each [..,dim]; differentiable in x, delta and weight.

    Args:
        x: float32 [..,dim].
        delta: [..,dim], in the dtype of what reads the result.
        weight: of the norm, [dim].
        eps: added to the mean of squares.
    """
    total, normed, _ = _operator(x, delta, weight, eps)
    return total, normed


def forward(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `add_norm`, without a gradient, and the reciprocal root of each row's mean square, float32 [..]."""
    x, delta = x.contiguous(), delta.contiguous()
    total, normed, rstd = torch.empty_like(x), torch.empty_like(delta), x.new_empty(x.shape[:-1])
    rows, constants, tile = _cut(x, _FORWARD)
    pointers = dict(X=x, DELTA=delta, WEIGHT=weight.contiguous(), SUM=total, NORMED=normed, RSTD=rstd)
    launch(_add_norm, (ceil_div(rows, tile.rows),), pointers | dict(rows=rows, eps=eps), constants, tile)
    return total, normed, rstd


def backward(
    total: Tensor, weight: Tensor, rstd: Tensor, dtotal: Tensor | None, dnormed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, float32, of delta in the dtype of dnormed, and of weight, float32."""
    total, dnormed = total.contiguous(), dnormed.contiguous()
    rows, constants, tile = _cut(total, _BACKWARD)
    tiles = ceil_div(rows, tile.rows)
    programs = min(tiles, _PROGRAMS)
    dx, ddelta = torch.empty_like(total), torch.empty_like(dnormed)
    dweight = total.new_empty(programs, total.shape[-1])
    own = total if dtotal is None else dtotal.contiguous()
    pointers = dict(SUM=total, WEIGHT=weight.contiguous(), RSTD=rstd, DSUM=own, DNORMED=dnormed)
    pointers |= dict(DX=dx, DDELTA=ddelta, DWEIGHT=dweight)
    numbers = dict(rows=rows, turns=ceil_div(tiles, max(programs, 1)))
    launch(_add_norm_backward, (programs,), pointers | numbers, constants | dict(READ_ON=dtotal is not None), tile)
    return dx, ddelta, dweight.sum(0)


def _cut(x: Tensor, numbers: int) -> tuple[int, dict[str, int], Tile]:
    """Rows of x, the kernels' constants, and a tile of about as many numbers."""
    dim = x.shape[-1]
    width = power_of_two(dim)
    rows = max(1, numbers // width)
    # A warp's 32 threads; at most 32 warps are a program.
    tile = Tile(rows=rows, warps=min(32, max(4, rows * width // (32 * _THREAD))))
    return x.numel() // dim, dict(DIM=dim, N=width, M=rows), tile


_operator = operator("add_norm")(forward)
_backward_operator = operator("add_norm_backward")(backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (_, delta, weight, _), (total, _, rstd) = inputs, output
    ctx.dtype = delta.dtype
    ctx.set_materialize_grads(False)  # nobody reads the last norm's sum: no zeros to write and read for it
    ctx.save_for_backward(total, weight, rstd)


def _grad(ctx: Any, dtotal: Tensor | None, dnormed: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    total, weight, rstd = ctx.saved_tensors
    if dnormed is None:
        dnormed = torch.zeros_like(total, dtype=ctx.dtype)
    dx, ddelta, dweight = _backward_operator(total, weight, rstd, dtotal, dnormed)
    return dx, ddelta, dweight.to(weight.dtype), None


_operator.register_autograd(_grad, setup_context=_keep)
