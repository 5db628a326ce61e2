# pyright: reportMissingImports=false
"""What the attention kernels share: which keys a query sees, and tiles of rows.

Positions t are queries', n keys'. Of each set of keys a query sees a band [lo(t), end(t)), and of a key's queries
likewise, with both ends ascending. So a tile of queries sees whole tiles of keys between lo of its last and end of its
first query, and masked ones around them.

Where the selected branch and the window share keys and values, their sets are taken apart: keys that the selected
branch alone sees (the initial blocks; before CAUSAL, where every block is selected, all before the window), keys that
the window alone sees, and the local blocks, which lie in the window, and which both see. Their scores are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...config import NSAConfig

# Of shared keys; in the order of merge.prepare's stats.
SLC_ALONE, WIN_ALONE, BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NEVER = tl.constexpr(0x7FFFFFFF)


def sizes(config: NSAConfig) -> dict[str, int]:
    """Constants of the kernels, in tokens: all are selected up to CAUSAL, after it the INIT first and LOCAL last."""
    init, local, causal = (n * config.slc_block for n in (config.init_blocks, config.local_blocks, config.slc_count))
    compressed = dict(BLOCK=config.cmp_block, STRIDE=config.cmp_stride)
    return compressed | dict(WINDOW=config.window, ALIGN=config.slc_block, LOCAL=local, INIT=init, CAUSAL=causal)


@triton.jit
def compressed_keys(t, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Compressed keys that end at or before t."""
    return t * 0, tl.maximum(t + (1 - BLOCK + STRIDE), 0) // STRIDE


@triton.jit
def window_keys(t, WINDOW: tl.constexpr):
    return tl.maximum(t + (1 - WINDOW), 0), t + 1


@triton.jit
def initial_keys(t, INIT: tl.constexpr, CAUSAL: tl.constexpr):
    """Initial blocks, which are never local ones from CAUSAL on; before it all keys are local_keys."""
    return t * 0, tl.where(t < CAUSAL, 0, INIT)


