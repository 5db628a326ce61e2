# pyright: reportMissingImports=false
"""Ranges: device functions for which keys a query sees and which queries see a key, and for loading tiles of rows.

Positions t are queries', n keys'. In each set of keys a query sees a band [lo(t), end(t)), and a key is seen by a band
of queries; both ends ascend. So a tile of queries sees whole tiles of keys between the lo of its last query and the end
of its first, and masked tiles around them.

Where the selected branch and the window share keys and values, their keys are split into three disjoint sets, each
scored once: SLC_ALONE, seen by the selected branch alone (the initial blocks; before CAUSAL, where every block is
selected, all keys before the window), WIN_ALONE, seen by the window alone, and BOTH (the local blocks, which lie in the
window; before CAUSAL, the window).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...config import NSAConfig

# Sets of shared keys, in the order of merge.prepare's stats.
SLC_ALONE, WIN_ALONE, BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NEVER = tl.constexpr(0x7FFFFFFF)
_WIDEST = 1 << 30  # window; a key's position and a wider one, which sees all keys, too, may not add up in 32 bits


def sizes(config: NSAConfig) -> dict[str, int]:
    """Constants of the kernels, in tokens: rows before CAUSAL select all, later ones the INIT first and LOCAL last."""
    init, local, causal = (n * config.slc_block for n in (config.init_blocks, config.local_blocks, config.slc_count))
    window = min(config.window, _WIDEST)
    compressed = dict(BLOCK=config.cmp_block, STRIDE=config.cmp_stride)
    return compressed | dict(WINDOW=window, ALIGN=config.slc_block, LOCAL=local, INIT=init, CAUSAL=causal)


@triton.jit
def compressed_keys(t, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Compressed keys whose block ends at or before t."""
    return t * 0, tl.maximum(t + (1 - BLOCK + STRIDE), 0) // STRIDE


@triton.jit
def window_keys(t, WINDOW: tl.constexpr):
    """The last WINDOW keys up to t."""
    return tl.maximum(t + (1 - WINDOW), 0), t + 1


