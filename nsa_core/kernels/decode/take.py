# pyright: reportMissingImports=false
"""The first launch of a decoding step: rotates the new token's query and stores its keys and values in the cache.

The token's position is read from the device. It is appended to the selected branch's tokens, and overwrites the oldest
one in the window's ring and in the ring of the last cmp_block unrotated tokens, whose mean is stored as a compressed
token every cmp_stride tokens. Tokens beyond the cache's capacity are not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _angles(position, FREQUENCIES, d, HALF: tl.constexpr):
    """Cosine and sine of RoPE's rotation at `position`, for the first half's columns d."""
    angle = position.to(tl.float32) * tl.load(FREQUENCIES + d, mask=d < HALF, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _store_rotated(first, second, cos, sin, to, inside, HALF: tl.constexpr):
    """Store the two halves of rows, rotated, at `to` and `to` + HALF."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    tl.store(to, (first * cos - second * sin).to(to.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (second * cos + first * sin).to(to.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_queries(Q, ROTATED, row, cos, sin, d, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr):
    """Rotate the G heads of a group, from row `row` of Q on, into ROTATED."""
    r = tl.arange(0, GP)
    at = (row + r)[:, None] * D + d[None, :]
    inside = (r < G)[:, None] & (d < D // 2)[None, :]
    first, second = tl.load(Q + at, mask=inside, other=0.0), tl.load(Q + at + D // 2, mask=inside, other=0.0)
    _store_rotated(first, second, cos[None, :], sin[None, :], ROTATED + at, inside, D // 2)


@triton.jit
def _mean_of_last(RING, new, first, d, width, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, ROW: tl.constexpr):
    """Mean of the BLOCK tokens from position `first` on: BLOCK - 1 from the ring, the last one is `new`."""
    n = tl.arange(0, BLOCK_P)
    inside = (n < BLOCK - 1)[:, None] & (d < width)[None, :]
    held = tl.load(RING + ((first + n) % BLOCK * ROW)[:, None] + d[None, :], mask=inside, other=0.0)
    return ((tl.sum(held.to(tl.float32), 0) + new.to(tl.float32)) / BLOCK).to(new.dtype)


@triton.jit
def _decode_take(
    Q, K, V, ROTATED, KC, VC, KS, VS, KW, VW, KO, VO, POSITION, FREQUENCIES, room, cmp_room, capacity,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HP: tl.constexpr, DVP: tl.constexpr,
    GP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Rotates the query of one token, and stores its keys and values in the cache.

    Grid: (sequences x kv heads). A program owns one kv head and the G query heads of its group. It writes ROTATED, one
    row in the buffers KS, VS (selected), KW, VW (window's ring) and KO, VO (ring of unrotated tokens), and, where MEAN
    and the token completes a block, one row in KC, VC (compressed).
    Q, ROTATED [B,HQ,D]; K [B,3,HKV,D], V [B,3,HKV,DV] of cmp, slc, win; buffers [B,tokens,HKV,D or DV], of `room`,
    WINDOW, BLOCK and `cmp_room` tokens; POSITION int32 [1]; FREQUENCIES float32 [D/2].
    """
    G: tl.constexpr = HQ // HKV
    HALF: tl.constexpr = D // 2
    b, h = (tl.program_id(0) // HKV).to(tl.int64), tl.program_id(0) % HKV
    d, e = tl.arange(0, HP), tl.arange(0, DVP)
    in_half, in_value = d < HALF, e < DV
    t = tl.load(POSITION)
    cos, sin = _angles(t, FREQUENCIES, d, HALF)
    _rotate_queries(Q, ROTATED, b * HQ + h * G, cos, sin, d, G, D, GP)
    fits, keep, keep_value = t < capacity, in_half & (d * 0 + t < capacity), in_value & (e * 0 + t < capacity)
    ring, slot = (b * BLOCK * HKV + h), (t % BLOCK) * HKV
    token, recent = (b * room + t) * HKV + h, (b * WINDOW + t % WINDOW) * HKV + h
    given = b * 3 * HKV + h
    first, second = tl.load(K + given * D + d, mask=in_half), tl.load(K + given * D + HALF + d, mask=in_half)
    value = tl.load(V + given * DV + e, mask=in_value)
    tl.store(KO + (ring + slot) * D + d, first, mask=keep)
    tl.store(KO + (ring + slot) * D + HALF + d, second, mask=keep)
    tl.store(VO + (ring + slot) * DV + e, value, mask=keep_value)
    for branch in tl.static_range(1, 3):
        row = given + branch * HKV
        x, y = tl.load(K + row * D + d, mask=in_half), tl.load(K + row * D + HALF + d, mask=in_half)
        to = (KS + token * D if branch == 1 else KW + recent * D) + d
        _store_rotated(x, y, cos, sin, to, keep, HALF)
        to = (VS + token * DV if branch == 1 else VW + recent * DV) + e
        tl.store(to, tl.load(V + row * DV + e, mask=in_value), mask=keep_value)
    start = t + 1 - BLOCK
    if MEAN and (start >= 0) & (start % STRIDE == 0) & fits:
        ROW: tl.constexpr = HKV * D
        x = _mean_of_last(KO + ring * D, first, start, d, HALF, BLOCK, BLOCK_P, ROW)
        y = _mean_of_last(KO + ring * D + HALF, second, start, d, HALF, BLOCK, BLOCK_P, ROW)
        z = _mean_of_last(VO + ring * DV, value, start, e, DV, BLOCK, BLOCK_P, HKV * DV)
        cos, sin = _angles(start, FREQUENCIES, d, HALF)
        row = (b * cmp_room + start // STRIDE) * HKV + h
        _store_rotated(x, y, cos, sin, KC + row * D + d, in_half, HALF)
        tl.store(VC + row * DV + e, z, mask=in_value)


@triton.jit
def _decode_take_dense(
    Q, K, V, ROTATED, KT, VT, POSITION, FREQUENCIES, room, capacity,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HP: tl.constexpr, DVP: tl.constexpr,
    GP: tl.constexpr,
):  # fmt: skip
    """Rotates query and key of one token, and appends key and value to the dense cache.

    Grid: (sequences x kv heads). A program owns one kv head and the G query heads of its group, and writes ROTATED and
    one row in KT and VT.
    Q, ROTATED [B,HQ,D]; K [B,HKV,D], V [B,HKV,DV]; KT [B,room,HKV,D], VT [B,room,HKV,DV]; POSITION int32 [1].
    """
    G: tl.constexpr = HQ // HKV
    HALF: tl.constexpr = D // 2
    b, h = (tl.program_id(0) // HKV).to(tl.int64), tl.program_id(0) % HKV
    d, e = tl.arange(0, HP), tl.arange(0, DVP)
    in_half, in_value = d < HALF, e < DV
    t = tl.load(POSITION)
    cos, sin = _angles(t, FREQUENCIES, d, HALF)
    _rotate_queries(Q, ROTATED, b * HQ + h * G, cos, sin, d, G, D, GP)
    keep, keep_value = in_half & (d * 0 + t < capacity), in_value & (e * 0 + t < capacity)
    row, token = b * HKV + h, (b * room + t) * HKV + h
    x, y = tl.load(K + row * D + d, mask=in_half), tl.load(K + row * D + HALF + d, mask=in_half)
    _store_rotated(x, y, cos, sin, KT + token * D + d, keep, HALF)
    tl.store(VT + token * DV + e, tl.load(V + row * DV + e, mask=in_value), mask=keep_value)
