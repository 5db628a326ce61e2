"""Rotary position embedding (RoFormer, arXiv 2104.09864), the two halves of a head paired with each other."""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation at `positions` [S], each [S,1,head_dim/2].

    In float64 where `dtype` is that, else in float32: bfloat16 cannot tell positions beyond 256 apart.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (_angles_operator if torch.compiler.is_compiling() else _angles)(positions, head_dim, theta, wide)


def _angles(positions: Tensor, head_dim: int, theta: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = positions.to(wide)[:, None, None] * frequencies(head_dim, theta, positions.device, wide)
    return angle.cos(), angle.sin()


# One node of a compiled graph: seen through, it would be computed anew for every element of all that is rotated.
_angles_operator = torch.library.custom_op("nsa_core::rope_angles", _angles, mutates_args=())
_angles_operator.register_fake(_angles)


def frequencies(head_dim: int, theta: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angle a position [rad] of every pair of columns, [head_dim/2]."""
    return theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B,S,H,D] rotated to the S positions of `angles`, in x's dtype."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
