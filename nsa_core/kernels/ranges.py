# pyright: reportMissingImports=false
"""What the attention kernels share: which keys a query sees, and tiles of rows.

Key n covers positions n·STRIDE .. n·STRIDE + BLOCK - 1; query t sees it if it ends at or before t, and, where keys are
banded (ALIGN > 0), if n >= lo(t) or n < INIT besides, with

    lo(t) = 0 for t < CAUSAL, else max(0, t // ALIGN · ALIGN + ALIGN - WINDOW).

So ALIGN = 1 is the window of the last WINDOW keys, and ALIGN = slc_block with INIT are the blocks that every query
selects. BLOCK = STRIDE = 1 are the tokens themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ..config import NSAConfig


@dataclass(frozen=True)
class Span:
    """Which keys a query sees; see the module's docstring.

    Attributes:
        block, stride: of a compressed token; 1 and 1 for the tokens themselves.
        align: 0 for all keys up to the query's own; else the band moves by so many keys.
        window: keys of the band.
        init: keys at the start that all queries see.
        causal: queries before this position see all keys up to their own.
    """

    block: int = 1
    stride: int = 1
    align: int = 0
    window: int = 0
    init: int = 0
    causal: int = 0


def compressed(config: NSAConfig) -> Span:
    return Span(config.cmp_block, config.cmp_stride)


def window(config: NSAConfig) -> Span:
    return Span(align=1, window=config.window)


def forced(config: NSAConfig) -> Span:
    """The forced blocks; and everything, for queries that have no more than slc_count blocks to choose from."""
    init, local, causal = (n * config.slc_block for n in (config.init_blocks, config.local_blocks, config.slc_count))
    return Span(align=config.slc_block, window=local, init=init, causal=causal)


@triton.jit
def _hi(t, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Keys that end at or before t."""
    return tl.maximum(t + (1 - BLOCK + STRIDE), 0) // STRIDE


@triton.jit
def _lo(t, ALIGN: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    lo = tl.maximum(t // ALIGN * ALIGN + (ALIGN - WINDOW), 0)
    return tl.where(t < CAUSAL, 0, lo) if CAUSAL > 0 else lo


@triton.jit
def key_range(
    t0, t1, N, BLOCK: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    INIT: tl.constexpr, CAUSAL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What queries t0..t1 see: (i, a, b, c, d). Tiles of BN keys begin at multiples of BN.

    Keys [0, i) are INIT keys before the band; of the band [a, b) and [c, d) want a mask, [b, c) is seen by all.
    """
    d = tl.minimum(_hi(t1, BLOCK, STRIDE), N)
    c = tl.minimum(_hi(t0, BLOCK, STRIDE), N) // BN * BN
    if ALIGN > 0:
        end = tl.cdiv(d, BN) * BN
        a = tl.minimum(_lo(t0, ALIGN, WINDOW, CAUSAL) // BN * BN, end)
        b = tl.minimum(tl.cdiv(_lo(t1, ALIGN, WINDOW, CAUSAL), BN) * BN, end)
        return tl.minimum(a, tl.cdiv(INIT, BN) * BN), a, b, tl.maximum(c, b), tl.maximum(d, b)
    else:  # noqa: RET505  Triton compiles what follows a return, too
        return c * 0, c * 0, c * 0, tl.maximum(c, 0), tl.maximum(d, 0)


@triton.jit
def sees(
    t, n, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, INIT: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Whether query t sees key n, by broadcasting; n < N is checked by the caller."""
    if ALIGN > 0:  # one comparison for both ends of the band: what is before it wraps around
        lo = _lo(t, ALIGN, WINDOW, CAUSAL)
        seen = (n - lo).to(tl.uint32) <= (t - lo).to(tl.uint32)
        if WINDOW == 0:
            seen = seen & (lo <= t)
        return seen | ((n < INIT) & (n <= t)) if INIT > 0 else seen
    else:  # noqa: RET505
        return n * STRIDE + (BLOCK - 1) <= t


@triton.jit
def query_range(
    n0, n1, s0, s1, offset,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """Rows of q, within s0..s1-1, that see keys n0..n1, INIT left out: masked [a,b), whole [b,c), masked [c,d).

    b and c are multiples of BQ away from a.
    """
    a = tl.maximum(n0 * STRIDE + BLOCK - 1 - offset, s0)
    c, d = s1, s1
    if ALIGN > 0:
        d = tl.minimum(d, _last(n1, n0, ALIGN, WINDOW, CAUSAL) - offset)
        c = tl.minimum(c, _last(n0, n0, ALIGN, WINDOW, 0) - offset)
    b = tl.minimum(a + tl.cdiv(tl.maximum(n1 * STRIDE + BLOCK - 1 - offset - a, 0), BQ) * BQ, tl.maximum(d, a))
    c = tl.maximum(a + tl.maximum(c - a, 0) // BQ * BQ, b) if ALIGN > 0 else tl.maximum(d, b)
    return a, b, c, d


@triton.jit
def _last(n, first, ALIGN: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """End of the positions whose band holds key n, or that are causal and see key `first`."""
    end = (n + WINDOW) // ALIGN * ALIGN
    return tl.where(first < CAUSAL, tl.maximum(end, CAUSAL), end) if CAUSAL > 0 else end


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


@triton.jit
def load_stats(STATS, row, ok):
    """(lse, delta) of rows of STATS [..,2], as merge.prepare writes them; 0 and 0 for rows not ok.

    Both in one load: of 64 rows it has a number for every thread of four warps. What has fewer than threads, the
    compiler lets every thread load that needs it.
    """
    at = STATS + row[:, None] * 2 + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(at, mask=ok[:, None], other=0.0))