@triton.jit
def local_keys(t, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr):
    local = tl.minimum(tl.maximum(t // ALIGN * ALIGN + (ALIGN - LOCAL), 0), t + 1)
    return tl.where(t < CAUSAL, 0, local), t + 1


@triton.jit
def shared_keys(
    t, kind, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, INIT: tl.constexpr, CAUSAL: tl.constexpr
):
    """Keys that query t sees of SLC_ALONE, WIN_ALONE or BOTH. Their ends ascend but where t reaches CAUSAL."""
    near = tl.maximum(t + (1 - WINDOW), 0)
    local = tl.minimum(tl.maximum(t // ALIGN * ALIGN + (ALIGN - LOCAL), 0), t + 1)
    both = tl.where(t < CAUSAL, near, local)
    lo = tl.where(kind == BOTH, both, tl.where(kind == WIN_ALONE, near, 0))
    end = tl.where(kind == BOTH, t + 1, tl.where(kind == WIN_ALONE, both, tl.where(t < CAUSAL, near, INIT)))
    return lo, end


@triton.jit
def compressed_queries(n, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    return n * STRIDE + (BLOCK - 1), n * 0 + _NEVER


@triton.jit
def window_queries(n, WINDOW: tl.constexpr):
    return n, n + WINDOW


@triton.jit
def initial_queries(n, CAUSAL: tl.constexpr):
    """Of a key of the initial blocks: those that do not see it as one of local_keys."""
    return n * 0 + CAUSAL, n * 0 + _NEVER


@triton.jit
def local_queries(n, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr):
    last = tl.maximum(n // ALIGN * ALIGN + LOCAL, n)
    return n, tl.where(n < CAUSAL, tl.maximum(last, CAUSAL), last)


@triton.jit
def shared_queries(n, kind, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr):
    """Queries that see key n in SLC_ALONE (initial_queries left out), WIN_ALONE or BOTH."""
    near, last = n + WINDOW, tl.maximum(n // ALIGN * ALIGN + LOCAL, n)
    choosing = tl.maximum(last, CAUSAL)  # queries that choose and see the key in the window alone begin here
    both = tl.where(near < CAUSAL, near, tl.where(n < CAUSAL, choosing, last))
    lo = tl.where(kind == BOTH, n, tl.where(kind == WIN_ALONE, choosing, near))
    end = tl.maximum(near, tl.where(kind == WIN_ALONE, choosing, CAUSAL))
    return lo, tl.where(kind == BOTH, both, end)


@triton.jit
def tile_of_rows(S, skip, BQ: tl.constexpr):
    """(first row, end of rows) of this program's tile; none holds rows before and after `skip`. Longest spans first."""
    tile, early = tl.num_programs(0) - 1 - tl.program_id(0), tl.cdiv(skip, BQ)
    first = tl.where(tile < early, tile * BQ, skip + (tile - early) * BQ)
    return first, tl.minimum(first + BQ, tl.where(tile < early, skip, S))


@triton.jit
def key_tiles(lo0, lo1, end0, end1, BN: tl.constexpr):
    """(a, b, c, d) of queries whose first sees [lo0, end0) and whose last sees [lo1, end1).

    Keys [a, b) and [c, d) want a mask, [b, c) are seen by all. Tiles of BN keys begin at multiples of BN.
    """
    stop = tl.cdiv(end1, BN) * BN
    a, b = tl.minimum(lo0 // BN * BN, stop), tl.minimum(tl.cdiv(lo1, BN) * BN, stop)
    c = tl.maximum(end0 // BN * BN, b)
    # Of loops that could begin below 0, ptxas does not keep Hopper's matrix instructions asynchronous.
    return tl.maximum(a, 0), tl.maximum(b, 0), tl.maximum(c, 0), tl.maximum(tl.maximum(end1, b), 0)


@triton.jit
def row_tiles(lo0, lo1, end0, end1, s0, s1, offset, BQ: tl.constexpr):
    """Rows of q, within s0..s1-1, of keys whose first is seen in [lo0, end0) and whose last in [lo1, end1).

    (a, b, c, d): masked [a, b) and [c, d), whole [b, c), which is multiples of BQ.
    """
    a = tl.maximum(lo0 - offset, s0)
    d = tl.minimum(end1 - offset, s1)
    b = tl.minimum(a + tl.cdiv(tl.maximum(lo1 - offset - a, 0), BQ) * BQ, tl.maximum(d, a))
    c = tl.maximum(a + tl.maximum(tl.minimum(end0 - offset, s1) - a, 0) // BQ * BQ, b)
    return a, b, c, d


@triton.jit
def within(x, lo, length):
    """Whether lo <= x < lo + length, in one comparison: what is below lo wraps around."""
    return (x - lo).to(tl.uint32) < length.to(tl.uint32)


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

    Both in one load, of at least as many numbers as four warps have threads: what has fewer, the compiler lets every
    thread load that needs it, with an address for each. Of fewer than 64 rows, two or more copies are loaded for that.
    """
    ROWS: tl.constexpr = row.shape[0]
    COPIES: tl.constexpr = 1 if ROWS >= 64 else 64 // ROWS
    at = STATS + row[:, None] * 2 + (tl.arange(0, 2 * COPIES) % 2)[None, :]
    stats = tl.load(at, mask=ok[:, None], other=0.0)
    if COPIES == 1:
        return tl.split(stats)
    else:  # noqa: RET505  Triton compiles what follows a return, too
        lse, delta = tl.split(tl.reshape(stats, [ROWS, COPIES, 2]))
        return _one(lse, ROWS, COPIES), _one(delta, ROWS, COPIES)


@triton.jit
def _one(copies, ROWS: tl.constexpr, COPIES: tl.constexpr):
    """A column of [ROWS,COPIES]; by halves, for which threads that have a row need none of each other's."""
    if COPIES == 2:
        return tl.split(copies)[0]
    else:  # noqa: RET505
        return _one(tl.split(tl.reshape(copies, [ROWS, COPIES // 2, 2]))[0], ROWS, COPIES // 2)


@triton.jit
def in_registers(x):
    """x [rows,columns], finite, as the result of a product, which stays in registers as a product's first operand.

    What is loaded, Triton puts into shared memory for Hopper's products, each of which reads it from there.
    """
    i = tl.arange(0, x.shape[1])
    identity = (i[:, None] == i[None, :]).to(x.dtype)
    return tl.dot(x, identity, input_precision="ieee").to(x.dtype)
