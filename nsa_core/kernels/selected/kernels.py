# pyright: reportMissingImports=false
"""Attention over the freely chosen blocks, both directions, for all cards: a block meets the queries that chose it.

Blocks that every query selects are a span (span/forward.py). Reading each query's blocks anew moves n · slc_block keys
per query; here a block is read once per work item, and its queries, with all heads of the group, fill whole tiles. The
price is a slot for each (query, free rank): the forward writes normalised outputs and their log-sum-exps, merged in
rank order by merge.py; the backward writes parts of dq, and sums parts of dk and dv over a block's work items in order.
Queries go in chunks, which bounds the slots. Slots are stored evict-first, so that queries, which other blocks read
again, stay in the cache. Hopper has kernels of its own (selected_hopper.py), whose slots are packed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import NSAConfig
from ..call import Call, Part
from ..merge import Slots
from ..runtime.launch import launch
from ..runtime.tiles import LOG2_E, Tile, arch, ceil_div, head_sizes, padded, widest
from ..shared import hopper
from ..shared.ranges import block_of_keys, load_rows, load_stats
from . import selected_hopper
from .inverse import PARTS_OF_INDEX, Inverse, work_item


@triton.jit(do_not_specialize_on_alignment=PARTS_OF_INDEX)
def _selected_forward(
    Q, K, V, OPART, LPART, ENTRIES, ITEMS, PIECES, BOUNDS, CU,
    S, T, offset, first_row, skip, blocks, keys, cap, sequences, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SBP: tl.constexpr, FREE: tl.constexpr, MASKED: tl.constexpr,
    AHEAD: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Softmax of queries over one block that they chose.

    Grid: (work items of a chunk,). A program owns one block of one kv head and up to `cap` of the entries (row, rank)
    that chose it, M // G entries per tile with all G heads of the group. It writes each entry's slot: OPART
    [rows,FREE,G,DV] and the base-2 log-sum-exp LPART [rows,FREE,G], float32.
    Q [B,S,HQ,D]; K, V [B,T,HKV,D or DV]; ENTRIES, ITEMS, PIECES, BOUNDS: see `Inverse`. Choosing rows are numbered over
    sequences and kv heads, without the first `skip` rows of each; the chunk's first is `first_row`. MASKED: a block may
    hold keys behind the query. AHEAD: entries are loaded an iteration ahead. VARLEN: sequences are packed, with bounds
    CU and blocks as in ranges.sequence_of; B is 1 and all rows are numbered.
    """
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    key, begin, end = work_item(ITEMS, PIECES, BOUNDS, tl.program_id(0), keys, cap)
    if begin < end:
        head, kvh, key0, n0, T, before = block_of_keys(CU, sequences, key, blocks, T, HKV, SB, VARLEN)
        b = head // HKV
        n, r = tl.arange(0, SBP), tl.arange(0, M)
        d, dv = tl.arange(0, DP), tl.arange(0, DVP)
        n_ok = (n < SB) & (n0 + n < T)
        start = (key0 + n0) * HKV + kvh
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, n_ok, True)
        v = load_rows(V + start * DV, n, HKV * DV, dv, DV, DVP, n_ok, True)
        qi, h = r // G, r % G
        # From here on rows and entries count from the chunk's first row, which is row s0 of this sequence.
        first_entry = first_row * FREE
        s0 = skip + first_row - head * (S - skip)
        Q += ((b.to(tl.int64) * S + s0) * HQ + kvh * G) * D
        t0 = offset + s0 - before
        if AHEAD:
            following = tl.load(ENTRIES + begin + qi, mask=(qi < BQ) & (begin + qi < end), other=first_entry)
        for i in tl.range(begin, end, BQ):
            ok = (qi < BQ) & (i + qi < end)
            # The loads of q wait for the entry.
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
            if AHEAD:  # last: the end of the iteration would wait for it
                following = tl.load(ENTRIES + i + BQ + qi, mask=(qi < BQ) & (i + BQ + qi < end), other=first_entry)


