# pyright: reportMissingImports=false
"""The forward of span.py for Hopper, where all branches are on and window and selected branch share keys."""

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
    BOTH_BAND,
    COPY_REGISTERS,
    LAST_BAND,
    ROWS,
    WINDOW_BAND,
    arrived,
    barrier,
    by_eights,
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

_WARPGROUPS = gl.constexpr(3)  # that attend
TILE = Tile(_WARPGROUPS.value * ROWS.value, 64, warps=4, stages=2, registers=128)
_REGISTERS = 152  # of a thread that attends


@gluon.jit
def _attend(
    g, tiles, j, span, lo1, end0, m, l, acc, q, rings, scale2, SCORES: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """The online softmax over the tiles of a band, from tile g of the stream and key j on; `l` is in `by_eights`.

    All of the warpgroup's rows see the keys from lo1 to end0; tiles beyond are masked by row's `span`.
    """
    keys, keys_full, keys_empty, values, values_full, values_empty = rings
    STAGES: gl.constexpr = keys.shape[0]
    BN: gl.constexpr = keys.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    zero = gl.full([ROWS, BN], 0.0, gl.float32, SCORES)
    for _ in range(tiles):
        wait(keys_full, g, 0)
        s = warpgroup_mma(q, keys.index(g % STAGES).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(keys_empty.index(g % STAGES), count=1)
        s = masked(s, j, span, lo1, end0, SCORES)
        larger = gl.maximum(m, gl.convert_layout(gl.max(gl.max(by_eights(s), 1), 1), ROW) * scale2)
        shrink = gl.exp2(m - larger)
        p = gl.exp2(s * scale2 - larger[:, None])
        l = l * gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))[:, None] + gl.sum(by_eights(p), 1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, SUMS, 2))
        wait(values_full, g, 0)
        acc = warpgroup_mma(p, values.index(g % STAGES), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(values_empty.index(g % STAGES), count=1)
        m = larger
        j += BN
        g += 1
    return g, m, l, acc


@gluon.jit
def _store(acc, l, at, mask, DTYPE: gl.constexpr):
    """acc / l, or 0 for rows that saw no key."""
    share = gl.convert_layout(gl.where(l > 0, 1.0 / l, 0.0), gl.SliceLayout(1, acc.type.layout))
    gl.store(at, gl.convert_layout((acc * share[:, None]).to(DTYPE), at.type.layout), mask=mask)


@gluon.jit
def _consume(
    group, Q, outputs, queries, rings, rows, scale2,
    sizes: gl.constexpr, HQ: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exp of all branches for the rows of one warpgroup, `group` of the program's."""
    DTYPE: gl.constexpr = Q.dtype.element_ty
    D: gl.constexpr = queries.shape[2]
    BN: gl.constexpr = rings[0].shape[1]
    SCORES: gl.constexpr = product(BN)
    SUMS: gl.constexpr = product(D)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OC, LSEC, OW, LSEW, OS, LSES = outputs
    first, i, stop, _ = rows
    q = queries.index(group)
    q_at, q_ok = rows_at(Q, first, i, stop, group, HQ, G, D)
    copy_rows(q, q_at, mask=q_ok)
    arrived()

    m0 = gl.full([ROWS], -1e30, gl.float32, ROW)
    acc0 = gl.full([ROWS, D], 0.0, gl.float32, SUMS)
    l0 = gl.sum(by_eights(gl.full([ROWS, BN], 0.0, gl.float32, SCORES)), 1)
    m_both, l_both = m0, m0
    g = i * 0
    m, l, acc = m0, l0, acc0
    for slot in range(BANDS):
        key, tiles, span, lo1, end0 = seen(slot, group, rows, G, BN, ROW, sizes)
        goes_on = slot == WINDOW_BAND
        m, l, acc = gl.where(goes_on, m, m0), gl.where(goes_on, l, l0), gl.where(goes_on, acc, acc0)
        g, m, l, acc = _attend(g, tiles, key, span, lo1, end0, m, l, acc, q, rings, scale2, SCORES, SUMS)
        total = gl.convert_layout(gl.sum(l, 1), ROW)
        O = gl.where(slot == 0, OC, gl.where(goes_on, OW, OS))
        LSE = gl.where(slot == 0, LSEC, gl.where(goes_on, LSEW, LSES))
        if slot == BOTH_BAND:
            m_both, l_both = m, total
        last = m
        if slot == LAST_BAND:
            last = gl.maximum(m, m_both)
            total, l_both = total * gl.exp2(m - last), l_both * gl.exp2(m_both - last)
            shrink = gl.convert_layout(gl.exp2(m - last), gl.SliceLayout(1, SUMS))
            share = gl.convert_layout(l_both, gl.SliceLayout(1, SUMS))
            at, ok = rows_at(OS, first, i, stop, group, HQ, G, D)
            both = gl.convert_layout(gl.load(at, mask=ok, other=0.0), SUMS).to(gl.float32)
            total, acc = total + l_both, acc * shrink[:, None] + both * share[:, None]
        at, ok = rows_at(O, first, i, stop, group, HQ, G, D)
        _store(acc, total, at, ok, DTYPE)
        r = rows_of(group, ROW)
        lse = gl.where(total > 0, last + gl.log2(total), float("inf"))
        gl.store(LSE + first + (r // G * HQ + r % G), lse, mask=i + r // G < stop)


@gluon.jit
def _all_spans_forward(
    Q, KC, VC, OC, LSEC, OW, LSEW, KS, VS, OS, LSES, S, offset, skip, scale2,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, ALIGN: gl.constexpr,
    LOCAL: gl.constexpr, INIT: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """As span._span_forward; KS and VS are the window's, too. Keys and values are `Tiled`."""
    G: gl.constexpr = HQ // HKV
    DTYPE: gl.constexpr = Q.dtype.element_ty
    b, kvh, rows = tile_of_heads(S, skip, offset, M // G, HQ, HKV)
    _, i, stop, _ = rows
    sizes: gl.constexpr = (BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, INIT, CAUSAL)
    rings = ring(BN, D, DTYPE, STAGES, 1, _WARPGROUPS) + ring(BN, D, DTYPE, STAGES, 1, _WARPGROUPS)
    queries = tiles_of_rows(_WARPGROUPS, D, DTYPE)
    fence_async_shared()
    barrier()
    outputs = (OC, LSEC, OW, LSEW, OS, LSES)
    group0 = S * 0
    group1, group2 = group0 + 1, group0 + 2
    gl.warp_specialize([
        (_consume, (group0, Q, outputs, queries, rings, rows, scale2, sizes, HQ, G)),
        (_consume, (group1, Q, outputs, queries, rings, rows, scale2, sizes, HQ, G)),
        (_consume, (group2, Q, outputs, queries, rings, rows, scale2, sizes, HQ, G)),
        (produce, (offset + i, offset + stop - 1, KC, VC, KS, VS, b, kvh, rings, sizes)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, COPY_REGISTERS])  # fmt: skip


def start(grid: tuple[int, ...], arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Launch it: arguments and sizes as of span._span_forward, of which it does not take all."""
    hopper.start(_all_spans_forward, grid, arguments, sizes, TILE, _REGISTERS, hopper.TILED)
