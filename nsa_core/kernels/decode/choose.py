# pyright: reportMissingImports=false
"""The choice of blocks for one new token (Eq. 8 to 12), from the scores that the compressed branch stored.

Importance and order are those of scores.py up to rounding: here a block's taps are summed head by head, there the heads
tap by tap. Forced blocks come first, then score descending and index ascending, as distinct 64-bit keys. Programs find
the best of every chunk of blocks in parallel; each program that needs the choice then finds the best of these again,
which is too little work to share.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merged_lse(LPARTS, PARTS: tl.constexpr, PARTS_P: tl.constexpr, G: tl.constexpr):
    """Base-2 log-sum-exp of one head over all its parts; +inf where there is no key."""
    part = tl.arange(0, PARTS_P)
    lse = tl.load(LPARTS + part * G, mask=part < PARTS, other=float("-inf"))
    m = tl.maximum(tl.max(lse, 0), -1e30)
    l = tl.sum(tl.exp2(lse - m), 0)
    return tl.where(l > 0, m + tl.log2(l), float("inf"))


@triton.jit
def best_of_chunk(
    SCORES, LPARTS, tokens, chunk, room,
    G: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    SLC_BLOCK: tl.constexpr, RP: tl.constexpr, COUNT_P: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The COUNT_P highest keys of CHUNK blocks, descending; -1 for none.

    SCORES [G,room] and LPARTS [parts,G] are those of the token's kv head. A key holds the score's bits, which ascend as
    floats >= 0 do, in its upper half, and the inverted index in its lower half.
    """
    LAST: tl.constexpr = 0x7FFFFFFF
    R: tl.constexpr = SLC_BLOCK // STRIDE
    BEFORE: tl.constexpr = BLOCK // STRIDE - 1
    seen, own = tl.maximum(tokens - BLOCK + STRIDE, 0) // STRIDE, (tokens - 1) // SLC_BLOCK
    tap, block = tl.arange(0, RP), chunk * CHUNK + tl.arange(0, CHUNK)
    weight = (tl.minimum(tap * STRIDE + BLOCK, SLC_BLOCK) - tap * STRIDE) / STRIDE
    n = block[:, None] * R + tap[None, :]
    score = tl.zeros([CHUNK], tl.float32)
    for g in tl.static_range(G):
        lse = _merged_lse(LPARTS + g, PARTS, PARTS_P, G)
        for before in tl.static_range(BEFORE, 0, -1):
            i = block * R - before
            s = tl.load(SCORES + g * room + i, mask=(i >= 0) & (i < seen), other=float("-inf"))
            score += tl.exp2(s - lse) * ((BLOCK - before * STRIDE) / STRIDE)
        s = tl.load(SCORES + g * room + n, mask=(tap < R)[None, :] & (n < seen), other=float("-inf"))
        score += tl.sum(tl.exp2(s - lse) * weight[None, :], 1)
    score = tl.where((block < INIT) | (block > own - LOCAL), float("inf"), score)
    keys = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (LAST - block).to(tl.int64)
    return tl.topk(tl.where(block <= own, keys, -1), COUNT_P)


@triton.jit
def chosen_block(
    KEYS, rank, COUNT: tl.constexpr, COUNT_P: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr
):  # fmt: skip
    """Index of the block at `rank` among the COUNT chosen, ascending; -1 beyond the last. KEYS [CHUNKS,COUNT_P]."""
    LAST: tl.constexpr = 0x7FFFFFFF
    n, slot = tl.arange(0, CHUNKS_P * COUNT_P), tl.arange(0, COUNT_P)
    best = tl.topk(tl.load(KEYS + n, mask=n < CHUNKS * COUNT_P, other=-1), COUNT_P)
    index = tl.where((best >= 0) & (slot < COUNT), LAST - (best & LAST).to(tl.int32), LAST)
    before = tl.sum((index[None, :] < index[:, None]).to(tl.int32), 1)
    return tl.max(tl.where((before == rank) & (index < LAST), index, -1), 0)
