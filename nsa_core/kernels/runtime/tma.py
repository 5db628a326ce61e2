# pyright: reportMissingImports=false
"""Tensor maps: kernel arguments that Hopper's copy engine (TMA) reads and writes by tiles."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # launches are recorded without Triton, too
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@dataclass(frozen=True)
class Tiled:
    """A tensor [B,N,H,D] to be read or written by tiles [1,rows,heads,D].

    Elements outside of the tensor are read as zeros and not written. The tensor is in half precision, contiguous, not
    empty, and aligned to 16 bytes.
    """

    x: Tensor
    rows: int
    heads: int = 1

    @property
    def block(self) -> list[int]:
        """Shape of a tile."""
        return [1, self.rows, self.heads, self.x.shape[-1]]

    @property
    def layout(self) -> NVMMASharedLayout:
        """Layout of a tile in shared memory."""
        from triton.experimental.gluon import language as gl

        dtype = gl.bfloat16 if self.x.dtype == torch.bfloat16 else gl.float16
        return gl.NVMMASharedLayout.get_default_for(self.block, dtype)

    def descriptor(self) -> TensorDescriptor:
        """The tensor's descriptor; Triton's launch encodes it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        _, tokens, heads, dim = shape = list(self.x.shape)
        strides = [tokens * heads * dim, heads * dim, dim, 1]  # x.stride() is arbitrary where a size is 1
        return TensorDescriptor(self.x, shape, strides, self.block, self.layout)


def placed(descriptor: TensorDescriptor, address: int) -> TensorDescriptor:
    """A copy of `descriptor` for memory at another address, which is all that a launch asks its tensor for."""
    moved = copy(descriptor)
    moved.base = SimpleNamespace(data_ptr=address.__int__)
    return moved
