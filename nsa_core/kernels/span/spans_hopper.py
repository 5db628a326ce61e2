# pyright: reportMissingImports=false
"""Attention over spans of keys, forward and gradient of queries, for Hopper (sm90): all branches on, slc and win share.

A warp copies keys and values by TMA; three warpgroups attend, or two compute the gradient, 64 rows each
(shared/hopper.py). The kernels of all other cards and cases are in forward.py and backward_q.py.
"""

from __future__ import annotations

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
from ..shared.hopper import (
    ALONE_BAND,
    BANDS,
    BOTH_BAND,
    COMPRESSED_BAND,
    DEPTH,
    PRODUCE_REGISTERS,
    ROWS,
    WINDOW_BAND,
    anew,
    barrier,
    by_eights,
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

_FORWARD_GROUPS, _BACKWARD_GROUPS = gl.constexpr(3), gl.constexpr(2)  # warpgroups that consume


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
def _consume_forward(
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
    for tile in range(gl.program_id(0), gl.cdiv(S, BQ) * heads, gl.num_programs(0)):
        b, i, kvh = tile_of_heads(tile, S, BQ, HKV)
        own = turn * _FORWARD_GROUPS + group
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
    rings = ring(BN, D, DTYPE, STAGES, 1, _FORWARD_GROUPS) + ring(BN, D, DTYPE, STAGES, 1, _FORWARD_GROUPS)
    queries = ring(ROWS, D, DTYPE, DEPTH * _FORWARD_GROUPS, 1, 1)
    places = tiles_of_rows(_FORWARD_GROUPS, D, DTYPE)
    fence_async_shared()
    barrier()
    outputs, lses = (OC, OW, OS), (LSEC, LSEW, LSES)
    given = ((Q,) + queries,)  # noqa: RUF005  Triton takes no stars
    group0 = S * 0
    group1, group2 = group0 + 1, group0 + 2
    gl.warp_specialize([
        (_consume_forward, (group0, outputs, lses, GATES, S, offset, heads, queries, places, rings, scale2,
                           sizes, BQ, HQ, HKV, SUMMED)),
        (_consume_forward, (group1, outputs, lses, GATES, S, offset, heads, queries, places, rings, scale2,
                           sizes, BQ, HQ, HKV, SUMMED)),
        (_consume_forward, (group2, outputs, lses, GATES, S, offset, heads, queries, places, rings, scale2,
                           sizes, BQ, HQ, HKV, SUMMED)),
        (produce, (given, KC, VC, KS, VS, S, offset, heads, rings, sizes, BQ, HKV)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCE_REGISTERS])  # fmt: skip


@gluon.jit
def _attend_backward(
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
def _consume_backward(
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
    for tile in range(gl.program_id(0), gl.cdiv(S, BQ) * heads, gl.num_programs(0)):
        b, i, kvh = tile_of_heads(tile, S, BQ, HKV)
        later = _stats_of(S * 0, group, b, i, kvh, S, STATSC, STATSS, stride, HQ, G, ROW)
        own = turn * _BACKWARD_GROUPS + group
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
            g, dq = _attend_backward(g, tiles, key, span, lo1, end0, lse, delta, dq, q, do, rings, scale2, SCORES, SUMS)
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
    rings = ring(BN, D, DTYPE, STAGES, 1, _BACKWARD_GROUPS) + ring(BN, D, DTYPE, STAGES, 1, _BACKWARD_GROUPS)
    queries = ring(ROWS, D, DTYPE, DEPTH * _BACKWARD_GROUPS, 1, 1)
    gradients = ring(ROWS, D, DTYPE, DEPTH * _BACKWARD_GROUPS, 1, 1)
    places = tiles_of_rows(_BACKWARD_GROUPS, D, DTYPE)
    fence_async_shared()
    barrier()
    given = (Q,) + queries, (DO,) + gradients  # noqa: RUF005
    group0 = S * 0
    group1 = group0 + 1
    gl.warp_specialize([
        (_consume_backward, (group0, DQ, STATSC, STATSS, stride, S, offset, heads, queries, gradients, places, rings,
                            scale2, scale, sizes, BQ, HQ, HKV)),
        (_consume_backward, (group1, DQ, STATSC, STATSS, stride, S, offset, heads, queries, gradients, places, rings,
                            scale2, scale, sizes, BQ, HQ, HKV)),
        (produce, (given, KC, VC, KS, VS, S, offset, heads, rings, sizes, BQ, HKV)),
    ], [4, 1], [REGISTERS, PRODUCE_REGISTERS])  # fmt: skip


# For hopper.start.
FORWARD = _all_spans_forward, Tile(_FORWARD_GROUPS.value * ROWS.value, 64, warps=4, stages=2, registers=128), 160
BACKWARD = _all_spans_backward_q, Tile(_BACKWARD_GROUPS.value * ROWS.value, 64, warps=4, stages=2, registers=168), 232
