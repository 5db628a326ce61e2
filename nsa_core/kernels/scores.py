# pyright: reportMissingImports=false
"""Importance of selection blocks and the exact choice of the best (Eq. 8 to 12), a chunk of queries at a time.

The score of block b is Σ over its taps τ of w(τ) · Σ over the group's heads of p[b·r + τ], r = slc_block / cmp_stride:
compressed token b·r + τ shares w(τ)·cmp_stride tokens with the block. One product for each of the r taps that begin in
the block, with the keys read r apart, needs no buffer of token probabilities. What they share with the next block is
summed apart and handed to the neighbouring column once, at the end. All blocks of all rows sum in the same order, so
equal importance gives equal bits.

The choice compares 64-bit keys: the score's bits, which ascend as floats >= 0 do, above the inverted index. Keys are
distinct, so ties go to the lower index, and the order in which blocks are looked at does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import NSAConfig
from ._launch import launch
from ._tiles import LOG2_E, Tile, ceil_div, padded, power_of_two
from .ranges import load_rows

_BUFFER = 64 << 20  # bytes of one chunk's scores


@triton.jit
def _importance(
    Q, K, LSE, SCORES, S, N, offset, first, rows, blocks, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CMP_BLOCK: tl.constexpr, STRIDE: tl.constexpr, SLC_BLOCK: tl.constexpr,
):  # fmt: skip
    """SCORES [B·HKV,rows,blocks] of queries first .. first+rows-1; tiles wholly in the future are left unwritten.

    Where compressed tokens overlap, a tile's first column is the block before its own, for what that hands over.
    """
    G: tl.constexpr = HQ // HKV
    R: tl.constexpr = SLC_BLOCK // STRIDE
    HALO: tl.constexpr = 1 if CMP_BLOCK > STRIDE else 0
    i, j = tl.program_id(0) * M, tl.program_id(1) * (BN - HALO)
    if j * SLC_BLOCK <= offset + first + tl.minimum(i + M, rows) - 1:
        kvh, b = tl.program_id(2) % HKV, tl.program_id(2) // HKV
        column = tl.arange(0, BN)
        r, d, block = i + tl.arange(0, M), tl.arange(0, DP), j - HALO + column
        t, ok = offset + first + r, r < rows
        row = (b.to(tl.int64) * S + first + i) * HQ + kvh * G
        K += (b.to(tl.int64) * N * HKV + kvh) * D
        score, handed = tl.zeros([M, BN], tl.float32), tl.zeros([M, BN], tl.float32)
        for h in range(G):
            q = load_rows(Q + (row + h) * D, r - i, HQ * D, d, D, DP, ok, True)
            lse = tl.load(LSE + row + h + (r - i) * HQ, mask=ok, other=float("inf"))
            for tap in tl.static_range(R):
                beyond = tap * STRIDE + CMP_BLOCK - SLC_BLOCK if tap * STRIDE + CMP_BLOCK > SLC_BLOCK else 0
                n = block * R + tap
                k = load_rows(K, n.to(tl.int64), HKV * D, d, D, DP, (n >= 0) & (n < N), True)
                p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
                seen = (n * STRIDE + (CMP_BLOCK - 1))[None, :] <= t[:, None]
                p = tl.where(seen & (n >= 0)[None, :], p, 0.0)
                score += p * ((CMP_BLOCK - beyond) / STRIDE)
                if beyond > 0:
                    handed += p * (beyond / STRIDE)
        if HALO > 0:
            score += tl.gather(handed, tl.broadcast_to(tl.maximum(column - 1, 0)[None, :], [M, BN]), 1)
        at = SCORES + (tl.program_id(2).to(tl.int64) * rows + r)[:, None] * blocks + block[None, :]
        tl.store(at, score, mask=ok[:, None] & ((column >= HALO) & (block < blocks))[None, :])


@triton.jit
def _keys(SCORES, n, own, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """64-bit keys of blocks n: the score above the inverted index; -1 for forced blocks and those after the own one."""
    LAST: tl.constexpr = 0x7FFFFFFF
    free = (n >= INIT) & (n <= own - LOCAL)
    score = tl.load(SCORES + n, mask=free, other=0.0)
    keys = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (LAST - n).to(tl.int64)
    return tl.where(free, keys, -1)


@triton.jit
def _choose(
    SCORES, CHOSEN, S, offset, first, rows, blocks,
    HKV: tl.constexpr, COUNT: tl.constexpr, COUNT_P: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    SLC_BLOCK: tl.constexpr, STEPS: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """CHOSEN [B,S,HKV,COUNT] of ROWS queries: the forced blocks and the best others, ascending, padded with -1.

    Block n is a member of group n % 32. The largest key of each group is held; a turn takes the largest of these 32 and
    looks through the winner's group alone for the one that follows. Several queries a program hide each other's waits.
    """
    LAST: tl.constexpr = 0x7FFFFFFF
    r, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    own = tl.where(r < rows, (offset + first + r) // SLC_BLOCK, -1)
    SCORES += (head.to(tl.int64) * rows + r[:, None]) * blocks
    group, slot = tl.arange(0, 32)[None, :], tl.arange(0, COUNT_P)[None, :]
    largest = tl.full([ROWS, 32], -1, tl.int64)
    for j in range(0, tl.max(own, 0) + 1, 32 * STEPS):
        for step in tl.static_range(STEPS):
            largest = tl.maximum(largest, _keys(SCORES, j + step * 32 + group, own[:, None], INIT, LOCAL))
    FREE: tl.constexpr = COUNT - INIT - LOCAL
    initial, local = slot - FREE, own[:, None] - (COUNT - 1) + slot
    index = tl.where((slot >= FREE) & (initial < INIT) & (initial <= own[:, None]), initial, LAST)
    index = tl.where((initial >= INIT) & (slot < COUNT) & (local >= INIT), local, index)
    for turn in range(FREE):
        best = tl.max(largest, 1)[:, None]
        n = LAST - (best & LAST).to(tl.int32)
        index = tl.where((slot == turn) & (best >= 0), n, index)
        keys = _keys(SCORES, n % 32 + 32 * tl.arange(0, MEMBERS)[None, :], own[:, None], INIT, LOCAL)
        following = tl.max(tl.where(keys < best, keys, -1), 1)[:, None]
        largest = tl.where(group == n % 32, following, largest)
    # Every index goes where its rank says; what remains is padding.
    rank = tl.sum((index[:, None, :] < index[:, :, None]).to(tl.int32), 2)
    found = tl.sum((index < LAST).to(tl.int32), 1)[:, None]
    b, kvh = head // HKV, head % HKV
    at = CHOSEN + ((b.to(tl.int64) * S + first + r[:, None]) * HKV + kvh) * COUNT
    ok = (r < rows)[:, None]
    tl.store(at + rank, index, mask=ok & (index < LAST))
    tl.store(at + slot, tl.full([ROWS, COUNT_P], -1, tl.int32), mask=ok & (slot >= found) & (slot < COUNT))


def select(
    q: Tensor, k_cmp: Tensor, lse: Tensor, config: NSAConfig, offset: int, scale: float, skip: int = 0
) -> Tensor:
    """Selected blocks, int32 [B,S,HKV,slc_count]; the first `skip` rows stay unwritten.

    Args:
        q: [B,S,HQ,D]. k_cmp: [B,N,HKV,D].
        lse: of the compressed scores, float32 [B,S,HQ], base 2, from span.forward.
    """
    (batch, rows, _, _), kv_heads = q.shape, k_cmp.shape[2]
    blocks = config.slc_blocks(offset + rows)
    chosen = torch.empty(batch, rows, kv_heads, config.slc_count, dtype=torch.int32, device=q.device)
    step = min(max(1, rows - skip), max(1, _BUFFER // (4 * batch * kv_heads * blocks)))
    buffer = torch.empty(batch * kv_heads * step * blocks, dtype=torch.float32, device=q.device)
    for first in range(skip, rows, step):
        part = min(step, rows - first)
        _score_chunk(q, k_cmp, lse, buffer, config, offset, scale, first, part)
        _choose_chunk(buffer, chosen, config, offset, first, part)
    return chosen


def _score_chunk(
    q: Tensor, k_cmp: Tensor, lse: Tensor, scores: Tensor, config: NSAConfig, offset: int, scale: float,
    first: int, rows: int,
) -> None:  # fmt: skip
    tile, dim = _importance_tile(q), q.shape[-1]
    blocks = config.slc_blocks(offset + first + rows)
    pointers = dict(Q=q, K=k_cmp, LSE=lse, SCORES=scores)
    numbers = dict(S=q.shape[1], N=k_cmp.shape[1], offset=offset, first=first, rows=rows, blocks=blocks)
    heads = dict(HQ=q.shape[2], HKV=k_cmp.shape[2], D=dim, DP=padded(dim), M=tile.rows, BN=tile.keys)
    sizes = dict(CMP_BLOCK=config.cmp_block, STRIDE=config.cmp_stride, SLC_BLOCK=config.slc_block)
    columns = tile.keys - (config.cmp_block > config.cmp_stride)
    grid = (ceil_div(rows, tile.rows), ceil_div(blocks, columns), q.shape[0] * k_cmp.shape[2])
    launch(_importance, grid, pointers | numbers | dict(scale2=scale * LOG2_E), heads | sizes, tile)


def _choose_chunk(scores: Tensor, chosen: Tensor, config: NSAConfig, offset: int, first: int, rows: int) -> None:
    batch, length, kv_heads, count = chosen.shape
    blocks = config.slc_blocks(offset + first + rows)
    pointers = dict(SCORES=scores, CHOSEN=chosen)
    numbers = dict(S=length, offset=offset, first=first, rows=rows, blocks=blocks)
    sizes = dict(HKV=kv_heads, COUNT=count, COUNT_P=padded(count), INIT=config.init_blocks, LOCAL=config.local_blocks)
    members = power_of_two(ceil_div(config.slc_blocks(offset + length), 32))
    constants = sizes | dict(SLC_BLOCK=config.slc_block, STEPS=min(8, members), MEMBERS=members, ROWS=4)
    launch(_choose, (ceil_div(rows, 4), batch * kv_heads), pointers | numbers, constants, Tile(warps=1))


def _importance_tile(q: Tensor) -> Tile:
    wide = padded(q.shape[-1])
    if q.itemsize == 4:
        return Tile(32, 32, 8) if wide <= 64 else Tile(16, 16, 8)
    return Tile(64, 32, 4, 2) if wide <= 128 else Tile(32, 32, 4, 1)
