# pyright: reportMissingImports=false
"""Attention over spans of keys, gradient of queries, for Hopper (sm90): all branches on, slc and win share keys.

A warp copies keys and values by TMA; two warpgroups compute, 64 rows each (shared/hopper.py). The kernel of all other
cards and cases is in backward_q.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..runtime.tiles import Tile
from ..shared import hopper
from ..shared.hopper import (
    BANDS,
    COMPRESSED_BAND,
    DEPTH,
    PRODUCE_REGISTERS,
    ROWS,
    all_tiles,
    barrier,
    kind_of,
    masked,
    produce,
    product,
    put,
    ring,
    rows_at,
    seen,
    tile_of_heads,
    tiles_of_rows,
    vacate,
    wait,
)

_WARPGROUPS = gl.constexpr(2)  # consumers
TILE = Tile(_WARPGROUPS.value * ROWS.value, 64, warps=4, stages=2, registers=168)
_REGISTERS = 232  # per consumer thread


@gluon.jit
def _attend(
    g, tiles, j, span, lo1, end0, lse, delta, dq, q, do, rings, scale2, SCORES: gl.constexpr, SUMS: gl.constexpr
):
    """dq += ds k, unscaled, over the tiles of a band, from tile g of the stream and key j on.

    Keys in [lo1, end0) are seen by all of the warpgroup's rows; other tiles are masked by each row's `span`.
    """
    keys, keys_full, keys_empty, values, values_full, values_empty = rings
    STAGES: gl.constexpr = keys.shape[0]
    BN: gl.constexpr = keys.shape[1]
    zero = gl.full([ROWS, BN], 0.0, gl.float32, SCORES)
    for _ in range(tiles):
        wait(keys_full, g, 0)
        s = warpgroup_mma(q, keys.index(g % STAGES).permute([1, 0]), zero, use_acc=False, is_async=True)
        wait(values_full, g, 0)
        dp = warpgroup_mma(do, values.index(g % STAGES).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        s = masked(s, j, span, lo1, end0, SCORES)
        p = gl.exp2(s * scale2 - lse[:, None])
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(values_empty.index(g % STAGES), count=1)
        ds = (p * (dp - delta[:, None])).to(keys.dtype)
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, SUMS, 2))
        dq = warpgroup_mma(ds, keys.index(g % STAGES), dq, is_async=True)
        dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
        mbarrier.arrive(keys_empty.index(g % STAGES), count=1)
        j += BN
        g += 1
    return g, dq


@gluon.jit
def _stats_of(
    slot, group, b, i, kvh, S, STATSC, STATSS, stride, HQ: gl.constexpr, G: gl.constexpr, ROW: gl.constexpr
):  # fmt: skip
    """(lse, delta) of a warpgroup's rows of a tile, for the band `slot`."""
    stats = gl.where(slot == COMPRESSED_BAND, STATSC, STATSS + kind_of(slot).to(gl.int64) * stride)
    at, ok = rows_at(b, i, kvh, group, S, HQ, G, ROW)
    return gl.load(stats + at * 2, mask=ok, other=float("inf")), gl.load(stats + at * 2 + 1, mask=ok, other=0.0)


