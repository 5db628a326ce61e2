# pyright: reportMissingImports=false
"""Attention over the freely chosen blocks, backward, for Hopper (sm90): one warpgroup loads, two compute.

The loading warpgroup gathers the tiles of the queries that chose a block; the two others compute on alternate tiles and
accumulate gradients of keys and values each. At the end the second hands its sums to the first through the output's
memory. Slots are packed (shared/packed_slots.py). All other cards and cases: kernels.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..runtime.tiles import Tile
from ..shared import hopper
from ..shared.hopper import COPY_REGISTERS, ROWS, THREADS, anew, barrier, copy_rows, product, ring, tiles_of_rows, wait
from ..shared.packed_slots import store_packed
from ..shared.ranges import block_of_keys
from .forward_hopper import by_entry, by_rows, of_each_row
from .inverse import PARTS_OF_INDEX, work_item

# Triton 3.9 hoists a range and its sums with constants out of the loop in spite of `anew`.
_HOISTS = gl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))
_WARPGROUPS = gl.constexpr(2)  # consumers
_TILE = Tile(ROWS.value, 64, warps=4, stages=5, registers=168)
_REGISTERS = 232  # per consumer thread


@gluon.jit
def _produce(
    Q, K, V, DO, STATS, ENTRIES, begin, end, first_entry, block, block_full, rows,
    HQ: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, FREE: gl.constexpr,
):  # fmt: skip
    """Producer: copies the block's keys and values, then q, do and stats of its queries by tiles.

    The last tile is padded with its last entry.
    """
    queries, gradients, stats, full, empty = rows
    keys, values = block.index(0), block.index(1)
    STAGES: gl.constexpr = queries.shape[0]
    D: gl.constexpr = queries.shape[2]
    BQ: gl.constexpr = ROWS // G
    COPY: gl.constexpr = by_rows(D)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    at = n[:, None] * (HKV * D) + d[None, :]
    copy_rows(keys, K + at)
    copy_rows(values, V + at)
    async_copy.mbarrier_arrive(block_full, increment_count=False)
    qi, r = gl.arange(0, BQ, layout=gl.SliceLayout(1, by_entry(D, G))), gl.arange(0, ROWS, layout=ONE)
    following = gl.load(ENTRIES + gl.minimum(begin + qi, end - 1))
    of_stats = gl.load(ENTRIES + gl.minimum(begin + r // G, end - 1))
    for g in range(gl.cdiv(end - begin, BQ)):
        row = of_each_row((following - first_entry) // FREE, G, D)
        at_stats = ((of_stats - first_entry) // FREE * HQ + r % G) * 2
        i = begin + (g + 1) * BQ
        following = gl.load(ENTRIES + gl.minimum(i + qi, end - 1))
        of_stats = gl.load(ENTRIES + gl.minimum(i + r // G, end - 1))
        first, at = row.to(gl.int64) * (HQ * D), (n % G * D)[:, None] + d[None, :]
        wait(empty, g, 1)
        copy_rows(queries.index(g % STAGES), (Q + first)[:, None] + at)
        copy_rows(gradients.index(g % STAGES), (DO + first)[:, None] + at)
        copy_rows(stats.index(g % STAGES * 2), STATS + at_stats)
        copy_rows(stats.index(g % STAGES * 2 + 1), STATS + 1 + at_stats)
        async_copy.mbarrier_arrive(full.index(g % STAGES), increment_count=False)


@triton.constexpr_function
def _eights():
    """Layout of a tile's rows as [8,8], distributed over threads as the columns of a product are."""
    in_thread = [[0, 1], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(in_thread, [[0, 2], [0, 4], *[[0, 0]] * 3], [[0, 0]] * 2, [], [8, 8])


@gluon.jit
def _rows(LAYOUT: gl.constexpr):
    """A tile's rows, recomputed where they are used.

    Triton that hoists ranges would spill 64 of them; of a hoisted range of 8 the sums are computed here.
    """
    if _HOISTS:
        EIGHTS: gl.constexpr = _eights()
        eight = gl.arange(0, 8, layout=gl.SliceLayout(1, EIGHTS))[:, None]
        rows = (eight * 8 + anew(gl.arange(0, 8, layout=gl.SliceLayout(0, EIGHTS)))[None, :]).reshape([ROWS])
        rows = gl.convert_layout(rows, LAYOUT)
    else:
        rows = anew(gl.arange(0, ROWS, layout=LAYOUT))
    return rows


@gluon.jit
def _consume(
    group, DQPART, EXPONENTS, DKPART, DVPART, ENTRIES, begin, end, first_entry, scale2, scale, block, block_full,
    rows, mine, handed, G: gl.constexpr,
):  # fmt: skip
    """Consumer: fills the slots of every second tile of queries, from tile `group` on; group 0 stores dk and dv."""
    queries, gradients, stats, full, empty = rows
    STAGES: gl.constexpr = queries.shape[0]
    DTYPE: gl.constexpr = queries.dtype
    D: gl.constexpr = queries.shape[2]
    BN: gl.constexpr = block.shape[1]
    BQ: gl.constexpr = ROWS // G
    SCORES: gl.constexpr = product(ROWS)
    SUMS: gl.constexpr = product(D)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    zero = gl.full([BN, ROWS], 0.0, gl.float32, SCORES)
    dk, dv = gl.full([BN, D], 0.0, gl.float32, SUMS), gl.full([BN, D], 0.0, gl.float32, SUMS)
    no_dq = gl.full([ROWS, D], 0.0, gl.float32, SUMS)
    mbarrier.wait(block_full, 0)
    fence_async_shared()
    for g in range(group, gl.cdiv(end - begin, BQ), _WARPGROUPS):
        i = begin + g * BQ
        wait(full, g, 0)
        fence_async_shared()  # makes the copies visible to the matrix instructions
        q, do = queries.index(g % STAGES), gradients.index(g % STAGES)
        # Recomputed in every iteration: loop-invariant descriptors would be kept in registers, and spilled.
        first = anew(group * 0)
        keys, values, ds_buffer = block.index(first), block.index(first + 1), mine.index(group + first)
        s = warpgroup_mma(keys, q.permute([1, 0]), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(values, do.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * scale2 - stats.index(g % STAGES * 2).load(ROW)[None, :])
        if i + BQ > end:
            p = gl.where((i + _rows(ROW) // G < end)[None, :], p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds_buffer.store((p * (dp - stats.index(g % STAGES * 2 + 1).load(ROW)[None, :])).to(DTYPE))
        fence_async_shared()
        p = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, SUMS, 2))
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        entry = gl.load(ENTRIES + gl.minimum(i + r // G, end - 1))
        dv = warpgroup_mma(p, do, dv, is_async=True)
        dk = warpgroup_mma(ds_buffer, q, dk, is_async=True)
        dv, dk, p = warpgroup_mma_wait(0, deps=[dv, dk, p])
        mbarrier.arrive(empty.index(g % STAGES), count=1)
        dq = warpgroup_mma(ds_buffer.permute([1, 0]), keys, no_dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        factor = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SUMS)) + scale
        store_packed(dq, factor, DQPART, EXPONENTS, (entry - first_entry) * G + r % G, i + r // G < end)
    n, e = gl.arange(0, BN, layout=gl.SliceLayout(1, SUMS)), gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
    at = n[:, None] * D + e[None, :]
    if group == 0:  # the other's sums are in the output's memory
        mbarrier.wait(handed, 0)
        dk += gl.load(DKPART + at)
        dv += gl.load(DVPART + at)
        dk *= scale
    gl.store(DKPART + at, dk)
    gl.store(DVPART + at, dv)
    if group == 1:
        mbarrier.arrive(handed, count=1)  # by one thread, behind a barrier of the warpgroup


@gluon.jit(do_not_specialize_on_alignment=PARTS_OF_INDEX)
def _selected_backward_hopper(
    Q, K, V, DO, STATS, DQPART, EXPONENTS, DKPART, DVPART, ENTRIES, ITEMS, PIECES, BOUNDS, CU,
    S, T, first_row, skip, blocks, keys, cap, sequences, scale2, scale,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, SB: gl.constexpr, FREE: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Gradients of one block that queries chose, which lies wholly before them, and of these queries through it.

    Grid: (work items of a chunk,). A program owns one block of one kv head and up to `cap` of the entries (row, rank)
    that chose it, 64 // G entries per tile with all G heads of the group. It writes each entry's part of dq to its
    slot, packed: DQPART int32 [rows,FREE,G,WORDS] and EXPONENTS int32 [rows,FREE,G]; and the item's parts of dk and dv
    to DKPART, DVPART [items,SB,D], float32.
    Q, DO [B,S,HQ,D]; K, V [B,T,HKV,D]; others as in kernels._selected_backward.
    """
    G: gl.constexpr = HQ // HKV
    DTYPE: gl.constexpr = Q.dtype.element_ty
    item = gl.program_id(0)
    key, begin, end = work_item(ITEMS, PIECES, BOUNDS, item, keys, cap)
    if begin < end:
        head, kvh, key0, n0, _, _ = block_of_keys(CU, sequences, key, blocks, T, HKV, SB, VARLEN)
        b, start = head // HKV, ((key0 + n0) * HKV + kvh) * D
        # From here on rows and entries count from the chunk's first row, as in kernels.py.
        first_entry = first_row * FREE
        first = (b.to(gl.int64) * S + skip + first_row - head * (S - skip)) * HQ + kvh * G
        Q += first * D
        DO += first * D
        STATS += first * 2
        K += start
        V += start
        DKPART += item.to(gl.int64) * (SB * D)
        DVPART += item.to(gl.int64) * (SB * D)
        BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SB, D], DTYPE)
        block = gl.allocate_shared_memory(DTYPE, [2, SB, D], BLOCK)  # keys and values
        block_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(block_full, count=THREADS)
        mbarrier.init(handed, count=1)
        queries, full, empty = ring(ROWS, D, DTYPE, STAGES, THREADS, 1)
        gradients = tiles_of_rows(STAGES, D, DTYPE)
        stats = gl.allocate_shared_memory(gl.float32, [STAGES * 2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        mine = gl.allocate_shared_memory(
            DTYPE, [_WARPGROUPS, SB, ROWS], gl.NVMMASharedLayout.get_default_for([SB, ROWS], DTYPE)
        )
        fence_async_shared()
        barrier()
        rows = (queries, gradients, stats, full, empty)
        group0 = S * 0
        group1 = group0 + 1
        gl.warp_specialize([
            (_consume, (group0, DQPART, EXPONENTS, DKPART, DVPART, ENTRIES, begin, end, first_entry, scale2, scale,
                        block, block_full, rows, mine, handed, G)),
            (_consume, (group1, DQPART, EXPONENTS, DKPART, DVPART, ENTRIES, begin, end, first_entry, scale2, scale,
                        block, block_full, rows, mine, handed, G)),
            (_produce, (Q, K, V, DO, STATS, ENTRIES, begin, end, first_entry, block, block_full, rows,
                        HQ, HKV, G, FREE)),
        ], [4, 4], [REGISTERS, COPY_REGISTERS])  # fmt: skip


def start(grid: tuple[int, ...], arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Launch `_selected_backward_hopper`.

    Args:
        arguments, sizes: those of kernels._selected_backward, and EXPONENTS; names that this kernel lacks are dropped.
    """
    hopper.start(_selected_backward_hopper, grid, arguments, sizes, _TILE, _REGISTERS, stage="selected_backward")