@triton.jit(do_not_specialize_on_alignment=PARTS_OF_INDEX)
def _selected_backward(
    Q, K, V, DO, STATS, DQPART, DKPART, DVPART, ENTRIES, ITEMS, PIECES, BOUNDS, CU,
    S, T, offset, first_row, skip, blocks, keys, cap, sequences, scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SBP: tl.constexpr, FREE: tl.constexpr, MASKED: tl.constexpr,
    AHEAD: tl.constexpr, TURNED: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Gradients of one block that queries chose, and of these queries through it.

    Grid: (work items of a chunk,). A program owns one block of one kv head and up to `cap` of the entries (row, rank)
    that chose it, M // G entries per tile with all G heads of the group. It writes each entry's part of dq to its slot
    in DQPART [rows,FREE,G,D], and the item's parts of dk and dv to DKPART, DVPART [items,SB,D or DV], float32.
    Q [B,S,HQ,D]; DO [B,S,HQ,DV]; STATS [B,S,HQ,2], float32, from merge._prepare; others as in _selected_forward.
    TURNED: dq is computed transposed.
    """
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    item = tl.program_id(0)
    key, begin, end = work_item(ITEMS, PIECES, BOUNDS, item, keys, cap)
    if begin < end:
        head, kvh, key0, n0, T, before = block_of_keys(CU, sequences, key, blocks, T, HKV, SB, VARLEN)
        b = head // HKV
        n, r = tl.arange(0, SBP), tl.arange(0, M)
        d, e = tl.arange(0, DP), tl.arange(0, DVP)
        n_ok = (n < SB) & (n0 + n < T)
        start = (key0 + n0) * HKV + kvh
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, n_ok, True)
        v = load_rows(V + start * DV, n, HKV * DV, e, DV, DVP, n_ok, True)
        dk = tl.zeros([SBP, DP], tl.float32)
        dv = tl.zeros([SBP, DVP], tl.float32)
        qi, h = r // G, r % G
        # From here on rows and entries count from the chunk's first row, which is row s0 of this sequence.
        first_entry = first_row * FREE
        s0 = skip + first_row - head * (S - skip)
        first = (b.to(tl.int64) * S + s0) * HQ + kvh * G
        Q += first * D
        DO += first * DV
        STATS += first * 2
        t0 = offset + s0 - before
        if AHEAD:
            following = tl.load(ENTRIES + begin + qi, mask=(qi < BQ) & (begin + qi < end), other=first_entry)
        for i in tl.range(begin, end, BQ):
            ok = (qi < BQ) & (i + qi < end)
            # The loads of q wait for the entry.
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
            # The products of dv and dk come last: nothing in this iteration waits for them.
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dk = tl.dot(ds, q, dk, input_precision="ieee")
            slot = entry * G + h
            to = DQPART + slot[:, None] * D + d[None, :]
            mine = ok[:, None] & (d < D)[None, :]
            tl.store(to, dq.to(DQPART.dtype.element_ty), mask=mine, eviction_policy="evict_first")
            if AHEAD:  # last: the end of the iteration would wait for it
                following = tl.load(ENTRIES + i + BQ + qi, mask=(qi < BQ) & (i + BQ + qi < end), other=first_entry)
        place = item.to(tl.int64) * SB + n
        inside = (n < SB)[:, None]
        tl.store(DKPART + place[:, None] * D + d[None, :], dk * scale, mask=inside & (d < D)[None, :])
        tl.store(DVPART + place[:, None] * DV + e[None, :], dv, mask=inside & (e < DV)[None, :])


@triton.jit(do_not_specialize_on_alignment=PARTS_OF_INDEX)
def _sum_items(
    DKPART, DVPART, DK, DVALUE, PIECES, CU, T, blocks, sequences,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, SB: tl.constexpr,
    ROWS: tl.constexpr, UNROLL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Adds the parts of one block's work items, in order.

    Grid: (blocks of all sequences and kv heads, tokens of a block / ROWS, 2). A program owns ROWS tokens of one block,
    their keys or, on the last axis's second place, their values; it adds to DK [B,T,HKV,D] or DVALUE [B,T,HKV,DV],
    float32. DKPART [items,SB,D], DVPART [items,SB,DV], float32; PIECES [keys + 1], work items before each block.
    """
    key = tl.program_id(0)
    begin, end = tl.load(PIECES + key), tl.load(PIECES + key + 1)
    if begin < end:
        _, kvh, key0, n0, T, _ = block_of_keys(CU, sequences, key, blocks, T, HKV, SB, VARLEN)
        n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row = (key0 + n0 + n) * HKV + kvh
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
        for u in tl.static_range(UNROLL):  # independent loads
            part = PARTS + tl.cast(item + u, tl.int64) * (SB * D) + within
            total += tl.load(part, mask=inside & (0 * n + item + u < end)[:, None], other=0.0)
    tl.store(at, total, mask=inside)


def is_for_hopper(q: Tensor, part: Part, config: NSAConfig, *others: Tensor) -> bool:
    """Whether the kernels for Hopper take these: bf16, and free blocks of 64 keys wholly before their queries.

    Their slots are packed, so fp16 is left out, for which these are less exact (shared/packed_slots.py).

    Args:
        others: further tensors that the kernel reads, as in hopper.fits.
    """
    packs = q.dtype == torch.bfloat16 and config.slots == "packed"
    return packs and config.slc_block == 64 and config.local_blocks > 0 and hopper.fits(q, [part], *others)


def forward_chunk(q: Tensor, part: Part, slots: Slots, inverse: Inverse, chunk: int, call: Call) -> None:
    """Fill all slots of one chunk of choosing rows, each of which chose slc_count blocks, none -1.

    Args:
        slots: packed if `is_for_hopper`.
    """
    tile, ahead = _forward_tile(q, part.v)
    tile = tile.holding(q.shape[2] // part.k.shape[2])
    common, constants = _of_chunk(q, part, slots, inverse, chunk, tile, call)
    arguments = dict(Q=q, K=part.k, V=part.v, OPART=slots.parts, LPART=slots.lse) | common
    if slots.exponents is not None:
        arguments |= dict(EXPONENTS=slots.exponents)
        hopper.start(selected_hopper.FORWARD, (inverse.limit,), arguments, constants, stage="selected")
    else:
        constants |= dict(AHEAD=ahead)
        launch(_selected_forward, (inverse.limit,), arguments, constants, tile, stage="selected")


def backward_chunk(
    q: Tensor, do: Tensor, part: Part, stats: Tensor, slots: Slots, totals: tuple[Tensor, Tensor] | None,
    scratch: tuple[Tensor, Tensor], inverse: Inverse, chunk: int, call: Call,
) -> None:  # fmt: skip
    """Fill the slots of one chunk with parts of dq, and add its gradients of keys and values to `totals`.

    Args:
        do: gradient of the gated sum, [B,S,HQ,DV].
        stats: the selected branch's, from merge.prepare, float32 [B,S,HQ,2].
        slots: packed if `is_for_hopper`, with `do` among the others.
        totals: gradients of keys [B,T,HKV,D] and values [B,T,HKV,DV], float32; None if they are not needed.
        scratch: parts of each work item, float32 [inverse.limit,slc_block,D] and [inverse.limit,slc_block,DV].
    """
    group, wide, block = q.shape[2] // part.k.shape[2], widest(q, part.v), call.config.slc_block
    tile = _backward_tile(q, part.v, group).holding(group)
    common, constants = _of_chunk(q, part, slots, inverse, chunk, tile, call)
    arguments = dict(Q=q, K=part.k, V=part.v, DO=do, STATS=stats) | common
    arguments |= dict(DQPART=slots.parts, DKPART=scratch[0], DVPART=scratch[1], scale=call.scale)
    if slots.exponents is not None:
        arguments |= dict(EXPONENTS=slots.exponents)
        hopper.start(selected_hopper.BACKWARD, (inverse.limit,), arguments, constants, stage="selected_backward")
    else:
        # Hopper's matrix instructions need 64 rows: transposed, dq has D of them where a tile has fewer. Not for wide
        # heads, with whose 8 warps Triton 3.6 makes an illegal memory access.
        turned = wide == 128 and tile.rows < 64 <= padded(q.shape[-1]) and q.itemsize < 4
        # Entries loaded an iteration ahead take registers that wide heads do not have.
        constants |= dict(AHEAD=wide <= 128, TURNED=turned)
        launch(_selected_backward, (inverse.limit,), arguments, constants, tile, stage="selected_backward")
    if totals is not None:
        arguments = dict(DKPART=scratch[0], DVPART=scratch[1], DK=totals[0], DVALUE=totals[1])
        arguments |= dict(PIECES=inverse.pieces[chunk], T=part.k.shape[1], blocks=inverse.blocks)
        constants = head_sizes(q, part.v) | dict(SB=block, ROWS=16, UNROLL=4, VARLEN=call.packed)
        del constants["HQ"]
        grid = inverse.keys, ceil_div(block, 16), 2
        arguments |= call.bounds(totals[0])
        launch(_sum_items, grid, arguments, constants, Tile(warps=4), stage="sum_items_backward")


def _of_chunk(
    q: Tensor, part: Part, slots: Slots, inverse: Inverse, chunk: int, tile: Tile, call: Call
) -> tuple[dict[str, Any], dict[str, int]]:
    """Kernel arguments (one chunk's part of the inverse, sizes and the scale, base 2) and constants."""
    config, bounds = call.config, inverse.bounds[chunk * inverse.keys :]
    index = dict(ENTRIES=inverse.entries, ITEMS=inverse.items[chunk], PIECES=inverse.pieces[chunk], BOUNDS=bounds)
    sizes = dict(S=q.shape[1], T=part.k.shape[1], offset=call.offset, first_row=slots.rows.first)
    sizes |= dict(skip=slots.rows.begin, blocks=inverse.blocks, keys=inverse.keys, cap=inverse.cap)
    block = dict(VARLEN=call.packed, SB=config.slc_block, SBP=padded(config.slc_block), FREE=config.free_blocks)
    # With local blocks, free ones lie wholly before the query and need no mask.
    constants = head_sizes(q, part.v) | block | dict(M=tile.rows, MASKED=config.local_blocks == 0)
    return index | call.bounds(q) | sizes | dict(scale2=call.scale * LOG2_E), constants


def _forward_tile(q: Tensor, v: Tensor) -> tuple[Tile, bool]:
    """(tile, whether entries are loaded an iteration ahead, which takes registers and shared memory)."""
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
        return Tile(32, warps=4) if wide <= 64 and group <= 64 else Tile(64, warps=8)
    if wide <= 64:
        return Tile(64, warps=4, stages=3)
    if group > 32:  # a tile holds a group: more stages would not fit
        return Tile(64, warps=8, stages=2)
    return Tile(32, warps=4, stages=4 if group > 8 else 3)
