# pyright: reportMissingImports=false
"""Attention over the freely chosen blocks, forward, for Hopper (sm90): one warpgroup loads, three attend.

The loading warpgroup gathers the queries that chose a block; the others compute on alternate tiles of them
(shared/hopper.py). Slots are packed (shared/packed_slots.py). All other cards and cases: kernels.py.
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
from ..shared.hopper import COPY_REGISTERS, ROWS, THREADS, barrier, by_eights, copy_rows, product, ring, wait
from ..shared.packed_slots import store_packed
from ..shared.ranges import block_of_keys
from .inverse import PARTS_OF_INDEX, work_item

_WARPGROUPS = gl.constexpr(3)  # consumers
_TILE = Tile(ROWS.value, 64, warps=4, stages=5, registers=128)
_REGISTERS = 152  # per consumer thread


@triton.constexpr_function
def by_rows(dim):
    """Layout in which 64 rows of `dim` half-precision numbers are copied: per thread 16 bytes of 8 adjacent rows."""
    lanes = dim // 8
    return gl.BlockedLayout([8, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@triton.constexpr_function
def by_entry(dim, group):
    """Layout of the rows of `by_rows` as [entries, heads of the group]: a thread holds each entry of its rows once."""
    lanes = (dim // 8).bit_length() - 1
    bits = [[0, 1 << bit] if 1 << bit < group else [(1 << bit) // group, 0] for bit in range(6)]
    in_warp = [[0, 0]] * lanes + bits[3 : 8 - lanes]
    return gl.DistributedLinearLayout(bits[:3], in_warp, bits[8 - lanes :], [], [64 // group, group])


@gluon.jit
def of_each_row(x, G: gl.constexpr, D: gl.constexpr):
    """Broadcast a number per entry, in layout `by_entry`, to the entry's rows, in layout `by_rows`."""
    x = (x[:, None] + gl.full([ROWS // G, G], 0, gl.int32, by_entry(D, G))).reshape([ROWS])
    return gl.convert_layout(x, gl.SliceLayout(1, by_rows(D)))


@gluon.jit
def _produce(
    Q, K, V, ENTRIES, begin, end, first_entry, keys, values, block_full, rows,
    HQ: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, FREE: gl.constexpr,
):  # fmt: skip
    """Producer: copies the block's keys and values, then its queries by tiles, the last padded with its last entry."""
    queries, full, empty = rows
    STAGES: gl.constexpr = queries.shape[0]
    D: gl.constexpr = queries.shape[2]
    BQ: gl.constexpr = ROWS // G
    COPY: gl.constexpr = by_rows(D)
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    at = n[:, None] * (HKV * D) + d[None, :]
    copy_rows(keys, K + at)
    copy_rows(values, V + at)
    async_copy.mbarrier_arrive(block_full, increment_count=False)
    qi = gl.arange(0, BQ, layout=gl.SliceLayout(1, by_entry(D, G)))
    following = gl.load(ENTRIES + gl.minimum(begin + qi, end - 1))
    for g in range(gl.cdiv(end - begin, BQ)):
        row = of_each_row((following - first_entry) // FREE, G, D)
        following = gl.load(ENTRIES + gl.minimum(begin + (g + 1) * BQ + qi, end - 1))
        wait(empty, g, 1)
        copy_rows(queries.index(g % STAGES), Q + ((row * HQ + n % G) * D)[:, None] + d[None, :])
        async_copy.mbarrier_arrive(full.index(g % STAGES), increment_count=False)


@gluon.jit
def _consume(
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
    for g in range(group, gl.cdiv(end - begin, BQ), _WARPGROUPS):
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
            (_consume, (group0, OPART, EXPONENTS, LPART, ENTRIES, begin, end, first_entry, scale2, k, v, block_full,
                        rows, G)),
            (_consume, (group1, OPART, EXPONENTS, LPART, ENTRIES, begin, end, first_entry, scale2, k, v, block_full,
                        rows, G)),
            (_consume, (group2, OPART, EXPONENTS, LPART, ENTRIES, begin, end, first_entry, scale2, k, v, block_full,
                        rows, G)),
            (_produce, (Q, K, V, ENTRIES, begin, end, first_entry, k, v, block_full, rows, HQ, HKV, G, FREE)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, COPY_REGISTERS])  # fmt: skip


def start(grid: tuple[int, ...], arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Launch `_selected_forward_hopper`.

    Args:
        arguments, sizes: those of kernels._selected_forward, and EXPONENTS; names that this kernel lacks are dropped.
    """
    hopper.start(_selected_forward_hopper, grid, arguments, sizes, _TILE, _REGISTERS, stage="selected")
