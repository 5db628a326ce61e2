"""Tiles: pinned configurations of kernels by device and head dim, and the padded sizes that they are made of."""

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
        rows: rows per tile, queries times heads of a group (M in kernels).
        keys: keys per tile (BN in kernels).
        warps: warps per program.
        stages: depth of the software pipeline.
        registers: limit per thread, for a higher occupancy; None for no limit.
    """

    rows: int = 128
    keys: int = 64
    warps: int = 4
    stages: int = 1
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """Options for Triton's compiler."""
        return dict(num_warps=self.warps, num_stages=self.stages, maxnreg=self.registers)

    def holding(self, group: int) -> Tile:
        """The same with at least as many rows as a group has heads."""
        return replace(self, rows=max(self.rows, padded(group)))


def power_of_two(x: int) -> int:
    """The smallest power of two >= x, as Triton's ranges need."""
    return 1 << (x - 1).bit_length()


def padded(dim: int) -> int:
    """The smallest power of two >= max(dim, 16), as Triton's matrix products need."""
    return max(16, power_of_two(dim))


def head_sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    """Head counts and dims as constants of the attention kernels, from q [..,HQ,D] and v [..,HKV,DV]."""
    (heads, dim), (kv_heads, value_dim) = q.shape[-2:], v.shape[-2:]
    return dict(HQ=heads, HKV=kv_heads, D=dim, DV=value_dim, DP=padded(dim), DVP=padded(value_dim))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def smaller(a: int, b: int) -> int:
    """The smaller of two sizes, which may be a compiler's symbols: `min` would fix which one it is."""
    return min(a, b) if type(a) is type(b) is int else torch.sym_min(a, b)  # pyright: ignore[reportReturnType]


def larger(a: int, b: int) -> int:
    return max(a, b) if type(a) is type(b) is int else torch.sym_max(a, b)  # pyright: ignore[reportReturnType]


_assumed: ContextVar[int] = ContextVar("nsa_core_kernel_arch", default=80)


@contextmanager
def assume(capability: int) -> Iterator[None]:
    """Within the block, tensors on no device are treated as on this compute capability (default 80); 0: on a CPU."""
    token = _assumed.set(capability)
    try:
        yield
    finally:
        _assumed.reset(token)


def arch(x: Tensor) -> int:
    """Compute capability of x's device as 80, 90, ..; the assumed one if x is on none."""
    return capability(x.device) if x.is_cuda else _assumed.get()


def device_type(x: Tensor) -> str:
    """Type of x's device; the assumed one if x has no memory."""
    return x.device.type if not x.is_meta else "cuda" if _assumed.get() else "cpu"


def capability(device: torch.device) -> int:
    """Compute capability of a GPU of this machine as 80, 90, ..; 80 for other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def widest(q: Tensor, v: Tensor) -> int:
    """The larger of the padded head dims of q [..,D] and v [..,DV]."""
    return max(padded(q.shape[-1]), padded(v.shape[-1]))
