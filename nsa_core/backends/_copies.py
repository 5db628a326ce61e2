"""Copies of keys and values for the queries that see them, with gradients summed in float32 and in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def copies(x: Tensor, rows: Tensor) -> Tensor:
    """Rows `rows` [N] of x [M,D], as often as they are named: [N,D]."""
    out = _Copies.apply(x, rows)
    assert isinstance(out, Tensor)
    return out


class _Copies(torch.autograd.Function):
    """index_select, whose own backward would sum in half precision, and on CUDA by atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows,) = ctx.saved_tensors
        wide = dout if dout.dtype == torch.float64 else dout.float()
        total = wide.new_zeros(ctx.count, dout.shape[1])
        if total.is_cuda:
            total.index_put_((rows,), wide, accumulate=True)  # sorts first; index_add_ would use atomics
        else:
            total.index_add_(0, rows, wide)
        return total.to(dout.dtype), None
