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

from ..runtime.custom_op import operator
from ..runtime.launch import launch
from ..runtime.tiles import Tile, ceil_div

__all__ = ["swiglu"]

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
    _launch(_swiglu, {"X": x, "OUT": out}, out, "swiglu")
    return out


def backward(x: Tensor, dout: Tensor) -> Tensor:
    """Gradient of x [..,2·hidden] from that of the result [..,hidden]."""
    x, dout = x.contiguous(), dout.contiguous()
    dx = torch.empty_like(x)
    _launch(_swiglu_backward, {"X": x, "DOUT": dout, "DX": dx}, dout, "swiglu_backward")
    return dx


def _launch(kernel: object, pointers: dict[str, Tensor], halves: Tensor, stage: str) -> None:
    """Launch over the numbers of `halves`, which have half of x's columns."""
    total, constants = halves.numel(), dict(HIDDEN=halves.shape[-1], N=_PROGRAM)
    launch(kernel, (ceil_div(total, _PROGRAM),), pointers | {"total": total}, constants, Tile(warps=4), stage=stage)


swiglu = operator("swiglu")(forward)  # differentiable
_backward_operator = operator("swiglu_backward")(backward)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad(ctx: Any, dout: Tensor) -> Tensor:
    return _backward_operator(*ctx.saved_tensors, dout)


swiglu.register_autograd(_grad, setup_context=_keep)
