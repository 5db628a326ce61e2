# pyright: reportMissingImports=false
"""Arguments of kernels that Hopper's copy engine reads."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # where there is no Triton, launches are recorded all the same
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@dataclass(frozen=True)
class Tiled:
    """A tensor [B,N,H,D] to be read or written by tiles [1,rows,heads,D] (TMA).

    What lies outside of it is read as zeros, and not written. In half precision, contiguous, not empty, and aligned to
    16 bytes.
    """

    x: Tensor
    rows: int
    heads: int = 1

    @property
    def kind(self) -> tuple[torch.dtype, int, int, int]:
        """What a kernel is compiled for."""
        return self.x.dtype, *self.block[1:]

    @property
    def block(self) -> list[int]:
        return [1, self.rows, self.heads, self.x.shape[-1]]

    @property
    def layout(self) -> NVMMASharedLayout:
        """In shared memory."""
        from triton.experimental.gluon import language as gl

        dtype = gl.bfloat16 if self.x.dtype == torch.bfloat16 else gl.float16
        return gl.NVMMASharedLayout.get_default_for(self.block, dtype)

    @property
    def signature(self) -> str:
        """The type's name for Triton's compiler, where there is no memory to describe."""
        name = "bf16" if self.x.dtype == torch.bfloat16 else "fp16"
        return f"tensordesc<{name}{self.block},{self.layout!r}>"

    def descriptor(self) -> TensorDescriptor:
        """For Triton's launch, which encodes it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        _, tokens, heads, dim = shape = list(self.x.shape)
        strides = [tokens * heads * dim, heads * dim, dim, 1]  # of dimensions of 1, the tensor's own may be any
        return TensorDescriptor(self.x, shape, strides, self.block, self.layout)


@dataclass(frozen=True, slots=True)
class _Place:
    """Memory as a descriptor's launch asks for it."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def placed(descriptor: TensorDescriptor, address: int) -> TensorDescriptor:
    """The same of other memory."""
    moved = copy(descriptor)
    moved.base = _Place(address)
    return moved