@triton.jit
def initial_keys(t, INIT: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys of the initial blocks; none for queries before CAUSAL, whose keys are all in `local_keys`."""
    return t * 0, tl.where(t < CAUSAL, 0, INIT)


@triton.jit
def local_keys(t, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys of the local blocks up to t; all keys up to t for queries before CAUSAL."""
    local = tl.minimum(tl.maximum(t // ALIGN * ALIGN + (ALIGN - LOCAL), 0), t + 1)
    return tl.where(t < CAUSAL, 0, local), t + 1


@triton.jit
def shared_keys(
    t, kind, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, INIT: tl.constexpr, CAUSAL: tl.constexpr
):
    """Keys that query t sees of SLC_ALONE, WIN_ALONE or BOTH. Ends ascend before CAUSAL and from it on."""
    near = tl.maximum(t + (1 - WINDOW), 0)
    local = tl.minimum(tl.maximum(t // ALIGN * ALIGN + (ALIGN - LOCAL), 0), t + 1)
    both = tl.where(t < CAUSAL, near, local)
    lo = tl.where(kind == BOTH, both, tl.where(kind == WIN_ALONE, near, 0))
    end = tl.where(kind == BOTH, t + 1, tl.where(kind == WIN_ALONE, both, tl.where(t < CAUSAL, near, INIT)))
    return lo, end


@triton.jit
def branch_queries(
    n, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Queries that see key n in the branch that is on (SLC: in `local_keys`); if none is, in `initial_keys`."""
    if CMP:
        return n * STRIDE + (BLOCK - 1), n * 0 + _NEVER
    elif WIN:  # noqa: RET505  Triton compiles what follows a return, too
        return n, n + WINDOW
    elif SLC:
        last = tl.maximum(n // ALIGN * ALIGN + LOCAL, n)
        return n, tl.where(n < CAUSAL, tl.maximum(last, CAUSAL), last)
    else:
        return n * 0 + CAUSAL, n * 0 + _NEVER


@triton.jit
def shared_queries(n, kind, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr):
    """Queries that see key n in SLC_ALONE (without the initial blocks), WIN_ALONE or BOTH."""
    near, last = n + WINDOW, tl.maximum(n // ALIGN * ALIGN + LOCAL, n)
    choosing = tl.maximum(last, CAUSAL)  # the first choosing query that sees the key in the window alone
    both = tl.where(near < CAUSAL, near, tl.where(n < CAUSAL, choosing, last))
    lo = tl.where(kind == BOTH, n, tl.where(kind == WIN_ALONE, choosing, near))
    end = tl.maximum(near, tl.where(kind == WIN_ALONE, choosing, CAUSAL))
    return lo, tl.where(kind == BOTH, both, end)


@triton.jit
def sequence_of(CU, sequences, tile, SIZE: tl.constexpr, MORE: tl.constexpr):
    """(sequence, its first token, its tokens, the tile's index in it) of a tile of packed sequences.

    Sequence b has the tiles from CU[b] // SIZE + MORE * b on: with MORE = 1 always enough for tiles of SIZE tokens from
    its first token on, with 0 as many as whole ones. So tiles need no table and no sum over sequences; some are empty.
    CU int32 [sequences + 1] ascends from 0.
    """
    b, left = tile * 0, sequences
    while left > 1:
        half = left // 2
        b = tl.where(tl.load(CU + b + half) // SIZE + MORE * (b + half) <= tile, b + half, b)
        left -= half
    start = tl.load(CU + b)
    return b, start, tl.load(CU + b + 1) - start, tile - start // SIZE - MORE * b


@triton.jit
def compressed_tokens(tokens, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Compressed tokens of a sequence."""
    return tl.maximum(tokens + (STRIDE - BLOCK), 0) // STRIDE


@triton.jit
def tile_of_rows(
    CU, sequences, S, NC, T, skip,
    HKV: tl.constexpr, BQ: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """This program's tile of rows, all of them before `skip` or all behind. Longest spans first.

    Returns:
        kv head; first and end of the rows in their sequence; the sequence's first row of q, of compressed keys and of
        keys; the numbers of its compressed keys and keys.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if VARLEN:  # compressed keys begin at start // STRIDE
        _, start, S, tile = sequence_of(CU, sequences, tile, BQ, 2)
        skip, NC, T = tl.minimum(skip, S), compressed_tokens(S, BLOCK, STRIDE), S
        kvh, row, cmp, key = tl.program_id(1), start.to(tl.int64), (start // STRIDE).to(tl.int64), start.to(tl.int64)
    else:
        kvh, b = tl.program_id(1) % HKV, (tl.program_id(1) // HKV).to(tl.int64)
        row, cmp, key = b * S, b * NC, b * T
    early = tl.cdiv(skip, BQ)
    first = tl.where(tile < early, tile * BQ, skip + (tile - early) * BQ)
    return kvh, first, tl.minimum(first + BQ, tl.where(tile < early, skip, S)), row, cmp, key, NC, T


@triton.jit
def block_of_keys(
    CU, sequences, key, blocks, T, HKV: tl.constexpr, SB: tl.constexpr, VARLEN: tl.constexpr
):  # fmt: skip
    """A block of SB keys by its number among those of all sequences and kv heads, `blocks` a sequence and kv head.

    Packed sequences count as one, whose blocks are those of `sequence_of`.

    Returns:
        sequence x kv heads + kv head; kv head; the sequence's first key; the block's first key in its sequence; keys of
        the sequence; tokens of packed sequences before it.
    """
    head = key // blocks
    kvh = head % HKV
    if VARLEN:
        _, start, T, block = sequence_of(CU, sequences, key % blocks, SB, 1)
        return head, kvh, start.to(tl.int64), block * SB, T, start
    else:  # noqa: RET505  Triton compiles what follows a return, too
        return head, kvh, (head // HKV).to(tl.int64) * T, key % blocks * SB, T, 0


@triton.jit
def key_tiles(lo0, lo1, end0, end1, BN: tl.constexpr):
    """(a, b, c, d): bounds of the keys of a tile of queries whose first sees [lo0, end0) and whose last [lo1, end1).

    Keys [a, b) and [c, d) need a mask, [b, c) are seen by all queries. Tiles of BN keys start at multiples of BN.
    """
    stop = tl.cdiv(end1, BN) * BN
    a, b = tl.minimum(lo0 // BN * BN, stop), tl.minimum(tl.cdiv(lo1, BN) * BN, stop)
    c = tl.maximum(end0 // BN * BN, b)
    # In loops that may start below 0, ptxas serializes Hopper's matrix instructions.
    return tl.maximum(a, 0), tl.maximum(b, 0), tl.maximum(c, 0), tl.maximum(tl.maximum(end1, b), 0)


@triton.jit
def row_tiles(lo0, lo1, end0, end1, s0, s1, offset, BQ: tl.constexpr):
    """(a, b, c, d): bounds of the rows for a tile of keys whose first is seen by [lo0, end0), the last by [lo1, end1).

    Rows [a, b) and [c, d) need a mask, [b, c), a multiple of BQ, see all keys; all are within [s0, s1).
    """
    a = tl.maximum(lo0 - offset, s0)
    d = tl.minimum(end1 - offset, s1)
    b = tl.minimum(a + tl.cdiv(tl.maximum(lo1 - offset - a, 0), BQ) * BQ, tl.maximum(d, a))
    c = tl.maximum(a + tl.maximum(tl.minimum(end0 - offset, s1) - a, 0) // BQ * BQ, b)
    return a, b, c, d


@triton.jit
def within(x, lo, length):
    """Whether lo <= x < lo + length, in one comparison: numbers below lo wrap around."""
    return (x - lo).to(tl.uint32) < length.to(tl.uint32)


@triton.jit
def load_rows(base, row, stride, d, D: tl.constexpr, DP: tl.constexpr, rows_ok, MASKED: tl.constexpr):
    """Rows of a tensor [..,D] as a tile [len(row),DP]; columns from D on, and rows that are not ok, are zeros."""
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
    """(lse, delta) of rows of STATS [..,2], as merge.prepare writes them; (0, 0) for rows that are not ok.

    One load of at least as many numbers as four warps have threads: of a smaller one, the compiler makes every thread
    load all numbers that it needs, with an address for each. So fewer than 64 rows are loaded in two or more copies.
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
    """A column of copies [ROWS,COPIES], taken by halves, which exchanges no data between threads."""
    if COPIES == 2:
        return tl.split(copies)[0]
    else:  # noqa: RET505
        return _one(tl.split(tl.reshape(copies, [ROWS, COPIES // 2, 2]))[0], ROWS, COPIES // 2)


@triton.jit
def in_registers(x):
    """x [rows,columns], finite, as the result of a product, so that it stays in registers as a first operand.

    Triton puts loaded tensors into shared memory for Hopper's products, each of which reads them from there.
    """
    i = tl.arange(0, x.shape[1])
    identity = (i[:, None] == i[None, :]).to(x.dtype)
    return tl.dot(x, identity, input_precision="ieee").to(x.dtype)