@gluon.jit
def _consume(
    group, DQ, STATSC, STATSS, stride, S, offset, heads, queries, gradients, places, rings, scale2, scale,
    sizes: gl.constexpr, BQ: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr,
):  # fmt: skip
    """Consumer: the gradient of q for the rows of the program's warpgroup `group`."""
    q_tiles, q_full, q_empty = queries
    do_tiles, do_full, do_empty = gradients
    IN_FLIGHT: gl.constexpr = q_tiles.shape[0]
    G: gl.constexpr = HQ // HKV
    D: gl.constexpr = q_tiles.shape[2]
    BN: gl.constexpr = rings[0].shape[1]
    SCORES: gl.constexpr = product(BN)
    SUMS: gl.constexpr = product(D)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    g, turn = S * 0, S * 0
    for tile in range(gl.program_id(0), all_tiles(S, heads, BQ), gl.num_programs(0)):
        b, i, kvh = tile_of_heads(tile, S, BQ, HKV)
        later = _stats_of(S * 0, group, b, i, kvh, S, STATSC, STATSS, stride, HQ, G, ROW)
        own = turn * _WARPGROUPS + group
        q, do = q_tiles.index(own % IN_FLIGHT), do_tiles.index(own % IN_FLIGHT)
        wait(q_full, own, 0)
        wait(do_full, own, 0)
        turn += 1
        dq = gl.full([ROWS, D], 0.0, gl.float32, SUMS)
        for slot in range(BANDS):
            t = offset + i
            key, tiles, span, lo1, end0 = seen(slot, group, t, gl.minimum(t + BQ, offset + S) - 1, G, BN, ROW, sizes)
            lse, delta = later
            following = gl.minimum(slot + 1, BANDS - 1)
            later = _stats_of(following, group, b, i, kvh, S, STATSC, STATSS, stride, HQ, G, ROW)
            g, dq = _attend(g, tiles, key, span, lo1, end0, lse, delta, dq, q, do, rings, scale2, SCORES, SUMS)
        mbarrier.arrive(q_empty.index(own % IN_FLIGHT), count=1)
        mbarrier.arrive(do_empty.index(own % IN_FLIGHT), count=1)
        place = places.index(group)
        vacate()
        place.store((dq * scale).to(place.dtype))
        put(DQ, place, b, i + group * (ROWS // G), kvh * G)
    tma.store_wait(0)


@gluon.jit
def _all_spans_backward_q(
    Q, DO, DQ, KC, VC, STATSC, KS, VS, STATSS, S, offset, heads, stride, scale2, scale,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, ALIGN: gl.constexpr,
    LOCAL: gl.constexpr, INIT: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Gradient of tiles of queries: scale · Σ ds k over all three branches.

    Grid: (programs,), one a multiprocessor. Program p owns tiles p, p + programs, .. of M // G queries of one kv head
    with all G heads of the group, and writes them to DQ [B,S,HQ,D].
    Q, DO [B,S,HQ,D]; KC, VC [B,N,HKV,D]; KS, VS [B,T,HKV,D], the window's, too; all of them and DQ are `Tiled`. STATSC
    [B,S,HQ,2], float32, from merge._prepare; STATSS the same for SLC_ALONE, WIN_ALONE and BOTH, `stride` numbers apart.
    `heads` is B * HKV.
    """
    DTYPE: gl.constexpr = Q.dtype
    BQ: gl.constexpr = M // (HQ // HKV)
    sizes: gl.constexpr = (BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, INIT, CAUSAL)
    rings = ring(BN, D, DTYPE, STAGES, 1, _WARPGROUPS) + ring(BN, D, DTYPE, STAGES, 1, _WARPGROUPS)
    queries = ring(ROWS, D, DTYPE, DEPTH * _WARPGROUPS, 1, 1)
    gradients = ring(ROWS, D, DTYPE, DEPTH * _WARPGROUPS, 1, 1)
    places = tiles_of_rows(_WARPGROUPS, D, DTYPE)
    fence_async_shared()
    barrier()
    given = (Q,) + queries, (DO,) + gradients  # noqa: RUF005  Triton takes no stars
    group0 = S * 0
    group1 = group0 + 1
    gl.warp_specialize([
        (_consume, (group0, DQ, STATSC, STATSS, stride, S, offset, heads, queries, gradients, places, rings,
                    scale2, scale, sizes, BQ, HQ, HKV)),
        (_consume, (group1, DQ, STATSC, STATSS, stride, S, offset, heads, queries, gradients, places, rings,
                    scale2, scale, sizes, BQ, HQ, HKV)),
        (produce, (given, KC, VC, KS, VS, S, offset, heads, rings, sizes, BQ, HKV)),
    ], [4, 1], [REGISTERS, PRODUCE_REGISTERS])  # fmt: skip


def start(arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Launch `_all_spans_backward_q`.

    Args:
        arguments, sizes: those of backward_q._span_backward_q; names that this kernel lacks are dropped.
    """
    by_rows, stage = ("Q", "DO", "DQ"), "compressed_window_forced_backward_q"
    hopper.start_tiles(_all_spans_backward_q, arguments, sizes, TILE, _REGISTERS, by_rows, stage=stage)
