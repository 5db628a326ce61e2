# pyright: reportMissingImports=false
"""Attention over the freely chosen blocks, both directions, for Hopper (sm90): one warpgroup loads, others compute.

The loading warpgroup gathers the tiles of the queries that chose a block; the others, three forward and two backward,
compute on alternate tiles (shared/hopper.py). Backward each accumulates gradients of keys and values; at the end the
second hands its sums to the first through the output's memory. Slots are packed (shared/packed_slots.py). All other
cards and cases: kernels.py.
"""

from __future__ import annotations

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
from ..shared.hopper import (
    COPY_REGISTERS,
    ROWS,
    THREADS,
    anew,
    barrier,
    by_eights,
    copy_rows,
    product,
    ring,
    tiles_of_rows,
    wait,
)
from ..shared.packed_slots import store_packed
from ..shared.ranges import block_of_keys
from .inverse import PARTS_OF_INDEX, work_item

_FORWARD_GROUPS, _BACKWARD_GROUPS = gl.constexpr(3), gl.constexpr(2)  # warpgroups that consume
# Triton 3.9 hoists a range and its sums with constants out of the loop in spite of `anew`.
_HOISTS = gl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))
# Layout of a tile's rows as [8,8], distributed over threads as the columns of a product are.
_EIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0]], [[0, 2], [0, 4], *[[0, 0]] * 3], [[0, 0]] * 2, [], [8, 8]
    )
)


