"""Pinned configurations of kernels, and the sizes that they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """A pinned configuration.

    Attributes:
        rows: rows of a tile: queries times heads of a group [M].
        keys: keys of a tile [BN].
        warps, stages: warps of a program; depth of its software pipeline.
        registers: of a thread at most, where fewer let more programs share a multiprocessor.
    """

    rows: int = 128
    keys: int = 64
    warps: int = 4
    stages: int = 1
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """For Triton's compiler."""
        return dict(num_warps=self.warps, num_stages=self.stages, maxnreg=self.registers)

    def holding(self, group: int) -> Tile:
        """The same with rows for all heads of a group, however many."""
        return replace(self, rows=max(self.rows, padded(group)))


def power_of_two(x: int) -> int:
    """The smallest one that holds x: what Triton's ranges take."""
    return 1 << (x - 1).bit_length()


def padded(dim: int) -> int:
    """The power of two, at least 16, that holds `dim`: what Triton's products take."""
    return max(16, power_of_two(dim))


def head_sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    """Constants of all attention kernels, of q [..,HQ,D] and v [..,HKV,DV]."""
    (heads, dim), (kv_heads, value_dim) = q.shape[-2:], v.shape[-2:]
    return dict(HQ=heads, HKV=kv_heads, D=dim, DV=value_dim, DP=padded(dim), DVP=padded(value_dim))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


_assumed: ContextVar[int] = ContextVar("nsa_core_kernel_arch", default=80)


@contextmanager
def assume(capability: int) -> Iterator[None]:
    """Tensors that are on no device meanwhile take the kernels of this compute capability, else of 80."""
    token = _assumed.set(capability)
    try:
        yield
    finally:
        _assumed.reset(token)


def arch(x: Tensor) -> int:
    """Compute capability of x's device as 80, 90, ..; the assumed one where it is on none."""
    return capability(x.device) if x.is_cuda else _assumed.get()


def capability(device: torch.device) -> int:
    """Of a GPU that is here, as 80, 90, ..; 80 of others."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(x: Tensor) -> int:
    """Of x's device; an H100's where there is none."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132


def widest(q: Tensor, v: Tensor) -> int:
    """The wider of the padded head dims of q [.., D] and v [.., DV]."""
    return max(padded(q.shape[-1]), padded(v.shape[-1]))
