# pyright: reportMissingImports=false
"""The forward of span.py for Hopper, in Gluon, where all branches are on and window and selected branch share keys.

A program has a warpgroup that copies keys and values into rings of shared memory, and warpgroups that attend, 64 rows
each, to the same tiles (as FlashAttention-3 does, arXiv 2407.08608, section 3.1). They meet at barriers of the rings
alone: while one computes probabilities, others have their products under way. The tiles of all bands of keys are one
stream, of which the copies are ahead. Tiles begin where a band does, so that hardly a key is met in vain.
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

from ._launch import launch
from ._tiles import Tile
from .ranges import BOTH, SLC_ALONE, WIN_ALONE, compressed_keys, shared_keys, tile_of_rows, within

_ROWS, _THREADS = gl.constexpr(64), gl.constexpr(128)  # of a warpgroup
# Bands: compressed keys, then shared ones by kind: BOTH, which the window goes on from, WIN_ALONE and SLC_ALONE.
_BANDS = gl.constexpr(BOTH.value + 2)
_BOTH_BAND, _WINDOW_BAND, _LAST_BAND = (
    gl.constexpr(BOTH.value + 1 - kind.value) for kind in (BOTH, WIN_ALONE, SLC_ALONE)
)
# Registers of a thread, by warpgroups that attend: at first, and of these once the one that copies has given its own.
_REGISTERS = {2: (168, 232), 3: (128, 152)}
_COPY_REGISTERS = gl.constexpr(40)
# Renamed between Triton 3.6 and 3.9.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _band(slot, t, sizes: gl.constexpr):
    """Keys that query t sees in a band of the stream. `sizes` are those of ranges.sizes, in turn."""
    first, end = compressed_keys(t, sizes[0], sizes[1])
    lo, stop = shared_keys(t, _LAST_BAND - slot, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6])
    return gl.where(slot == 0, first, lo), gl.where(slot == 0, end, stop)


@gluon.jit
def _band_tiles(slot, t0, t1, BN: gl.constexpr, sizes: gl.constexpr):
    """(first key, tiles) of a band of queries t0 .. t1; one tile at least."""
    first, _ = _band(slot, t0, sizes)
    _, end = _band(slot, t1, sizes)
    return first, gl.maximum(gl.cdiv(end - first, BN), 1)


@triton.constexpr_function
def _by_row(dim):
    """The layout of copies of rows of `dim` half-precision numbers, 16 bytes a thread."""
    lanes = dim // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _anew(x):
    """x, from which all is computed where it is used, and not kept through loops, which have no registers for it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy_rows(buffer, base, j, N, stride, D: gl.constexpr):
    """Rows j .. of [N,D] `stride` numbers apart, without waiting; zeros for those from N on."""
    rows: gl.constexpr = buffer.shape[0]
    n = gl.arange(0, rows, layout=gl.SliceLayout(1, _by_row(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, _by_row(D)))
    at = base + j.to(gl.int64) * stride + (n[:, None] * stride + d[None, :])
    if j + rows <= N:
        _copy(buffer, at)
    else:
        _copy(buffer, at, mask=(j + _anew(n) < N)[:, None] & (d < D)[None, :])


@gluon.jit
def _wait(barriers, turn, BEFORE: gl.constexpr):
    """Until the ring's place of tile `turn` is full; or, of that BEFORE, empty, as a new ring is."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(turn % STAGES), turn // STAGES % 2 ^ BEFORE)


@gluon.jit
def _produce(
    t0, t1, KC, VC, KS, VS, NC, T, rings, sizes: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, BN: gl.constexpr
):
    """Copies tile after tile of the stream of queries t0 .. t1; pointers begin at the head's first key."""
    keys, keys_full, keys_empty, values, values_full, values_empty = rings
    STAGES: gl.constexpr = keys.shape[0]
    g = t0 * 0
    for slot in range(_BANDS):
        j, tiles = _band_tiles(slot, t0, t1, BN, sizes)
        k, v, n = gl.where(slot == 0, KC, KS), gl.where(slot == 0, VC, VS), gl.where(slot == 0, NC, T)
        for _ in range(tiles):
            _wait(keys_empty, g, 1)
            _copy_rows(keys.index(g % STAGES), k, j, n, HKV * D, D)
            async_copy.mbarrier_arrive(keys_full.index(g % STAGES), increment_count=False)
            _wait(values_empty, g, 1)
            _copy_rows(values.index(g % STAGES), v, j, n, HKV * D, D)
            async_copy.mbarrier_arrive(values_full.index(g % STAGES), increment_count=False)
            j += BN
            g += 1


@gluon.jit
def _parts(x):
    """[rows,n] as [rows,n/8,8], of which a thread has all along the middle, so that sums there cross no threads."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def _attend(
    g, tiles, j, band, lo1, end0, m, l, acc, q, rings, scale2, SCORES: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """The online softmax over the tiles of a band, from tile g of the stream and key j on; `l` is in `_parts`.

    All of the warpgroup's rows see the keys from lo1 to end0; tiles beyond are masked by row.
    """
    keys, keys_full, keys_empty, values, values_full, values_empty = rings
    STAGES: gl.constexpr = keys.shape[0]
    BN: gl.constexpr = keys.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    zero = gl.full([q.shape[0], BN], 0.0, gl.float32, SCORES)
    for _ in range(tiles):
        _wait(keys_full, g, 0)
        fence_async_shared()  # copies are to be seen by products
        s = warpgroup_mma(q, keys.index(g % STAGES).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(keys_empty.index(g % STAGES), count=1)
        if (j < lo1) | (j + BN > end0):
            n = j + _anew(gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES)))
            s = gl.where(within(n[None, :], band[0][:, None], (band[1] - band[0])[:, None]), s, float("-inf"))
        larger = gl.maximum(m, gl.convert_layout(gl.max(gl.max(_parts(s), 1), 1), ROW) * scale2)
        shrink = gl.exp2(m - larger)
        p = gl.exp2(s * scale2 - larger[:, None])
        l = l * gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))[:, None] + gl.sum(_parts(p), 1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, SUMS, 2))
        _wait(values_full, g, 0)
        fence_async_shared()
        acc = warpgroup_mma(p, values.index(g % STAGES), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(values_empty.index(g % STAGES), count=1)
        m = larger
        j += BN
        g += 1  # not `g += tiles` where the bands are gone through: Triton 3.6 loses that, and all wait for ever
    return g, m, l, acc


@gluon.jit
def _rows(group, LAYOUT: gl.constexpr):
    """A warpgroup's rows of the program's."""
    return _anew(group * _ROWS + gl.arange(0, _ROWS, layout=LAYOUT))


@gluon.jit
def _rows_at(base, first, i, stop, group, HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr):
    """(pointers, mask) of a warpgroup's rows of [B,S,HQ,D]."""
    r = _rows(group, gl.SliceLayout(1, _by_row(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, _by_row(D)))
    at = base + first * D + ((r // G * HQ + r % G)[:, None] * D + d[None, :])
    return at, (i + r // G < stop)[:, None] & (d < D)[None, :]


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
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OC, LSEC, OW, LSEW, OS, LSES = outputs
    first, i, stop, offset = rows
    q = queries.index(group)
    q_at, q_ok = _rows_at(Q, first, i, stop, group, HQ, G, D)
    _copy(q, q_at, mask=q_ok)
    async_copy.commit_group()
    async_copy.wait_group(0)
    _barrier()

    t0 = offset + i + group * (_ROWS // G)
    t1 = gl.minimum(t0 + (_ROWS // G - 1), offset + stop - 1)
    m0 = gl.full([_ROWS], -1e30, gl.float32, ROW)
    acc0 = gl.full([_ROWS, D], 0.0, gl.float32, SUMS)
    l0 = gl.sum(_parts(gl.full([_ROWS, BN], 0.0, gl.float32, SCORES)), 1)
    m_both, l_both = m0, m0
    g = i * 0
    m, l, acc = m0, l0, acc0
    for slot in range(_BANDS):
        band = _band(slot, offset + i + _rows(group, ROW) // G, sizes)
        lo1, _ = _band(slot, t1, sizes)
        _, end0 = _band(slot, t0, sizes)
        key, tiles = _band_tiles(slot, offset + i, offset + stop - 1, BN, sizes)
        goes_on = slot == _WINDOW_BAND
        m, l, acc = gl.where(goes_on, m, m0), gl.where(goes_on, l, l0), gl.where(goes_on, acc, acc0)
        g, m, l, acc = _attend(g, tiles, key, band, lo1, end0, m, l, acc, q, rings, scale2, SCORES, SUMS)
        total = gl.convert_layout(gl.sum(l, 1), ROW)
        O = gl.where(slot == 0, OC, gl.where(goes_on, OW, OS))
        LSE = gl.where(slot == 0, LSEC, gl.where(goes_on, LSEW, LSES))
        if slot == _BOTH_BAND:
            m_both, l_both = m, total
        last = m
        if slot == _LAST_BAND:
            last = gl.maximum(m, m_both)
            total, l_both = total * gl.exp2(m - last), l_both * gl.exp2(m_both - last)
            shrink = gl.convert_layout(gl.exp2(m - last), gl.SliceLayout(1, SUMS))
            share = gl.convert_layout(l_both, gl.SliceLayout(1, SUMS))
            at, ok = _rows_at(OS, first, i, stop, group, HQ, G, D)
            both = gl.convert_layout(gl.load(at, mask=ok, other=0.0), SUMS).to(gl.float32)
            total, acc = total + l_both, acc * shrink[:, None] + both * share[:, None]
        at, ok = _rows_at(O, first, i, stop, group, HQ, G, D)
        _store(acc, total, at, ok, DTYPE)
        r = _rows(group, ROW)
        lse = gl.where(total > 0, last + gl.log2(total), float("inf"))
        gl.store(LSE + first + (r // G * HQ + r % G), lse, mask=i + r // G < stop)


@gluon.jit
def _ring(rows: gl.constexpr, D: gl.constexpr, DTYPE: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """(buffers, barriers of full ones, of empty ones): a warpgroup's threads fill, GROUPS warpgroups empty them."""
    buffers = gl.allocate_shared_memory(
        DTYPE, [STAGES, rows, D], gl.NVMMASharedLayout.get_default_for([rows, D], DTYPE)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=_THREADS)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return buffers, full, empty


@gluon.jit
def _all_spans_forward(
    Q, KC, VC, OC, LSEC, OW, LSEW, KS, VS, OS, LSES, S, NC, T, offset, skip, scale2,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr, ALIGN: gl.constexpr,
    LOCAL: gl.constexpr, INIT: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """As span._span_forward; KS and VS are the window's, too. REGISTERS: of a thread that attends, at least."""
    G: gl.constexpr = HQ // HKV
    GROUPS: gl.constexpr = M // _ROWS
    DTYPE: gl.constexpr = Q.dtype.element_ty
    i, stop = tile_of_rows(S, skip, M // G)
    kvh, b = gl.program_id(1) % HKV, gl.program_id(1) // HKV
    sizes: gl.constexpr = (BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, INIT, CAUSAL)
    t0, t1 = offset + i, offset + stop - 1
    first = (b.to(gl.int64) * S + i) * HQ + kvh * G
    of_compressed, of_token = (b.to(gl.int64) * NC * HKV + kvh) * D, (b.to(gl.int64) * T * HKV + kvh) * D
    KC, VC, KS, VS = KC + of_compressed, VC + of_compressed, KS + of_token, VS + of_token
    rings = _ring(BN, D, DTYPE, STAGES, GROUPS) + _ring(BN, D, DTYPE, STAGES, GROUPS)
    queries = gl.allocate_shared_memory(
        DTYPE, [GROUPS, _ROWS, D], gl.NVMMASharedLayout.get_default_for([_ROWS, D], DTYPE)
    )
    fence_async_shared()
    _barrier()
    outputs, rows = (OC, LSEC, OW, LSEW, OS, LSES), (first, i, stop, offset)
    group0 = S * 0
    group1, group2 = group0 + 1, group0 + 2
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (group0, Q, outputs, queries, rings, rows, scale2, sizes, HQ, G)),
            (_consume, (group1, Q, outputs, queries, rings, rows, scale2, sizes, HQ, G)),
            (_produce, (t0, t1, KC, VC, KS, VS, NC, T, rings, sizes, HKV, D, BN)),
        ], [4, 4], [REGISTERS, _COPY_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (group0, Q, outputs, queries, rings, rows, scale2, sizes, HQ, G)),
            (_consume, (group1, Q, outputs, queries, rings, rows, scale2, sizes, HQ, G)),
            (_consume, (group2, Q, outputs, queries, rings, rows, scale2, sizes, HQ, G)),
            (_produce, (t0, t1, KC, VC, KS, VS, NC, T, rings, sizes, HKV, D, BN)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, _COPY_REGISTERS])  # fmt: skip


def tile(groups: int) -> Tile:
    """Of two or three warpgroups that attend."""
    return Tile(groups * _ROWS.value, 64, warps=4, stages=2, registers=_REGISTERS[groups][0])


def start(grid: tuple[int, ...], arguments: Mapping[str, Any], sizes: Mapping[str, int], tile: Tile) -> None:
    """Launch it: arguments and sizes as of span._span_forward, of which it does not take all."""
    names = set(_all_spans_forward.arg_names)
    own = dict(STAGES=tile.stages, REGISTERS=_REGISTERS[tile.rows // _ROWS.value][1])
    given = {name: value for name, value in arguments.items() if name in names}
    constants = {name: value for name, value in sizes.items() if name in names} | own
    launch(_all_spans_forward, grid, given, constants, tile)
