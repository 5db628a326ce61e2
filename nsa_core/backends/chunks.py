"""Queries per chunk of the chunked backend: a function of shapes and the kind of device alone.

One chunk's workspace stays within a budget. The budget grows with the queries between a floor (smaller chunks cost
more time in launches than they save in memory) and a ceiling (larger ones gain nothing), so that the whole extra
memory is linear in S.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIB = 1 << 20
# (floor, ceiling) in bytes. On the CPU a chunk should stay in the caches, on a GPU it should fill the card.
_BUDGET = {"cpu": (MIB // 2, 16 * MIB), "cuda": (64 * MIB, 256 * MIB)}
_NARROWEST_BAND = 64  # a window chunk may have so many rows, however narrow the window


@dataclass(frozen=True)
class CallShape:
    """Sizes of one branch's call, on which the size of a chunk depends.

    Attributes:
        batch, rows, heads, dim: sizes of q [B,S,Hq,Dk].
        kv_heads, value_dim: sizes of v [B,T,Hkv,Dv].
        element: bytes of an operand of the products: 2 for half precision on CUDA, 4 for float32, 8 for float64.
        device: its kind, "cpu" or "cuda".
    """

    batch: int
    rows: int
    heads: int
    dim: int
    kv_heads: int
    value_dim: int
    element: int
    device: str

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> CallShape:
        batch, rows, heads, dim = q.shape
        element = operand_dtype(q).itemsize
        return cls(batch, rows, heads, dim, v.shape[2], v.shape[3], element, q.device.type)

    @property
    def accumulator(self) -> int:
        """Bytes of an accumulator: float32, or float64 for float64 operands."""
        return max(4, self.element)

    @property
    def budget(self) -> int:
        """Bytes that one chunk's workspace may take."""
        floor, ceiling = _BUDGET.get(self.device, _BUDGET["cuda"])
        return min(max(self.batch * self.rows * self.heads * self.dim * 4, floor), ceiling)


def operand_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the products' operands: half precision only on CUDA, which accumulates it in float32."""
    return torch.float32 if x.itemsize < 4 and x.device.type != "cuda" else x.dtype


def span_rows(shape: CallShape, keys: int) -> int:
    """Queries per chunk where all attend to one span of at most `keys` keys."""
    return _fit(shape, _score_bytes(shape, keys))


def band_rows(shape: CallShape, window: int) -> int:
    """Queries per chunk of a window. Their span is chunk + window keys, so a chunk is at most as long as the window."""
    widest = max(window, _NARROWEST_BAND)
    return min(widest, _fit(shape, _score_bytes(shape, 2 * widest)))


def gather_rows(shape: CallShape, keys: int, backward: bool) -> int:
    """Queries per chunk where each gathers `keys` keys of its own, and, in the backward, their gradients."""
    gathered = shape.element + (shape.accumulator if backward else 0)
    row = shape.batch * shape.kv_heads * keys * (shape.dim + shape.value_dim) * gathered
    return _fit(shape, row + _score_bytes(shape, keys))


def _score_bytes(shape: CallShape, keys: int) -> int:
    """Bytes of one query's scores and probabilities; in the backward, of probabilities and their gradients."""
    return 2 * shape.batch * shape.heads * keys * shape.accumulator


def _fit(shape: CallShape, row_bytes: int) -> int:
    return max(1, min(shape.rows, shape.budget // max(1, row_bytes)))
