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
    """A tensor [B,N,H,D] to be read by tiles [1,rows,heads,D], zeros from N on (TMA).

    In half precision, contiguous, not empty, and aligned to 16 bytes.
    """

    x: Tensor
    rows: int
    heads: int = 1

    @property
    def kind(self) -> tuple[torch.dtype, int, int, int]:
        """What a kernel is compiled for."""
        return self.x.dtype, self.rows, self.heads, self.x.shape[-1]

    @property
    def layout(self) -> NVMMASharedLayout:
        """In shared memory."""
        from triton.experimental.gluon import language as gl

        dtype = gl.bfloat16 if self.x.dtype == torch.bfloat16 else gl.float16
        return gl.NVMMASharedLayout.get_default_for([1, self.rows, self.heads, self.x.shape[-1]], dtype)

    @property
    def signature(self) -> str:
        """The type's name for Triton's compiler, where there is no memory to describe."""
        name = "bf16" if self.x.dtype == torch.bfloat16 else "fp16"
        return f"tensordesc<{name}[1, {self.rows}, {self.heads}, {self.x.shape[-1]}],{self.layout!r}>"

    def descriptor(self) -> TensorDescriptor:
        """For Triton's launch, which encodes it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        block = [1, self.rows, self.heads, self.x.shape[-1]]
        return TensorDescriptor(self.x, list(self.x.shape), list(self.x.stride()), block, self.layout)


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
