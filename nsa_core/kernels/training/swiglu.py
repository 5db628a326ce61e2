# pyright: reportMissingImports=false
"""SwiGLU's gated product silu(gate) · up (arXiv 2002.05202), with gate and up from one matrix product.

PyTorch's compiler writes the two halves of the gradient in one pass that reads all inputs for each half.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from ..runtime.launch import launch
from ..runtime.tiles import Tile, ceil_div

_PROGRAM = 1024  # outputs a program


@triton.jit
def _swiglu(X, OUT, total, HIDDEN: tl.constexpr, N: tl.constexpr):
    """Gated product silu(gate) · up.

    Grid: (tiles of N outputs). A program owns N consecutive numbers of OUT, reads gate and up from the two halves of
    X's rows, and writes the product. `total` counts the numbers of OUT.
    X [rows,2·HIDDEN], OUT [rows,HIDDEN], contiguous.
    """
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    at, inside = i // HIDDEN * (2 * HIDDEN) + i % HIDDEN, i < total
    gate = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + at + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + i, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(X, DOUT, DX, total, HIDDEN: tl.constexpr, N: tl.constexpr):
    """Gradient of the gated product.

    Grid: (tiles of N outputs). A program owns N consecutive numbers of DOUT, and writes the gradients of their gate and
    up to the two halves of DX's rows. `total` counts the numbers of DOUT.
    X, DX [rows,2·HIDDEN], DOUT [rows,HIDDEN], contiguous.
    """
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    at, inside = i // HIDDEN * (2 * HIDDEN) + i % HIDDEN, i < total
    gate = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + at + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(DOUT + i, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    dgate = dout * up * share * (1 + gate * (1 - share))
    tl.store(DX + at, dgate.to(DX.dtype.element_ty), mask=inside)
    tl.store(DX + at + HIDDEN, (dout * gate * share).to(DX.dtype.element_ty), mask=inside)


def forward(x: Tensor) -> Tensor:
    """silu(gate) · up [..,hidden] of x [..,2·hidden], gate before up, in x's dtype, by float32."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    constants, arguments = dict(HIDDEN=out.shape[-1], N=_PROGRAM), dict(X=x, OUT=out, total=out.numel())
    launch(_swiglu, (ceil_div(out.numel(), _PROGRAM),), arguments, constants, Tile(warps=4), stage="swiglu")
    return out


def backward(x: Tensor, dout: Tensor) -> Tensor:
    """Gradient of x [..,2·hidden] from that of the result [..,hidden]."""
    x, dout = x.contiguous(), dout.contiguous()
    dx = torch.empty_like(x)
    constants, arguments = dict(HIDDEN=dout.shape[-1], N=_PROGRAM), dict(X=x, DOUT=dout, DX=dx, total=dout.numel())
    grid = (ceil_div(dout.numel(), _PROGRAM),)
    launch(_swiglu_backward, grid, arguments, constants, Tile(warps=4), stage="swiglu_backward")
    return dx


swiglu = custom_op("nsa_core::swiglu", forward, mutates_args=())  # differentiable
swiglu.register_fake(forward)  # launches leave fake tensors out
_backward_operator = custom_op("nsa_core::swiglu_backward", backward, mutates_args=())
_backward_operator.register_fake(backward)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad(ctx: Any, dout: Tensor) -> Tensor:
    return _backward_operator(*ctx.saved_tensors, dout)


swiglu.register_autograd(_grad, setup_context=_keep)
