# pyright: reportMissingImports=false
"""The backward towards compressed keys of span_keys.py for Hopper: a warp copies queries, two warpgroups have 64 keys
each (hopper.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._launch import launch
from ._tiled import Tiled
from ._tiles import Tile
from .hopper import COPY_REGISTERS, ROWS, anew, arrived, barrier, by_row, copy_rows, fetch, ring, wait
from .ranges import compressed_queries

_WARPGROUPS = gl.constexpr(2)  # that attend
_LANES = gl.constexpr(32)
TILE = Tile(ROWS.value, _WARPGROUPS.value * ROWS.value, warps=4, stages=3, registers=168)
_REGISTERS = 232  # of a thread that attends


@gluon.jit
def _tiles(n0, s0, s1, offset, BQ: gl.constexpr, sizes: gl.constexpr):
    """(first row, tiles) of the queries in s0 .. s1-1 that see key n0, or later ones. `sizes`: a block, its stride."""
    seen_from, _ = compressed_queries(n0, sizes[0], sizes[1])
    first = gl.maximum(seen_from - offset, s0)
    return first, gl.cdiv(gl.maximum(s1 - first, 0), BQ)


@gluon.jit
def _produce(
    Q, DO, STATS, n0, s0, s1, offset, b, kvh, rows, HQ: gl.constexpr, G: gl.constexpr, sizes: gl.constexpr
):  # fmt: skip
    """Copies tile after tile of all queries that see any of the keys; STATS begin at the sequence's first row."""
    queries, gradients, stats, full, empty = rows
    STAGES: gl.constexpr = queries.shape[0]
    BQ: gl.constexpr = ROWS // G
    r = gl.arange(0, ROWS, layout=gl.BlockedLayout([2], [32], [1], [0]))
    i, tiles = _tiles(n0, s0, s1, offset, BQ, sizes)
    for g in range(tiles):
        wait(empty, g, 1)
        fetch(Q, queries, full, g, b, i, kvh * G, G)
        fetch(DO, gradients, full, g, b, i, kvh * G, G)
        at = STATS + ((i + r // G).to(gl.int64) * HQ + r % G) * 2
        ok = i + r // G < s1
        copy_rows(stats.index(g % STAGES * 2), at, mask=ok)
        copy_rows(stats.index(g % STAGES * 2 + 1), at + 1, mask=ok)
        async_copy.mbarrier_arrive(full.index(g % STAGES), increment_count=False)
        i += BQ


@gluon.jit
def _attend(
    tiles, i, stop, offset, seen_from, whole_from, group, block, dk, dv, rows, scale2,
    G: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """dk += ds^T q and dv += p^T do over tiles of rows, from row i on; those from `stop` on do not count.

    A key is seen by the queries from its `seen_from` on, all of the warpgroup's from whole_from on.
    """
    queries, gradients, stats, full, empty = rows
    STAGES: gl.constexpr = queries.shape[0]
    BQ: gl.constexpr = ROWS // G
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    zero = gl.full([ROWS, ROWS], 0.0, gl.float32, SCORES)
    for g in range(tiles):
        wait(full, g, 0)
        q, do = queries.index(g % STAGES), gradients.index(g % STAGES)
        # Found anew in every turn: descriptors of what stays in place would be kept through the loop, and spilled.
        place = anew(group * 2)
        s = warpgroup_mma(block.index(place), q.permute([1, 0]), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(block.index(place + 1), do.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * scale2 - stats.index(g % STAGES * 2).load(ROW)[None, :])
        if (offset + i < whole_from) | (i + BQ > stop):
            row = i + anew(gl.arange(0, ROWS, layout=ROW)) // G
            p = gl.where(((offset + row)[None, :] >= seen_from[:, None]) & (row < stop)[None, :], p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp - stats.index(g % STAGES * 2 + 1).load(ROW)[None, :])).to(queries.dtype)
        p = gl.convert_layout(p.to(queries.dtype), gl.DotOperandLayout(0, SUMS, 2))
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, SUMS, 2))
        dv = warpgroup_mma(p, do, dv, is_async=True)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dv, dk, p, ds = warpgroup_mma_wait(0, deps=[dv, dk, p, ds])
        mbarrier.arrive(empty.index(g % STAGES), count=1)
        i += BQ
    return dk, dv


@gluon.jit
def _consume(
    group, K, V, DK, DVALUE, n0, N, s0, s1, offset, block, rows, scale2, scale,
    HKV: gl.constexpr, G: gl.constexpr, sizes: gl.constexpr,
):  # fmt: skip
    """Gradients of a warpgroup's 64 keys, `group` of the program's; pointers begin at the program's first key."""
    D: gl.constexpr = block.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    own = group * ROWS
    at, ok = _keys_at(own, n0, N, HKV, D, by_row(D))
    copy_rows(block.index(group * 2), K + at, mask=ok)
    copy_rows(block.index(group * 2 + 1), V + at, mask=ok)
    arrived()
    i, tiles = _tiles(n0, s0, s1, offset, ROWS // G, sizes)
    seen_from, _ = compressed_queries(n0 + own + gl.arange(0, ROWS, layout=KEY), sizes[0], sizes[1])
    whole_from, _ = compressed_queries(n0 + own + (ROWS - 1), sizes[0], sizes[1])
    dk, dv = gl.full([ROWS, D], 0.0, gl.float32, SUMS), gl.full([ROWS, D], 0.0, gl.float32, SUMS)
    dk, dv = _attend(tiles, i, s1, offset, seen_from, whole_from, group, block, dk, dv, rows, scale2, G, SCORES, SUMS)
    at, ok = _keys_at(own, n0, N, HKV, D, SUMS)
    gl.store(DK + at, (dk * scale).to(DK.dtype.element_ty), mask=ok)
    gl.store(DVALUE + at, dv.to(DVALUE.dtype.element_ty), mask=ok)


@gluon.jit
def _keys_at(own, n0, N, HKV: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """(places from the program's first key on, mask) of 64 keys, from the program's `own` on."""
    n, d = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    return (own + n)[:, None] * (HKV * D) + d[None, :], (n0 + own + n < N)[:, None] & (d < D)[None, :]


@gluon.jit
def _compressed_backward_kv(
    Q, K, V, DO, STATS, DK, DVALUE, S, N, T, begin, offset, chunk, batch, scale2, scale,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As span_keys._span_backward_kv of compressed keys; Q and DO are `Tiled`."""
    G: gl.constexpr = HQ // HKV
    DTYPE: gl.constexpr = K.dtype.element_ty
    n0 = gl.program_id(0) * BN
    kvh, b = gl.program_id(1) % HKV, gl.program_id(1) // HKV
    c = gl.num_programs(2) - 1 - gl.program_id(2)  # the last queries see most keys: longest work first
    sizes: gl.constexpr = (BLOCK, STRIDE)
    first = ((b.to(gl.int64) * T + n0) * HKV + kvh) * D
    out = (((c.to(gl.int64) * batch + b) * N + n0) * HKV + kvh) * D
    STATS += (b.to(gl.int64) * S * HQ + kvh * G) * 2
    K += first
    V += first
    DK += out
    DVALUE += out
    s0 = begin + c * chunk
    s1 = gl.minimum(s0 + chunk, S)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    block = gl.allocate_shared_memory(DTYPE, [2 * _WARPGROUPS, ROWS, D], TILE)  # keys and values of each
    queries, full, empty = ring(ROWS, D, DTYPE, STAGES, 2 + _LANES, _WARPGROUPS)
    gradients = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, D], TILE)
    stats = gl.allocate_shared_memory(gl.float32, [STAGES * 2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    barrier()
    rows = (queries, gradients, stats, full, empty)
    group0 = S * 0
    group1 = group0 + 1
    gl.warp_specialize([
        (_consume, (group0, K, V, DK, DVALUE, n0, N, s0, s1, offset, block, rows, scale2, scale, HKV, G, sizes)),
        (_consume, (group1, K, V, DK, DVALUE, n0, N, s0, s1, offset, block, rows, scale2, scale, HKV, G, sizes)),
        (_produce, (Q, DO, STATS, n0, s0, s1, offset, b, kvh, rows, HQ, G, sizes)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


def start(grid: tuple[int, ...], arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Launch it: arguments and sizes as of span_keys._span_backward_kv, of which it does not take all."""
    names = set(_compressed_backward_kv.arg_names)
    group = sizes["HQ"] // sizes["HKV"]
    given = dict(arguments)  # a tensor comes first
    given = dict(K=given.pop("K")) | {name: value for name, value in given.items() if name in names}
    given |= {name: Tiled(given[name], ROWS.value // group, group) for name in ("Q", "DO")}
    constants = {name: value for name, value in sizes.items() if name in names}
    constants |= dict(STAGES=TILE.stages, REGISTERS=_REGISTERS)
    launch(_compressed_backward_kv, grid, given, constants, TILE)
