# pyright: reportMissingImports=false
"""Attention over spans of keys, forward, for Hopper (sm90): all branches on, window and selected branch share keys.

A warp copies keys and values by TMA; three warpgroups attend, 64 rows each (shared/hopper.py). The kernel of all other
cards and cases is in forward.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
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
    ALONE_BAND,
    BANDS,
    BOTH_BAND,
    COMPRESSED_BAND,
    DEPTH,
    PRODUCE_REGISTERS,
    ROWS,
    WINDOW_BAND,
    all_tiles,
    anew,
    barrier,
    by_eights,
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

_WARPGROUPS = gl.constexpr(3)  # consumers
TILE = Tile(_WARPGROUPS.value * ROWS.value, 64, warps=4, stages=2, registers=128)
_REGISTERS = 160  # per consumer thread


@gluon.jit
def _attend(
    g, tiles, j, span, lo1, end0, goes_on, m, l, acc, q, rings, scale2, SCORES: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """The online softmax over the tiles of a band, from tile g of the stream and key j on; l is summed `by_eights`.

    Keys in [lo1, end0) are seen by all of the warpgroup's rows; other tiles are masked by each row's `span`.
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
        acc = warpgroup_mma(p, values.index(g % STAGES), acc, use_acc=goes_on, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(values_empty.index(g % STAGES), count=1)
        m = larger
        goes_on = True
        j += BN
        g += 1
    return g, m, l, acc


@gluon.jit
def _consume(
    group, outputs, lses, GATES, S, offset, heads, queries, places, rings, scale2,
    sizes: gl.constexpr, BQ: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Consumer: outputs and log-sum-exps of all branches for the rows of the program's warpgroup `group`."""
    q_tiles, q_full, q_empty = queries
    IN_FLIGHT: gl.constexpr = q_tiles.shape[0]
    G: gl.constexpr = HQ // HKV
    D: gl.constexpr = q_tiles.shape[2]
    BN: gl.constexpr = rings[0].shape[1]
    SCORES: gl.constexpr = product(BN)
    SUMS: gl.constexpr = product(D)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OC, OW, OS = outputs
    LSEC, LSEW, LSES = lses
    m0 = gl.full([ROWS], -1e30, gl.float32, ROW)
    l0 = gl.sum(by_eights(gl.full([ROWS, BN], 0.0, gl.float32, SCORES)), 1)
    acc = gl.full([ROWS, D], 0.0, gl.float32, SUMS)
    g, turn = S * 0, S * 0
    for tile in range(gl.program_id(0), all_tiles(S, heads, BQ), gl.num_programs(0)):
        b, i, kvh = tile_of_heads(tile, S, BQ, HKV)
        own = turn * _WARPGROUPS + group
        q = q_tiles.index(own % IN_FLIGHT)
        wait(q_full, own, 0)
        turn += 1
        m, l, m_alone, l_alone = m0, l0, m0, gl.full([ROWS], 0.0, gl.float32, ROW)
        for slot in range(BANDS):
            t = anew(offset + i)
            key, tiles, span, lo1, end0 = seen(slot, group, t, gl.minimum(t + BQ, offset + S) - 1, G, BN, ROW, sizes)
            goes_on = slot == WINDOW_BAND
            m, l = gl.where(goes_on, m, m0), gl.where(goes_on, l, l0)
            g, m, l, acc = _attend(g, tiles, key, span, lo1, end0, goes_on, m, l, acc, q, rings, scale2, SCORES, SUMS)
            if slot == BANDS - 1:
                mbarrier.arrive(q_empty.index(own % IN_FLIGHT), count=1)
            total = gl.convert_layout(gl.sum(l, 1), ROW)
            place = places.index(anew(group))
            at, ok = rows_at(b, anew(i), kvh, group, S, HQ, G, ROW)
            last = m
            if slot == BOTH_BAND:  # `place` holds the sum over keys of the selected branch alone
                last = gl.maximum(m, m_alone)
                shrink, rest = gl.exp2(m - last), l_alone * gl.exp2(m_alone - last)
                total = total * shrink + rest
                _combine(acc, shrink / total, rest / total, place)
            else:
                acc = acc * gl.convert_layout(gl.where(total > 0, 1.0 / total, 0.0), gl.SliceLayout(1, SUMS))[:, None]
                if SUMMED and slot == COMPRESSED_BAND:  # `place` holds the window's output
                    _add(acc, GATES + at * 3, ok, place)
                else:
                    vacate()
                    place.store(acc.to(place.dtype))
            row = i + group * (ROWS // G)
            if slot == ALONE_BAND:
                m_alone, l_alone = m, total
            if slot == BOTH_BAND:
                put(OS, place, b, row, kvh * G)
            if slot == COMPRESSED_BAND:
                put(OC, place, b, row, kvh * G)
            if not SUMMED and slot == WINDOW_BAND:
                put(OW, place, b, row, kvh * G)
            lse = gl.where(total > 0, last + gl.log2(total), float("inf"))
            LSE = gl.where(slot == COMPRESSED_BAND, LSEC, gl.where(goes_on, LSEW, LSES))
            gl.store(LSE + at, lse, mask=ok & (slot != ALONE_BAND) & (not SUMMED or slot != WINDOW_BAND))
    tma.store_wait(0)


@gluon.jit
def _combine(acc, share, rest, place):
    """place = acc * share + place * rest, by row."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    share, rest = gl.convert_layout(share, ROW), gl.convert_layout(rest, ROW)
    waiting = place.load(acc.type.layout).to(gl.float32)
    place.store((acc * share[:, None] + waiting * rest[:, None]).to(place.dtype))


@gluon.jit
def _add(o, gates, ok, place):
    """place = gate cmp * o + gate win * place, by row, with the same rounding as merge._merge.

    `gates` points to each row's three gates, in the order cmp, slc, win.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    own = gl.convert_layout(gl.load(gates, mask=ok, other=0.0).to(gl.float32), ROW)
    other = gl.convert_layout(gl.load(gates + 2, mask=ok, other=0.0).to(gl.float32), ROW)
    waiting = place.load(o.type.layout).to(gl.float32) * other[:, None]
    place.store(gl.fma(o.to(place.dtype).to(gl.float32), own[:, None], waiting).to(place.dtype))


@gluon.jit
def _all_spans_forward(
    Q, KC, VC, OC, LSEC, OW, LSEW, KS, VS, OS, LSES, GATES, S, offset, heads, scale2,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, ALIGN: gl.constexpr,
    LOCAL: gl.constexpr, INIT: gl.constexpr, CAUSAL: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Attention of tiles of queries over their spans of keys, for all three branches.

    Grid: (programs,), one a multiprocessor. Program p owns tiles p, p + programs, .. of M // G queries of one kv head
    with all G heads of the group. It writes outputs to OC, OW, OS [B,S,HQ,D] and base-2 log-sum-exps to LSEC, LSEW,
    LSES [B,S,HQ], float32. SUMMED: OC is the sum of the compressed branch and the window, weighted by GATES [B,S,HQ,3];
    OW and LSEW are not written.
    Q [B,S,HQ,D]; KC, VC [B,N,HKV,D]; KS, VS [B,T,HKV,D], the window's, too. All but LSE* and GATES are `Tiled`;
    `heads` is B * HKV.
    """
    DTYPE: gl.constexpr = Q.dtype
    BQ: gl.constexpr = M // (HQ // HKV)
    sizes: gl.constexpr = (BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, INIT, CAUSAL)
    rings = ring(BN, D, DTYPE, STAGES, 1, _WARPGROUPS) + ring(BN, D, DTYPE, STAGES, 1, _WARPGROUPS)
    queries = ring(ROWS, D, DTYPE, DEPTH * _WARPGROUPS, 1, 1)
    places = tiles_of_rows(_WARPGROUPS, D, DTYPE)
    fence_async_shared()
    barrier()
    outputs, lses = (OC, OW, OS), (LSEC, LSEW, LSES)
    given = ((Q,) + queries,)  # noqa: RUF005  Triton takes no stars
    group0 = S * 0
    group1, group2 = group0 + 1, group0 + 2
    gl.warp_specialize([
        (_consume, (group0, outputs, lses, GATES, S, offset, heads, queries, places, rings, scale2,
                    sizes, BQ, HQ, HKV, SUMMED)),
        (_consume, (group1, outputs, lses, GATES, S, offset, heads, queries, places, rings, scale2,
                    sizes, BQ, HQ, HKV, SUMMED)),
        (_consume, (group2, outputs, lses, GATES, S, offset, heads, queries, places, rings, scale2,
                    sizes, BQ, HQ, HKV, SUMMED)),
        (produce, (given, KC, VC, KS, VS, S, offset, heads, rings, sizes, BQ, HKV)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCE_REGISTERS])  # fmt: skip


def start(arguments: Mapping[str, Any], sizes: Mapping[str, int], gates: Tensor | None) -> None:
    """Launch `_all_spans_forward`.

    Args:
        arguments, sizes: those of forward._span_forward; names that this kernel lacks are dropped.
        gates: [B,S,HQ,3], by which cmp and win are summed, or None.
    """
    given = dict(arguments) | dict(GATES=arguments["Q"] if gates is None else gates)
    constants, by_rows = dict(sizes) | dict(SUMMED=gates is not None), ("Q", "OC", "OW", "OS")
    stage = "compressed_window_forced"
    hopper.start_tiles(_all_spans_forward, given, constants, TILE, _REGISTERS, by_rows, stage=stage)