@triton.constexpr_function
def _by_rows(dim):
    """Layout in which 64 rows of `dim` half-precision numbers are copied: per thread 16 bytes of 8 adjacent rows."""
    lanes = dim // 8
    return gl.BlockedLayout([8, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@triton.constexpr_function
def _by_entry(dim, group):
    """Layout of the rows of `_by_rows` as [entries, heads of the group]: a thread holds each entry of its rows once."""
    lanes = (dim // 8).bit_length() - 1
    bits = [[0, 1 << bit] if 1 << bit < group else [(1 << bit) // group, 0] for bit in range(6)]
    in_warp = [[0, 0]] * lanes + bits[3 : 8 - lanes]
    return gl.DistributedLinearLayout(bits[:3], in_warp, bits[8 - lanes :], [], [64 // group, group])


@gluon.jit
def _of_each_row(x, G: gl.constexpr, D: gl.constexpr):
    """Broadcast a number per entry, in layout `_by_entry`, to the entry's rows, in layout `_by_rows`."""
    x = (x[:, None] + gl.full([ROWS // G, G], 0, gl.int32, _by_entry(D, G))).reshape([ROWS])
    return gl.convert_layout(x, gl.SliceLayout(1, _by_rows(D)))


@gluon.jit
def _produce_forward(
    Q, K, V, ENTRIES, begin, end, first_entry, keys, values, block_full, rows,
    HQ: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, FREE: gl.constexpr,
):  # fmt: skip
    """Producer: copies the block's keys and values, then its queries by tiles, the last padded with its last entry."""
    queries, full, empty = rows
    STAGES: gl.constexpr = queries.shape[0]
    D: gl.constexpr = queries.shape[2]
    BQ: gl.constexpr = ROWS // G
    COPY: gl.constexpr = _by_rows(D)
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    at = n[:, None] * (HKV * D) + d[None, :]
    copy_rows(keys, K + at)
    copy_rows(values, V + at)
    async_copy.mbarrier_arrive(block_full, increment_count=False)
    qi = gl.arange(0, BQ, layout=gl.SliceLayout(1, _by_entry(D, G)))
    following = gl.load(ENTRIES + gl.minimum(begin + qi, end - 1))
    for g in range(gl.cdiv(end - begin, BQ)):
        row = _of_each_row((following - first_entry) // FREE, G, D)
        following = gl.load(ENTRIES + gl.minimum(begin + (g + 1) * BQ + qi, end - 1))
        wait(empty, g, 1)
        copy_rows(queries.index(g % STAGES), Q + ((row * HQ + n % G) * D)[:, None] + d[None, :])
        async_copy.mbarrier_arrive(full.index(g % STAGES), increment_count=False)


@gluon.jit
def _consume_forward(
    group, OPART, EXPONENTS, LPART, ENTRIES, begin, end, first_entry, scale2, keys, values, block_full, rows,
    G: gl.constexpr,
):  # fmt: skip
    """Consumer: fills the slots of every third tile of queries, from tile `group` on."""
    queries, full, empty = rows
    STAGES: gl.constexpr = queries.shape[0]
    D: gl.constexpr = queries.shape[2]
    BN: gl.constexpr = keys.shape[0]
    BQ: gl.constexpr = ROWS // G
    SCORES: gl.constexpr = product(BN)
    SUMS: gl.constexpr = product(D)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    no_scores, no_sums = gl.full([ROWS, BN], 0.0, gl.float32, SCORES), gl.full([ROWS, D], 0.0, gl.float32, SUMS)
    r = gl.arange(0, ROWS, layout=ROW)
    mbarrier.wait(block_full, 0)
    fence_async_shared()
    for g in range(group, gl.cdiv(end - begin, BQ), _FORWARD_GROUPS):
        i = begin + g * BQ + r // G
        slot = (gl.load(ENTRIES + gl.minimum(i, end - 1)) - first_entry) * G + r % G
        wait(full, g, 0)
        fence_async_shared()  # makes the copies visible to the matrix instructions
        s = warpgroup_mma(queries.index(g % STAGES), keys.permute([1, 0]), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(g % STAGES), count=1)
        m = gl.maximum(gl.convert_layout(gl.max(gl.max(by_eights(s), 1), 1), ROW) * scale2, -1e30)
        p = gl.exp2(s * scale2 - m[:, None])
        l = gl.convert_layout(gl.sum(gl.sum(by_eights(p), 1), 1), ROW)
        p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, SUMS, 2))
        o = warpgroup_mma(p, values, no_sums, use_acc=False, is_async=True)
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        store_packed(o, 1.0 / l, OPART, EXPONENTS, slot, i < end)
        gl.store(LPART + slot, m + gl.log2(l), mask=i < end)


@gluon.jit(do_not_specialize_on_alignment=PARTS_OF_INDEX)
def _selected_forward_hopper(
    Q, K, V, OPART, EXPONENTS, LPART, ENTRIES, ITEMS, PIECES, BOUNDS, CU,
    S, T, first_row, skip, blocks, keys, cap, sequences, scale2,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, SB: gl.constexpr, FREE: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Softmax of queries over one block that they chose, which lies wholly before them.

    Grid: (work items of a chunk,). A program owns one block of one kv head and up to `cap` of the entries (row, rank)
    that chose it, 64 // G entries per tile with all G heads of the group. It writes each entry's slot, packed: OPART
    int32 [rows,FREE,G,WORDS], EXPONENTS int32 [rows,FREE,G], and the base-2 log-sum-exp LPART [rows,FREE,G], float32.
    Q [B,S,HQ,D]; K, V [B,T,HKV,D]; others as in kernels._selected_forward.
    """
    G: gl.constexpr = HQ // HKV
    DTYPE: gl.constexpr = Q.dtype.element_ty
    key, begin, end = work_item(ITEMS, PIECES, BOUNDS, gl.program_id(0), keys, cap)
    if begin < end:
        head, kvh, key0, n0, _, _ = block_of_keys(CU, sequences, key, blocks, T, HKV, SB, VARLEN)
        b, start = head // HKV, ((key0 + n0) * HKV + kvh) * D
        # From here on rows and entries count from the chunk's first row, as in kernels.py.
        first_entry = first_row * FREE
        Q += ((b.to(gl.int64) * S + skip + first_row - head * (S - skip)) * HQ + kvh * G) * D
        K += start
        V += start
        BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SB, D], DTYPE)
        k, v = gl.allocate_shared_memory(DTYPE, [SB, D], BLOCK), gl.allocate_shared_memory(DTYPE, [SB, D], BLOCK)
        block_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(block_full, count=THREADS)
        rows = ring(ROWS, D, DTYPE, STAGES, THREADS, 1)
        fence_async_shared()
        barrier()
        group0 = S * 0
        group1, group2 = group0 + 1, group0 + 2
        gl.warp_specialize([
            (_consume_forward, (group0, OPART, EXPONENTS, LPART, ENTRIES, begin, end, first_entry, scale2, k, v,
                               block_full, rows, G)),
            (_consume_forward, (group1, OPART, EXPONENTS, LPART, ENTRIES, begin, end, first_entry, scale2, k, v,
                               block_full, rows, G)),
            (_consume_forward, (group2, OPART, EXPONENTS, LPART, ENTRIES, begin, end, first_entry, scale2, k, v,
                               block_full, rows, G)),
            (_produce_forward, (Q, K, V, ENTRIES, begin, end, first_entry, k, v, block_full, rows, HQ, HKV, G, FREE)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, COPY_REGISTERS])  # fmt: skip


@gluon.jit
def _produce_backward(
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
    COPY: gl.constexpr = _by_rows(D)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    at = n[:, None] * (HKV * D) + d[None, :]
    copy_rows(keys, K + at)
    copy_rows(values, V + at)
    async_copy.mbarrier_arrive(block_full, increment_count=False)
    qi, r = gl.arange(0, BQ, layout=gl.SliceLayout(1, _by_entry(D, G))), gl.arange(0, ROWS, layout=ONE)
    following = gl.load(ENTRIES + gl.minimum(begin + qi, end - 1))
    of_stats = gl.load(ENTRIES + gl.minimum(begin + r // G, end - 1))
    for g in range(gl.cdiv(end - begin, BQ)):
        row = _of_each_row((following - first_entry) // FREE, G, D)
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


@gluon.jit
def _rows(LAYOUT: gl.constexpr):
    """A tile's rows, recomputed where they are used.

    Triton that hoists ranges would spill 64 of them; of a hoisted range of 8 the sums are computed here.
    """
    if _HOISTS:
        eight = gl.arange(0, 8, layout=gl.SliceLayout(1, _EIGHTS))[:, None]
        rows = (eight * 8 + anew(gl.arange(0, 8, layout=gl.SliceLayout(0, _EIGHTS)))[None, :]).reshape([ROWS])
        rows = gl.convert_layout(rows, LAYOUT)
    else:
        rows = anew(gl.arange(0, ROWS, layout=LAYOUT))
    return rows


@gluon.jit
def _consume_backward(
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
    for g in range(group, gl.cdiv(end - begin, BQ), _BACKWARD_GROUPS):
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
            DTYPE, [_BACKWARD_GROUPS, SB, ROWS], gl.NVMMASharedLayout.get_default_for([SB, ROWS], DTYPE)
        )
        fence_async_shared()
        barrier()
        rows = (queries, gradients, stats, full, empty)
        group0 = S * 0
        group1 = group0 + 1
        gl.warp_specialize([
            (_consume_backward, (group0, DQPART, EXPONENTS, DKPART, DVPART, ENTRIES, begin, end, first_entry, scale2,
                                scale, block, block_full, rows, mine, handed, G)),
            (_consume_backward, (group1, DQPART, EXPONENTS, DKPART, DVPART, ENTRIES, begin, end, first_entry, scale2,
                                scale, block, block_full, rows, mine, handed, G)),
            (_produce_backward, (Q, K, V, DO, STATS, ENTRIES, begin, end, first_entry, block, block_full, rows,
                        HQ, HKV, G, FREE)),
        ], [4, 4], [REGISTERS, COPY_REGISTERS])  # fmt: skip


# For hopper.start.
FORWARD = _selected_forward_hopper, Tile(ROWS.value, 64, warps=4, stages=5, registers=128), 152
BACKWARD = _selected_backward_hopper, Tile(ROWS.value, 64, warps=4, stages=5, registers=168), 232
