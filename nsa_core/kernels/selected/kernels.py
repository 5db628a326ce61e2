# pyright: reportMissingImports=false
"""Selected attention with the keys outside: a block stays in place and meets all queries that chose it.

Only the blocks that queries choose freely are met here; those that every query selects are a span (span.py). Reading
each query's blocks anew moves n·slc_block keys a query; here a block is read once a work item and its queries, the rows
of all heads of the group, fill whole tiles. The price is a slot for each (query, free rank): the forward writes
normalised parts and their log-sum-exp, to be merged in rank order (merge.py); the backward writes the parts of dq, and
sums those of dk and dv over a block's work items in order. Queries go in chunks, which bounds the slots, and what is
written to them leaves the cache first: queries are read again by other blocks. For Hopper there are other kernels in
selected_hopper.py and selected_backward_hopper.py, which write slots in fewer bits (packed.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import NSAConfig
from ..merge import Slots
from ..plan import Part, Plan
from ..runtime.launch import launch
from ..runtime.tiles import LOG2_E, Tile, arch, ceil_div, head_sizes, padded, widest
from ..shared import hopper
from ..shared.ranges import load_rows, load_stats
from . import backward_hopper as selected_backward_hopper
from . import forward_hopper as selected_hopper
from .inverse import Inverse, work_item


@triton.jit
def _selected_forward(
    Q, K, V, OPART, LPART, ENTRIES, ITEMS, PIECES, BOUNDS,
    S, T, offset, first_row, skip, blocks, keys, cap, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SBP: tl.constexpr, FREE: tl.constexpr, MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """OPART [rows,FREE,G,DV] and LPART [rows,FREE,G] of one work item: softmax over this block alone.

    `first_row` is the number of the chunk's first row, of those that choose; each sequence has `skip` before them.
    """
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    key, begin, end = work_item(ITEMS, PIECES, BOUNDS, tl.program_id(0), keys, cap)
    if begin < end:
        n0, head = key % blocks * SB, key // blocks
        kvh, b = head % HKV, head // HKV
        n, r = tl.arange(0, SBP), tl.arange(0, M)
        d, dv = tl.arange(0, DP), tl.arange(0, DVP)
        n_ok = (n < SB) & (n0 + n < T)
        start = (b.to(tl.int64) * T + n0) * HKV + kvh
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, n_ok, True)
        v = load_rows(V + start * DV, n, HKV * DV, dv, DV, DVP, n_ok, True)
        qi, h = r // G, r % G
        # From here on rows and entries count from the chunk's first, which as a row of this sequence is s0.
        first_entry = first_row * FREE
        s0 = skip + first_row - head * (S - skip)
        Q += ((b.to(tl.int64) * S + s0) * HQ + kvh * G) * D
        t0 = offset + s0
        if AHEAD:
            following = tl.load(ENTRIES + begin + qi, mask=(qi < BQ) & (begin + qi < end), other=first_entry)
        for i in tl.range(begin, end, BQ):
            ok = (qi < BQ) & (i + qi < end)
            # What is read of q waits for its entry.
            entry = (following if AHEAD else tl.load(ENTRIES + i + qi, mask=ok, other=first_entry)) - first_entry
            row = entry // FREE
            q = load_rows(Q, row * HQ + h, D, d, D, DP, ok, True)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if MASKED:
                s = tl.where((n0 + n)[None, :] <= (t0 + row)[:, None], s, float("-inf"))
            if SB < SBP:
                s = tl.where((n < SB)[None, :], s, float("-inf"))
            m = tl.maximum(tl.max(s, 1) * scale2, -1e30)
            p = tl.exp2(s * scale2 - m[:, None])
            l = tl.sum(p, 1)
            o = tl.dot(p.to(v.dtype), v, input_precision="ieee") * (1.0 / l)[:, None]
            slot = entry * G + h
            at = OPART + slot[:, None] * DV + dv[None, :]
            inside = ok[:, None] & (dv < DV)[None, :]
            tl.store(at, o.to(OPART.dtype.element_ty), mask=inside, eviction_policy="evict_first")
            tl.store(LPART + slot, m + tl.log2(l), mask=ok)
            if AHEAD:  # last, or the turn's end waits for it
                following = tl.load(ENTRIES + i + BQ + qi, mask=(qi < BQ) & (i + BQ + qi < end), other=first_entry)


@triton.jit
def _selected_backward(
    Q, K, V, DO, STATS, DQPART, DKPART, DVPART, ENTRIES, ITEMS, PIECES, BOUNDS,
    S, T, offset, first_row, skip, blocks, keys, cap, scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SBP: tl.constexpr, FREE: tl.constexpr, MASKED: tl.constexpr,
    AHEAD: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """DQPART [rows,FREE,G,D]; DKPART, DVPART float32 [items,SB,D or DV] of one work item."""
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    item = tl.program_id(0)
    key, begin, end = work_item(ITEMS, PIECES, BOUNDS, item, keys, cap)
    if begin < end:
        n0, head = key % blocks * SB, key // blocks
        kvh, b = head % HKV, head // HKV
        n, r = tl.arange(0, SBP), tl.arange(0, M)
        d, e = tl.arange(0, DP), tl.arange(0, DVP)
        n_ok = (n < SB) & (n0 + n < T)
        start = (b.to(tl.int64) * T + n0) * HKV + kvh
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, n_ok, True)
        v = load_rows(V + start * DV, n, HKV * DV, e, DV, DVP, n_ok, True)
        dk = tl.zeros([SBP, DP], tl.float32)
        dv = tl.zeros([SBP, DVP], tl.float32)
        qi, h = r // G, r % G
        # From here on rows and entries count from the chunk's first, which as a row of this sequence is s0.
        first_entry = first_row * FREE
        s0 = skip + first_row - head * (S - skip)
        first = (b.to(tl.int64) * S + s0) * HQ + kvh * G
        Q += first * D
        DO += first * DV
        STATS += first * 2
        t0 = offset + s0
        if AHEAD:
            following = tl.load(ENTRIES + begin + qi, mask=(qi < BQ) & (begin + qi < end), other=first_entry)
        for i in tl.range(begin, end, BQ):
            ok = (qi < BQ) & (i + qi < end)
            # What is read of q waits for its entry.
            entry = (following if AHEAD else tl.load(ENTRIES + i + qi, mask=ok, other=first_entry)) - first_entry
            row = entry // FREE
            at = row * HQ + h
            q = load_rows(Q, at, D, d, D, DP, ok, True)
            do = load_rows(DO, at, DV, e, DV, DVP, ok, True)
            lse, delta = load_stats(STATS, at, ok)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - lse[None, :])
            if MASKED:
                p = tl.where((n0 + n)[:, None] <= (t0 + row)[None, :], p, 0.0)
            if SB < SBP:
                p = tl.where((n < SB)[:, None], p, 0.0)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            if TURNED:
                dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision="ieee") * scale)
            else:
                dq = tl.dot(tl.trans(ds), k, input_precision="ieee") * scale
            # Last of the products: nothing in this turn waits for these two.
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dk = tl.dot(ds, q, dk, input_precision="ieee")
            slot = entry * G + h
            to = DQPART + slot[:, None] * D + d[None, :]
            mine = ok[:, None] & (d < D)[None, :]
            tl.store(to, dq.to(DQPART.dtype.element_ty), mask=mine, eviction_policy="evict_first")
            if AHEAD:  # last, or the turn's end waits for it
                following = tl.load(ENTRIES + i + BQ + qi, mask=(qi < BQ) & (i + BQ + qi < end), other=first_entry)
        place = item.to(tl.int64) * SB + n
        inside = (n < SB)[:, None]
        tl.store(DKPART + place[:, None] * D + d[None, :], dk * scale, mask=inside & (d < D)[None, :])
        tl.store(DVPART + place[:, None] * DV + e[None, :], dv, mask=inside & (e < DV)[None, :])


@triton.jit
def _sum_items(
    DKPART, DVPART, DK, DVALUE, PIECES, T, blocks,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, SB: tl.constexpr,
    ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """DK [B,T,HKV,D] and DVALUE [..,DV] += the parts of one block's work items, for ROWS of the block's tokens."""
    key = tl.program_id(0)
    begin, end = tl.load(PIECES + key), tl.load(PIECES + key + 1)
    if begin < end:
        n0, head = key % blocks * SB, key // blocks
        kvh, b = head % HKV, head // HKV
        n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row = (b.to(tl.int64) * T + n0 + n) * HKV + kvh
        ok = (n < SB) & (n0 + n < T)
        if tl.program_id(2) == 0:
            _add_parts(DKPART, DK, begin, end, n, row, ok, D, DP, SB, UNROLL)
        else:
            _add_parts(DVPART, DVALUE, begin, end, n, row, ok, DV, DVP, SB, UNROLL)


@triton.jit
def _add_parts(
    PARTS, TOTAL, begin, end, n, row, ok, D: tl.constexpr, DP: tl.constexpr, SB: tl.constexpr, UNROLL: tl.constexpr
):
    """Rows `row` of TOTAL [.., D] += rows n of PARTS [items,SB,D], items begin..end-1 in order."""
    d = tl.arange(0, DP)
    inside = ok[:, None] & (d < D)[None, :]
    at = TOTAL + row[:, None] * D + d[None, :]
    total = tl.load(at, mask=inside, other=0.0)
    within = n[:, None] * D + d[None, :]
    for item in range(begin, end, UNROLL):
        for u in tl.static_range(UNROLL):  # loads that do not wait for each other
            part = PARTS + tl.cast(item + u, tl.int64) * (SB * D) + within
            total += tl.load(part, mask=inside & (0 * n + item + u < end)[:, None], other=0.0)
    tl.store(at, total, mask=inside)


def slot_rows(q: Tensor, kv_heads: int, dim: int, free: int) -> int:
    """Rows of a chunk, of the heads of one group, at most: slots take four times q's bytes, or less, within bounds.

    The kernels count a chunk's rows from its first, all heads of q between them, in 32 bits.
    """
    row = q.shape[2] // kv_heads * free * dim * q.itemsize
    budget = min(max(4 * q.numel() * q.itemsize, 64 << 20), 2 << 30)
    return max(1, min(budget // row, ((1 << 31) - 1) // (q.shape[2] * dim)))


def item_entries(q: Tensor, kv_heads: int, free: int, rows: int) -> int:
    """Entries of a work item: about 1024 items a chunk, each of at least 1024 rows of q."""
    group = q.shape[2] // kv_heads
    return max(ceil_div(1024, group), ceil_div(rows * free, 1024))


def is_for_hopper(q: Tensor, part: Part, config: NSAConfig, *others: Tensor) -> bool:
    """Whether the kernels for Hopper take it: bf16, and blocks of 64 keys that lie before their queries.

    Their slots are packed, which would cost fp16 exactness (packed.py).

    Args:
        others: as in hopper.fits.
    """
    is_theirs = q.dtype == torch.bfloat16 and config.slc_block == 64 and config.local_blocks > 0
    return is_theirs and hopper.fits(q, [part], *others)


def forward_chunk(q: Tensor, part: Part, slots: Slots, inverse: Inverse, chunk: int, plan: Plan) -> None:
    """Fills the slots of one chunk of choosing rows, all of them: these rows choose slc_count blocks, none is -1.

    Args:
        slots: packed if `is_for_hopper`.
    """
    tile, ahead = _forward_tile(q, part.v)
    tile = tile.holding(slots.group)
    pointers = dict(Q=q, K=part.k, V=part.v, OPART=slots.parts, LPART=slots.lse) | _index(inverse, chunk)
    numbers = _numbers(q, part, inverse, plan.offset, slots) | dict(scale2=plan.scale * LOG2_E)
    constants = _constants(q, part, tile, plan.config)
    if slots.exponents is not None:
        pointers |= dict(EXPONENTS=slots.exponents)
        selected_hopper.start((inverse.limit,), pointers | numbers, constants)
        return
    launch(_selected_forward, (inverse.limit,), pointers | numbers, constants | dict(AHEAD=ahead), tile)


def backward_chunk(
    q: Tensor, do: Tensor, part: Part, stats: Tensor, slots: Slots, totals: tuple[Tensor, Tensor],
    scratch: tuple[Tensor, Tensor], inverse: Inverse, chunk: int, plan: Plan,
) -> None:  # fmt: skip
    """Fills the slots of one chunk with parts of dq, and adds to the totals of dk and dv.

    Args:
        do: gradient [B,S,HQ,DV] of the gated sum.
        stats: of the selected branch, float32 [B,S,HQ,2] from merge.prepare.
        slots: packed if `is_for_hopper`, with `do` among the others.
        totals: float32 [B,T,HKV,D] and [B,T,HKV,DV].
        scratch: float32 [inverse.limit, slc_block, D] and [.., DV].
    """
    tile = _backward_tile(q, part.v, slots.group).holding(slots.group)
    pointers = dict(Q=q, K=part.k, V=part.v, DO=do, STATS=stats)
    pointers |= dict(DQPART=slots.parts, DKPART=scratch[0], DVPART=scratch[1]) | _index(inverse, chunk)
    numbers = _numbers(q, part, inverse, plan.offset, slots) | dict(scale2=plan.scale * LOG2_E, scale=plan.scale)
    wide = widest(q, part.v)
    # Hopper's matrix instructions take 64 rows at least: D of them, where a tile has fewer. Not for wide heads, whose
    # 8 warps Triton 3.6 leads to an illegal memory access there.
    turned = wide == 128 and tile.rows < 64 <= padded(q.shape[-1]) and q.itemsize < 4
    # Entries read a turn ahead take registers that wide heads do not have.
    ways = dict(AHEAD=wide <= 128, TURNED=turned)
    constants = _constants(q, part, tile, plan.config)
    if slots.exponents is not None:
        pointers |= dict(EXPONENTS=slots.exponents)
        selected_backward_hopper.start((inverse.limit,), pointers | numbers, constants)
    else:
        launch(_selected_backward, (inverse.limit,), pointers | numbers, constants | ways, tile)
    _add_items(scratch, totals, inverse, chunk, plan.config)


def _add_items(
    scratch: tuple[Tensor, Tensor], totals: tuple[Tensor, Tensor], inverse: Inverse, chunk: int, config: NSAConfig
) -> None:
    """Sums the parts of every block's work items in order."""
    pointers = dict(DKPART=scratch[0], DVPART=scratch[1], DK=totals[0], DVALUE=totals[1], PIECES=inverse.pieces[chunk])
    numbers = dict(T=totals[0].shape[1], blocks=inverse.blocks)
    (kv_heads, dim), value_dim = totals[0].shape[2:], totals[1].shape[3]
    dims = dict(HKV=kv_heads, D=dim, DV=value_dim, DP=padded(dim), DVP=padded(value_dim))
    sizes = dims | dict(SB=config.slc_block, ROWS=16, UNROLL=4)
    grid = inverse.keys, ceil_div(config.slc_block, 16), 2
    launch(_sum_items, grid, pointers | numbers, sizes, Tile(warps=4))


