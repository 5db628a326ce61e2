# pyright: reportMissingImports=false
"""The backward towards queries of span_queries.py for Hopper, where all branches are on and share keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import hopper
from ._tiles import Tile
from .hopper import (
    BANDS,
    COPY_REGISTERS,
    LAST_BAND,
    ROWS,
    arrived,
    barrier,
    copy_rows,
    masked,
    produce,
    product,
    ring,
    rows_at,
    rows_of,
    seen,
    tile_of_heads,
    tiles_of_rows,
    wait,
)

_WARPGROUPS = gl.constexpr(2)  # that attend
TILE = Tile(_WARPGROUPS.value * ROWS.value, 64, warps=4, stages=2, registers=168)
_REGISTERS = 232  # of a thread that attends


@gluon.jit
def _attend(
    g, tiles, j, span, lo1, end0, lse, delta, dq, q, do, rings, scale2, SCORES: gl.constexpr, SUMS: gl.constexpr
):
    """dq += ds k, without the scale, over the tiles of a band, as in span_hopper."""
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
def _consume(
    group, Q, DO, DQ, STATSC, STATSS, stride, queries, gradients, rings, rows, scale2, scale,
    sizes: gl.constexpr, HQ: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """The gradient of the rows of one warpgroup, `group` of the program's."""
    D: gl.constexpr = queries.shape[2]
    BN: gl.constexpr = rings[0].shape[1]
    SCORES: gl.constexpr = product(BN)
    SUMS: gl.constexpr = product(D)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    first, i, stop, _ = rows
    q, do = queries.index(group), gradients.index(group)
    q_at, q_ok = rows_at(Q, first, i, stop, group, HQ, G, D)
    do_at, do_ok = rows_at(DO, first, i, stop, group, HQ, G, D)
    copy_rows(q, q_at, mask=q_ok)
    copy_rows(do, do_at, mask=do_ok)
    arrived()

    dq = gl.full([ROWS, D], 0.0, gl.float32, SUMS)
    g = i * 0
    for slot in range(BANDS):
        r = rows_of(group, ROW)
        key, tiles, span, lo1, end0 = seen(slot, group, rows, G, BN, ROW, sizes)
        stats = gl.where(slot == 0, STATSC, STATSS + (LAST_BAND - slot).to(gl.int64) * stride)
        at, ok = stats + (first + (r // G * HQ + r % G)) * 2, i + r // G < stop
        lse, delta = gl.load(at, mask=ok, other=float("inf")), gl.load(at + 1, mask=ok, other=0.0)
        g, dq = _attend(g, tiles, key, span, lo1, end0, lse, delta, dq, q, do, rings, scale2, SCORES, SUMS)
    at, ok = rows_at(DQ, first, i, stop, group, HQ, G, D)
    gl.store(at, gl.convert_layout((dq * scale).to(queries.dtype), at.type.layout), mask=ok)


@gluon.jit
def _all_spans_backward_q(
    Q, DO, DQ, KC, VC, STATSC, KS, VS, STATSS, S, offset, skip, stride, scale2, scale,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, ALIGN: gl.constexpr,
    LOCAL: gl.constexpr, INIT: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """As span_queries._span_backward_q; keys and values are `Tiled`."""
    G: gl.constexpr = HQ // HKV
    DTYPE: gl.constexpr = Q.dtype.element_ty
    b, kvh, rows = tile_of_heads(S, skip, offset, M // G, HQ, HKV)
    _, i, stop, _ = rows
    sizes: gl.constexpr = (BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, INIT, CAUSAL)
    rings = ring(BN, D, DTYPE, STAGES, 1, _WARPGROUPS) + ring(BN, D, DTYPE, STAGES, 1, _WARPGROUPS)
    queries, gradients = tiles_of_rows(_WARPGROUPS, D, DTYPE), tiles_of_rows(_WARPGROUPS, D, DTYPE)
    fence_async_shared()
    barrier()
    group0 = S * 0
    group1 = group0 + 1
    gl.warp_specialize([
        (_consume, (group0, Q, DO, DQ, STATSC, STATSS, stride, queries, gradients, rings, rows, scale2, scale,
                    sizes, HQ, G)),
        (_consume, (group1, Q, DO, DQ, STATSC, STATSS, stride, queries, gradients, rings, rows, scale2, scale,
                    sizes, HQ, G)),
        (produce, (offset + i, offset + stop - 1, KC, VC, KS, VS, b, kvh, rings, sizes)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


def start(grid: tuple[int, ...], arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Launch it: arguments and sizes as of span_queries._span_backward_q, of which it does not take all."""
    hopper.start(_all_spans_backward_q, grid, arguments, sizes, TILE, _REGISTERS, hopper.TILED)
