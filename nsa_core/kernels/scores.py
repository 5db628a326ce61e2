# pyright: reportMissingImports=false
"""Importance of selection blocks and the exact choice of the best (Eq. 8 to 12), a chunk of queries at a time.

The score of block b is Σ over its taps τ of w(τ) · Σ over the group's heads of p[b·r + τ], r = slc_block / cmp_stride:
compressed token b·r + τ shares w(τ)·cmp_stride tokens with the block. A tile holds the taps that begin in its blocks,
ordered by tap, then block: one product per head scores them all, and the sum over taps stays within a thread. The last
taps' overlap with the next block is passed to the neighbouring column. All blocks of all rows sum in the same order, so
equal importance gives equal bits.

The choice compares scores by their bits, which ascend as floats >= 0 do; ties go to the lower index, in whatever order
blocks are visited.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import Call
from .runtime.launch import launch
from .runtime.tiles import LOG2_E, Tile, ceil_div, padded, power_of_two
from .shared.ranges import compressed_tokens, load_rows, sequence_of

_BUFFER = 64 << 20  # bytes that one chunk's scores may take
_SCAN = tl.constexpr(1024)  # blocks among which one load finds the successor of a group's best


@triton.jit
def _importance(
    Q, K, LSE, SCORES, CU, S, N, offset, first, rows, blocks, sixteens, skip, sequences, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    TAPS: tl.constexpr, CMP_BLOCK: tl.constexpr, STRIDE: tl.constexpr, SLC_BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Importance scores of selection blocks for the queries first .. first+rows-1.

    Grid: (tiles of M queries, tiles of BN - HALO blocks, sequences x kv heads). A program owns M queries of one kv head
    and its blocks, with taps padded to TAPS: it sums exp2(s - lse) over the group's heads, weighs it by overlap, and
    writes SCORES [B·HKV,rows,16·sixteens] float32. Tiles wholly in the future stay unwritten. HALO: where compressed
    tokens overlap, the first column is the block before the tile, for the overlap that it passes on.
    Q [B,S,HQ,D], K [B,N,HKV,D], contiguous; LSE [B,S,HQ] float32, base 2.
    VARLEN: sequences are packed, as in ranges.sequence_of; `first` is a tile of M queries, and rows before `skip` of
    each sequence stay unwritten.
    """
    G: tl.constexpr = HQ // HKV
    R: tl.constexpr = SLC_BLOCK // STRIDE
    HALO: tl.constexpr = 1 if CMP_BLOCK > STRIDE else 0
    i, j = tl.program_id(0) * M, tl.program_id(1) * (BN - HALO)
    kvh, b = tl.program_id(2) % HKV, (tl.program_id(2) // HKV).to(tl.int64)
    row0, key0, t0, ends = b * S + first + i, b * N, offset + first + i, tl.minimum(M, rows - i)
    if VARLEN:
        _, start, tokens, tile = sequence_of(CU, sequences, first + tl.program_id(0), M, 1)
        t0, N, key0 = tile * M, compressed_tokens(tokens, CMP_BLOCK, STRIDE), (start // STRIDE).to(tl.int64)
        row0, ends = start.to(tl.int64) + t0, tl.minimum(M, tokens - t0)
        ends = tl.where((ends > 0) & (t0 + ends > skip), ends, -t0)  # rows that choose nothing see no block
    if j * SLC_BLOCK <= t0 + ends - 1:
        r, d, column = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, BN)
        tap = tl.arange(0, TAPS * BN) // BN
        n = (j - HALO + tl.arange(0, TAPS * BN) % BN) * R + tap
        exists = (n >= 0) & (n < N) & (tap < R)
        t, ok = t0 + r, r < ends
        row = row0 * HQ + kvh * G
        K += (key0 * HKV + kvh) * D
        k = load_rows(K, n.to(tl.int64), HKV * D, d, D, DP, exists, True)
        p = tl.zeros([M, TAPS * BN], tl.float32)
        for h in range(G):
            q = load_rows(Q + (row + h) * D, r, HQ * D, d, D, DP, ok, True)
            lse = tl.load(LSE + row + h + r * HQ, mask=ok, other=float("inf"))
            p += tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
        seen = exists[None, :] & ((n * STRIDE + (CMP_BLOCK - 1))[None, :] <= t[:, None])
        p = tl.where(seen, p, 0.0)
        beyond = tl.maximum(tap * STRIDE + (CMP_BLOCK - SLC_BLOCK), 0)
        score = tl.sum(tl.reshape(p * ((CMP_BLOCK - beyond) / STRIDE)[None, :], [M, TAPS, BN]), 1)
        if HALO > 0:
            handed = tl.sum(tl.reshape(p * (beyond / STRIDE)[None, :], [M, TAPS, BN]), 1)
            score += tl.gather(handed, tl.broadcast_to(tl.maximum(column - 1, 0)[None, :], [M, BN]), 1)
        block = j - HALO + column
        at = SCORES + (tl.program_id(2).to(tl.int64) * rows + i + r)[:, None] * (sixteens * 16) + block[None, :]
        tl.store(at, score, mask=ok[:, None] & ((column >= HALO) & (block < blocks))[None, :])


@triton.jit
def _free(SCORES, n, own, pitch, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """Score bits of blocks n; -1 for forced blocks and for those after the query's own, whatever SCORES holds there."""
    score = tl.load(SCORES + n, mask=(n < pitch) & (own >= 0), other=0.0)
    return tl.where((n >= INIT) & (n <= own - LOCAL), score.to(tl.int32, bitcast=True), -1)


@triton.jit
def _best(bits, n):
    """(largest of each row's bits, smallest n that has it), [rows,1] each."""
    best = tl.max(bits, 1)[:, None]
    return best, tl.min(tl.where(bits == best, n, 0x7FFFFFFF), 1)[:, None]


@triton.jit
def _successor(SCORES, j, group, best, n, own, pitch, INIT: tl.constexpr, LOCAL: tl.constexpr, RUN: tl.constexpr):
    """The best that comes after (best, n) in order of choice, among each row's group's blocks in j .. j+_SCAN-1."""
    members = tl.arange(0, _SCAN // 32)[None, :]
    member = j + group * RUN + members // RUN * (32 * RUN) + members % RUN
    bits = _free(SCORES, member, own[:, None], pitch, INIT, LOCAL)
    return _best(tl.where((bits < best) | ((bits == best) & (member > n)), bits, -1), member)


@triton.jit
def _choose(
    SCORES, CHOSEN, CU, S, offset, first, rows, sixteens, skip, sequences,
    HKV: tl.constexpr, COUNT: tl.constexpr, COUNT_P: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    SLC_BLOCK: tl.constexpr, RUN: tl.constexpr, MANY: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Selected blocks: the forced ones, and the best of the others by score.

    Grid: (tiles of ROWS queries, sequences x kv heads). A program owns ROWS queries of one kv head, which hide each
    other's latency, and writes CHOSEN [B,S,HKV,COUNT] int32, ascending, padded with -1.
    Runs of RUN neighbouring blocks are dealt to 32 groups in turn, and the best of each group is held. A turn takes the
    best of these 32, and scans only the winner's blocks for its successor. MANY: there may be more than _SCAN blocks.
    SCORES [B·HKV,rows,16·sixteens] float32, of queries first .. first+rows-1, as `_importance` writes them; VARLEN as
    there, for tiles of M queries.
    """
    LAST: tl.constexpr = 0x7FFFFFFF
    pitch = sixteens * 16  # a known multiple, for wide loads
    r, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    b, kvh = (head // HKV).to(tl.int64), head % HKV
    row0, t, ok = b * S + first, offset + first + r, r < rows
    if VARLEN:
        _, start, tokens, tile = sequence_of(CU, sequences, first + tl.program_id(0) * ROWS // M, M, 1)
        row0 = start.to(tl.int64) + tile * M - tl.program_id(0) * ROWS // M * M
        t = tile * M + r % M
        ok = (t >= skip) & (t < tokens)
    own = tl.where(ok, t // SLC_BLOCK, -1)
    SCORES += (head.to(tl.int64) * rows + r[:, None]) * pitch
    group, slot = tl.arange(0, 32)[None, :], tl.arange(0, COUNT_P)[None, :]
    held, holder = tl.full([ROWS, 32], -1, tl.int32), tl.full([ROWS, 32], LAST, tl.int32)
    last = tl.max(own, 0)
    if VARLEN:  # noqa: SIM102  a constant of the compiler and a number
        if last < 0:
            return
    for j in range(0, last + 1, 32 * RUN):
        n = j + tl.arange(0, 32 * RUN)[None, :]
        bits = tl.reshape(_free(SCORES, n, own[:, None], pitch, INIT, LOCAL), [ROWS, 32, RUN])
        best = tl.max(bits, 2)
        run = j + RUN * group
        n = tl.min(tl.where(bits == best[:, :, None], run[:, :, None] + tl.arange(0, RUN)[None, None, :], LAST), 2)
        holder = tl.where(best > held, n, holder)
        held = tl.maximum(held, best)
    FREE: tl.constexpr = COUNT - INIT - LOCAL
    initial, local = slot - FREE, own[:, None] - (COUNT - 1) + slot
    index = tl.where((slot >= FREE) & (initial < INIT) & (initial <= own[:, None]), initial, LAST)
    index = tl.where((initial >= INIT) & (slot < COUNT) & (local >= INIT), local, index)
    for turn in range(FREE):
        best, n = _best(held, holder)
        index = tl.where((slot == turn) & (best >= 0), n, index)
        winner = n // RUN % 32
        following, at = _successor(SCORES, 0, winner, best, n, own, pitch, INIT, LOCAL, RUN)
        if MANY:
            for j in range(_SCAN, last + 1, _SCAN):
                more, at_more = _successor(SCORES, j, winner, best, n, own, pitch, INIT, LOCAL, RUN)
                at = tl.where(more > following, at_more, at)
                following = tl.maximum(following, more)
        held = tl.where(group == winner, following, held)
        holder = tl.where(group == winner, at, holder)
    # Each index is stored at its rank; the rest is padding.
    rank = tl.sum((index[:, None, :] < index[:, :, None]).to(tl.int32), 2)
    found = tl.sum((index < LAST).to(tl.int32), 1)[:, None]
    at = CHOSEN + ((row0 + r[:, None]) * HKV + kvh) * COUNT
    ok = ok[:, None]
    tl.store(at + rank, index, mask=ok & (index < LAST))
    tl.store(at + slot, tl.full([ROWS, COUNT_P], -1, tl.int32), mask=ok & (slot >= found) & (slot < COUNT))


def select(q: Tensor, k_cmp: Tensor, lse: Tensor, call: Call, skip: int = 0) -> Tensor:
    """Selected blocks, int32 [B,S,HKV,slc_count]; the first `skip` rows of each sequence stay unwritten.

    Args:
        q: [B,S,HQ,D]. k_cmp: [B,N,HKV,D].
        lse: log-sum-exp of the compressed branch, float32 [B,S,HQ], base 2, from span.forward.
    """
    (batch, rows, heads, dim), kv_heads, config, offset = q.shape, k_cmp.shape[2], call.config, call.offset
    most, count, tile = config.slc_blocks(call.longest or offset + rows), config.slc_count, _importance_tile(q)
    chosen = torch.empty(batch, rows, kv_heads, count, dtype=torch.int32, device=q.device)
    # Packed sequences count chunks in tiles of `unit` rows, some of which are empty.
    unit = tile.rows if call.packed else 1
    begin, end = (0, call.tiles(rows, unit, 1)) if call.packed else (skip, rows)
    of_row = batch * kv_heads * 16 * ceil_div(most, 16)
    step = max(1, min(end - begin, _BUFFER // (4 * of_row * unit)))
    buffer = torch.empty(of_row * step * unit, dtype=torch.float32, device=q.device)

    taps = power_of_two(config.slc_block // config.cmp_stride)
    columns = max(2, tile.keys // taps)
    own_columns = columns - (config.cmp_block > config.cmp_stride)
    common = dict(HKV=kv_heads, SLC_BLOCK=config.slc_block, VARLEN=call.packed)
    sizes = dict(HQ=heads, D=dim, DP=padded(dim), M=tile.rows, BN=columns, TAPS=taps)
    sizes |= common | dict(CMP_BLOCK=config.cmp_block, STRIDE=config.cmp_stride)
    choice = common | dict(COUNT=count, COUNT_P=padded(count), INIT=config.init_blocks, LOCAL=config.local_blocks)
    choice |= dict(RUN=4 if most <= 128 else 8, MANY=most > _SCAN.value)  # few classes of lengths, each compiled once
    choice |= dict(ROWS=4, M=unit)
    for first in range(begin, end, step):
        part = min(step, end - first)
        blocks = most if call.packed else config.slc_blocks(offset + first + part)
        numbers = dict(S=rows, offset=offset, first=first, rows=part * unit, sixteens=ceil_div(blocks, 16), skip=skip)
        grid = ceil_div(part * unit, tile.rows), ceil_div(blocks, own_columns), batch * kv_heads
        tensors = dict(Q=q, K=k_cmp, LSE=lse, SCORES=buffer)
        arguments = tensors | call.bounds(q) | numbers
        arguments |= dict(N=k_cmp.shape[1], blocks=blocks, scale2=call.scale * LOG2_E)
        launch(_importance, grid, arguments, sizes, tile, stage="scores")
        grid, arguments = (ceil_div(part * unit, 4), batch * kv_heads), dict(SCORES=buffer, CHOSEN=chosen)
        launch(_choose, grid, arguments | call.bounds(buffer) | numbers, choice, Tile(warps=1), stage="topk")
    return chosen


def _importance_tile(q: Tensor) -> Tile:
    wide = padded(q.shape[-1])
    if q.itemsize == 4:
        return Tile(32, 128, 8) if wide <= 64 else Tile(16, 64, 8)
    return Tile(64, 128, 4, 2) if wide <= 128 else Tile(32, 128, 4, 1)
