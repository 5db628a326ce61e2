# pyright: reportMissingImports=false
"""What the attention kernels share: which keys a query sees, and tiles of rows.

Query t sees keys lo(t) .. hi(t)-1 with hi(t) = max(0, t + 1 - BLOCK + STRIDE) // STRIDE, the keys that end at or before
t when key n covers positions n·STRIDE .. n·STRIDE + BLOCK - 1, and lo(t) = max(0, t + 1 - WINDOW), or 0 when WINDOW
is 0. BLOCK = STRIDE = 1 is ordinary causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Span:
    """Which keys a query sees; see the module's docstring.

    Attributes:
        block, stride: of a compressed token; 1 and 1 for the tokens themselves.
        window: positions seen, 0 for all.
    """

    block: int = 1
    stride: int = 1
    window: int = 0


@triton.jit
def _hi(t, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    return tl.maximum(t + (1 - BLOCK + STRIDE), 0) // STRIDE


@triton.jit
def _lo(t, WINDOW: tl.constexpr):
    return tl.maximum(t + 1 - WINDOW, 0) if WINDOW > 0 else t * 0


@triton.jit
def key_range(t0, t1, N, BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr):
    """Bounds of the three loops of queries t0..t1: masked [a,b), whole [b,c), masked [c,d); a, b, c by BN."""
    d = tl.minimum(_hi(t1, BLOCK, STRIDE), N)
    a = _lo(t0, WINDOW) // BN * BN
    end = tl.maximum(tl.cdiv(d, BN) * BN, a)
    b = tl.minimum(tl.cdiv(_lo(t1, WINDOW), BN) * BN, end)
    c = tl.maximum(tl.minimum(_hi(t0, BLOCK, STRIDE), N) // BN * BN, b)
    return a, b, c, d


@triton.jit
def sees(t, n, BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """Whether query t sees key n, by broadcasting; n < N is checked by the caller."""
    seen = n * STRIDE + (BLOCK - 1) <= t
    if WINDOW > 0:
        seen = seen & (n > t - WINDOW)
    return seen


@triton.jit
def query_range(
    n0, n1, s0, s1, offset, BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, BQ: tl.constexpr
):
    """Rows of q, within s0..s1-1, that see keys n0..n1: masked [a,b), whole [b,c), masked [c,d); b, c from a by BQ."""
    a = tl.maximum(n0 * STRIDE + BLOCK - 1 - offset, s0)
    d = s1
    all_from = n1 * STRIDE + BLOCK - 1 - offset
    c = s1
    if WINDOW > 0:
        d = tl.minimum(d, n1 + WINDOW - offset)
        c = tl.minimum(c, n0 + WINDOW - offset)
    b = tl.minimum(a + tl.cdiv(tl.maximum(all_from - a, 0), BQ) * BQ, tl.maximum(d, a))
    c = tl.maximum(a + tl.maximum(c - a, 0) // BQ * BQ, b) if WINDOW > 0 else tl.maximum(d, b)
    return a, b, c, d


@triton.jit
def load_rows(base, row, stride, d, D: tl.constexpr, DP: tl.constexpr, rows_ok, MASKED: tl.constexpr):
    """Rows of a [.., D] tensor as a tile [len(row), DP]; columns beyond D, and rows not ok, are zeros."""
    at = base + row[:, None] * stride + d[None, :]
    if MASKED:
        if D < DP:
            return tl.load(at, mask=rows_ok[:, None] & (d < D)[None, :], other=0.0)
        return tl.load(at, mask=rows_ok[:, None], other=0.0)
    if D < DP:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    return tl.load(at)
