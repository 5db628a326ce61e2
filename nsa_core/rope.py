"""Rotary position embedding (RoFormer, arXiv 2104.09864); column i of a head is paired with column i + D/2."""

import torch
from torch import Tensor


def angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation at `positions` [S], each [S,1,head_dim/2].

    They are float64 if `dtype` is, else float32: bfloat16 cannot tell positions beyond 256 apart.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (_angles_operator if torch.compiler.is_compiling() else _angles)(positions, head_dim, theta, wide)


def _angles(positions: Tensor, head_dim: int, theta: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = positions.to(wide)[:, None, None] * frequencies(head_dim, theta, positions.device, wide)
    return angle.cos(), angle.sin()


# One node of a compiled graph: inlined, the angles would be recomputed for every element that is rotated.
_angles_operator = torch.library.custom_op("nsa_core::rope_angles", _angles, mutates_args=())
_angles_operator.register_fake(_angles)


def frequencies(head_dim: int, theta: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rotation of each pair of columns per position [rad], [head_dim/2]."""
    return theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B,S,H,D] rotated by cos, sin [S,1,D/2] of `angles`, in x's dtype."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
