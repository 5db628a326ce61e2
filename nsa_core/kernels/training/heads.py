# pyright: reportMissingImports=false
"""Splits the product of all projections into heads: q and keys rotated (RoPE, arXiv 2104.09864), gates by sigmoid.

One pass forward and one backward; PyTorch's compiler takes four and seven, one of them to concatenate the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from ..runtime.launch import launch
from ..runtime.tiles import Tile, ceil_div, power_of_two

_ROWS = 32  # a program


@triton.jit
def _turn(
    Y, X, at, apart, cos, sin, ok, HALF: tl.constexpr, ROTATED: tl.constexpr, BACKWARD: tl.constexpr
):  # fmt: skip
    """Copy one head of each row, rotated where ROTATED, from Y + at to X + apart; BACKWARD: back, from X to Y."""
    source = X + apart if BACKWARD else Y + at
    to = Y + at if BACKWARD else X + apart
    first = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    if ROTATED:
        turned = -sin if BACKWARD else sin
        first, second = first * cos - second * turned, second * cos + first * turned
    tl.store(to, first.to(to.dtype.element_ty), mask=ok)
    tl.store(to + HALF, second.to(to.dtype.element_ty), mask=ok)


@triton.jit
def _heads(
    Y, OTHER, COS, SIN, Q, K1, K2, K3, V1, V2, V3, GATES, total, S,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, HALFP: tl.constexpr, GP: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Splits rows of all projections into rotated heads and gates; BACKWARD: joins their gradients into rows.

    Grid: (tiles of M rows). A program owns M rows of Y, in which q, three k, three v and the gates' logits lie side by
    side, loops over the heads, and writes each part to its tensor. BACKWARD: Q to GATES hold gradients, OTHER the
    gates, and the gradient of the rows goes to Y, zeros in its padding.
    Y [rows,W]; Q [rows,HQ,D], K1 to V3 [rows,HKV,D], GATES [rows,3·HQ]; OTHER: the gates' bias; COS, SIN [S,HALF].
    """
    D: tl.constexpr = 2 * HALF
    row, d, g = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M), tl.arange(0, HALFP), tl.arange(0, GP)
    ok = (row < total)[:, None] & (d < HALF)[None, :]
    angle = (row % S)[:, None] * HALF + d[None, :]
    cos, sin = tl.load(COS + angle, mask=ok, other=0.0), tl.load(SIN + angle, mask=ok, other=0.0)
    at = row[:, None] * W + d[None, :]
    for h in range(HQ):
        _turn(Y, Q, at + h * D, (row[:, None] * HQ + h) * D + d[None, :], cos, sin, ok, HALF, True, BACKWARD)
    for way in tl.static_range(6):
        of = (K1, K2, K3, V1, V2, V3)[way]
        for h in range(HKV):
            apart = (row[:, None] * HKV + h) * D + d[None, :]
            _turn(Y, of, at + (HQ + way * HKV + h) * D, apart, cos, sin, ok, HALF, way == 1 or way == 2, BACKWARD)
    first = (HQ + 6 * HKV) * D
    at, apart = row[:, None] * W + first + g[None, :], row[:, None] * (3 * HQ) + g[None, :]
    inside = (row < total)[:, None] & (g < 3 * HQ)[None, :]
    if BACKWARD:
        gate = tl.load(OTHER + apart, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(GATES + apart, mask=inside, other=0.0).to(tl.float32) * gate * (1 - gate)
        tl.store(Y + at, x.to(Y.dtype.element_ty), mask=(row < total)[:, None] & (first + g < W)[None, :])
    else:
        bias = tl.load(OTHER + g, mask=g < 3 * HQ, other=0.0).to(tl.float32)
        x = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        tl.store(GATES + apart, tl.sigmoid(x).to(GATES.dtype.element_ty), mask=inside)


def forward(y: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    """Rotated q [B,S,HQ,D]; keys of cmp, slc, win, the last two rotated, and values [B,S,HKV,D]; gates [B,S,HQ,3].

    Args:
        y: [B,S,.], columns of q, three keys, three values, logits of the gates, and up to 7 of padding.
        bias: the gates' bias, [3·HQ].
        cos, sin: cosine and sine of RoPE's angles, float32 [S,1,D/2].
    """
    y, dim = y.contiguous(), 2 * cos.shape[-1]
    q, gates = (y.new_empty(*y.shape[:2], heads, width) for width in (dim, 3))
    apart = [q, *(y.new_empty(*y.shape[:2], kv_heads, dim) for _ in range(6)), gates]
    _launch(y, bias.to(y.dtype), cos, sin, apart, False)
    return apart


def backward(grads: list[Tensor], gates: Tensor, cos: Tensor, sin: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Gradients of y [B,S,width] and of bias, in y's dtype, from those of the results and the result `gates`."""
    dy, columns = gates.new_empty(*gates.shape[:2], width), gates.shape[2] * gates.shape[3]
    _launch(dy, gates, cos, sin, [x.contiguous() for x in grads], True)
    dgates = dy[..., sum(x.shape[2] * x.shape[3] for x in grads[:-1]) :][..., :columns]
    return dy, dgates.sum((0, 1), dtype=torch.float32).to(dy.dtype)


def _launch(y: Tensor, other: Tensor, cos: Tensor, sin: Tensor, apart: list[Tensor], is_backward: bool) -> None:
    names = ("Q", "K1", "K2", "K3", "V1", "V2", "V3", "GATES")
    pointers = dict(Y=y, OTHER=other, COS=cos, SIN=sin) | dict(zip(names, apart, strict=True))
    heads, half, total = apart[0].shape[2], cos.shape[-1], y.shape[0] * y.shape[1]
    numbers = dict(total=total, S=y.shape[1])
    sizes = dict(HQ=heads, HKV=apart[1].shape[2], HALF=half, HALFP=power_of_two(half), GP=power_of_two(3 * heads + 7))
    # The width is a constant: it is a multiple of 8, and of run-time numbers Triton exploits multiples of 16 alone.
    constants = sizes | dict(W=y.shape[2], M=_ROWS, BACKWARD=is_backward)
    launch(_heads, (ceil_div(total, _ROWS),), pointers | numbers, constants, Tile(warps=4), stage="heads")


split_heads = custom_op("nsa_core::split_heads", forward, mutates_args=())  # differentiable in y and bias
split_heads.register_fake(forward)  # launches leave fake tensors out
_backward_operator = custom_op("nsa_core::split_heads_backward", backward, mutates_args=())
_backward_operator.register_fake(backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    y, bias, cos, sin, *_ = inputs
    ctx.width, ctx.bias = y.shape[-1], bias.dtype
    ctx.save_for_backward(output[-1], cos, sin)


def _grad(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    dy, dbias = _backward_operator(grads, *ctx.saved_tensors, ctx.width)
    return dy, dbias.to(ctx.bias), None, None, None, None


split_heads.register_autograd(_grad, setup_context=_keep)