def _index(inverse: Inverse, chunk: int) -> dict[str, Tensor]:
    bounds = inverse.bounds[chunk * inverse.keys :]
    return dict(ENTRIES=inverse.entries, ITEMS=inverse.items[chunk], PIECES=inverse.pieces[chunk], BOUNDS=bounds)


def _numbers(q: Tensor, part: Part, inverse: Inverse, offset: int, slots: Slots) -> dict[str, int]:
    sizes = dict(S=q.shape[1], T=part.k.shape[1], offset=offset)
    rows = dict(first_row=slots.rows.first, skip=slots.rows.begin)
    return sizes | rows | dict(blocks=inverse.blocks, keys=inverse.keys, cap=inverse.cap)


def _constants(q: Tensor, part: Part, tile: Tile, config: NSAConfig) -> dict[str, int]:
    block = dict(SB=config.slc_block, SBP=padded(config.slc_block), FREE=config.free_blocks)
    # A free block lies before the local ones, and so wholly before the query.
    return head_sizes(q, part.v) | block | dict(M=tile.rows, MASKED=config.local_blocks == 0)


def _forward_tile(q: Tensor, v: Tensor) -> tuple[Tile, bool]:
    """With whether entries are read a turn ahead, which takes registers and shared memory."""
    wide = widest(q, v)
    if q.itemsize == 4:
        return Tile(16, warps=8), False
    if wide > 128:
        return Tile(64, warps=8), False
    if arch(q) < 90:
        return Tile(64, warps=4, stages=3), False
    if wide <= 64:
        return Tile(64, warps=4, stages=3, registers=128), True
    return Tile(64, warps=4, stages=4), True


def _backward_tile(q: Tensor, v: Tensor, group: int) -> Tile:
    wide = widest(q, v)
    if q.itemsize == 4:
        return Tile(16, warps=8 if wide <= 128 else 16)
    if wide > 128:
        return Tile(16, warps=8)
    if arch(q) < 90:
        return Tile(32, warps=4) if wide <= 64 else Tile(64, warps=8)
    if wide <= 64:
        return Tile(64, warps=4, stages=3)
    return Tile(32, warps=4, stages=4 if group > 8 else 3)
