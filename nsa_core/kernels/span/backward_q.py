# pyright: reportMissingImports=false
"""Attention over spans of keys, gradient of queries, for all cards: a tile of queries meets all keys that it sees.

A program goes through the spans of all branches that are on, so that the gradient of q is written once. Hopper has a
kernel of its own for the common case (spans_hopper.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call, Part
from ..runtime.tiles import Tile, arch, widest
from ..shared import hopper
from ..shared.ranges import (
    compressed_keys,
    initial_keys,
    key_tiles,
    load_rows,
    load_stats,
    local_keys,
    shared_keys,
    tile_of_rows,
    window_keys,
    within,
)
from . import spans_hopper
from .forward import launch_spans, span_arguments, span_constants


@triton.jit
def _backward_tiles(
    begin, end, first, shift, q, do, lse, delta, lo, length, dq, K, V, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """dq += ds k, unscaled, for every tile of keys in [begin, end); tiles before `first` are read `shift` keys on."""
    n, d, dv = tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    for i in tl.range(begin, end, BN):
        j = tl.where(i < first, i + shift, i)
        start = tl.cast(j, tl.int64) * HKV
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, j + n < N, MASKED)
        v = load_rows(V + start * DV, n, HKV * DV, dv, DV, DVP, j + n < N, MASKED)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
        if MASKED:
            p = tl.where(within((j + n)[None, :], lo[:, None], length[:, None]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _backward_band(
    q, do, dq, band, band0, band1, row, ok, K, V, STATS, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq += ds k over each row's `band` of keys; band0 and band1 are the bands of the first and last row."""
    lse, delta = load_stats(STATS, row, ok)
    lo, length = band[0], band[1] - band[0]
    a, b, c, d = key_tiles(band0[0], band1[0], band0[1], band1[1], BN)
    dq = _backward_tiles(b, c, 0, 0, q, do, lse, delta, lo, length, dq, K, V, N, scale2, HKV, D, DV, DP, DVP, BN, False)
    return _backward_tiles(
        c - (b - a), d, c, b - c, q, do, lse, delta, lo, length, dq, K, V, N, scale2, HKV, D, DV, DP, DVP, BN, True
    )


@triton.jit
def _span_backward_q(
    Q, DO, DQ, KC, VC, STATSC, KW, VW, STATSW, KS, VS, STATSS, CU, S, NC, T, offset, skip, stride, sequences,
    scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr,
    INIT: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries: scale · Σ ds k over the branches that are on (CMP, WIN, SLC).

    Grid: (tiles of queries, sequences x kv heads), as in _span_forward. A program owns M // G queries of one kv head
    with all G heads of the group, and writes them to DQ [B,S,HQ,D].
    Q [B,S,HQ,D]; DO [B,S,HQ,DV]; KC, VC [B,NC,HKV,D or DV]; KW, VW, KS, VS [B,T,HKV,D or DV]; STATSC, STATSW, STATSS
    [B,S,HQ,2], float32, from merge._prepare. SHARED: KS and VS are the window's, too, and STATSS those of SLC_ALONE,
    WIN_ALONE and BOTH, `stride` numbers apart. VARLEN, CU: as in _span_forward.
    """
    G: tl.constexpr = HQ // HKV
    kvh, i, stop, row0, cmp0, key0, NC, T = tile_of_rows(
        CU, sequences, S, NC, T, skip, HKV, M // G, BLOCK, STRIDE, VARLEN
    )
    if VARLEN:  # noqa: SIM102  a constant of the compiler and a number
        if i >= stop:
            return
    r, d, dv = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, DVP)
    qi, h = r // G, r % G
    t, t0, t1, ok = offset + i + qi, offset + i, offset + stop - 1, i + qi < stop
    first_row = (row0 + i) * HQ + kvh * G
    row = qi * HQ + h
    q = load_rows(Q + first_row * D, row, D, d, D, DP, ok, True)
    do = load_rows(DO + first_row * DV, row, DV, dv, DV, DVP, ok, True)
    STATSC, STATSW, STATSS = STATSC + first_row * 2, STATSW + first_row * 2, STATSS + first_row * 2
    dq = tl.zeros([M, DP], tl.float32)
    if CMP:
        head = cmp0 * HKV + kvh
        dq = _backward_band(
            q, do, dq, compressed_keys(t, BLOCK, STRIDE), compressed_keys(t0, BLOCK, STRIDE),
            compressed_keys(t1, BLOCK, STRIDE), row, ok, KC + head * D, VC + head * DV, STATSC, NC, scale2,
            HKV, D, DV, DP, DVP, BN)  # fmt: skip
    head = key0 * HKV + kvh
    KW, VW, KS, VS = KW + head * D, VW + head * DV, KS + head * D, VS + head * DV
    if SHARED:
        for kind in tl.static_range(3):  # unrolled: a loop would take more registers
            of_kind = STATSS + tl.cast(kind, tl.int64) * stride
            dq = _backward_band(
                q, do, dq, shared_keys(t, kind, WINDOW, ALIGN, LOCAL, INIT, CAUSAL),
                shared_keys(t0, kind, WINDOW, ALIGN, LOCAL, INIT, CAUSAL),
                shared_keys(t1, kind, WINDOW, ALIGN, LOCAL, INIT, CAUSAL),
                row, ok, KS, VS, of_kind, T, scale2, HKV, D, DV, DP, DVP, BN)  # fmt: skip
    else:
        if WIN:
            dq = _backward_band(
                q, do, dq, window_keys(t, WINDOW), window_keys(t0, WINDOW), window_keys(t1, WINDOW),
                row, ok, KW, VW, STATSW, T, scale2, HKV, D, DV, DP, DVP, BN)  # fmt: skip
        if SLC:
            if INIT > 0:
                dq = _backward_band(
                    q, do, dq, initial_keys(t, INIT, CAUSAL), initial_keys(t0, INIT, CAUSAL),
                    initial_keys(t1, INIT, CAUSAL), row, ok, KS, VS, STATSS, T, scale2,
                    HKV, D, DV, DP, DVP, BN)  # fmt: skip
            dq = _backward_band(
                q, do, dq, local_keys(t, ALIGN, LOCAL, CAUSAL), local_keys(t0, ALIGN, LOCAL, CAUSAL),
                local_keys(t1, ALIGN, LOCAL, CAUSAL), row, ok, KS, VS, STATSS, T, scale2,
                HKV, D, DV, DP, DVP, BN)  # fmt: skip
    at = DQ + first_row * D + row[:, None] * D + d[None, :]
    tl.store(at, (dq * scale).to(DQ.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


def backward_q(q: Tensor, do: Tensor, parts: Sequence[Part], stats: Tensor, call: Call) -> Tensor:
    """Gradient of q [B,S,HQ,D] from all parts, in q's dtype.

    Args:
        do: gradient of the gated sum, [B,S,HQ,DV].
        stats: from merge.prepare, float32 [len(parts),B,S,HQ,2]; where keys are shared, one more for the last two parts
            as one.
    """
    dq = torch.empty_like(q)
    rows = {part.branch: dict(STATS=stats[way]) for way, part in enumerate(parts)}
    arguments = dict(Q=q, DO=do, DQ=dq) | span_arguments(q, parts, rows, call)
    arguments |= dict(stride=stats[0].numel(), scale=call.scale)
    if hopper.attends_to_all(q, parts, call, do):
        constants = span_constants(q, parts, spans_hopper.BACKWARD[1], call)
        name, rows = "compressed_window_forced_backward_q", ("Q", "DO", "DQ")
        hopper.start(spans_hopper.BACKWARD, None, arguments, constants, stage=name, by_rows=rows)
    else:
        tile = _tile(q, parts, call.packed).holding(q.shape[2] // parts[0].k.shape[2])
        launch_spans(_span_backward_q, parts, arguments, {}, tile, call, "_backward_q")
    return dq


def _tile(q: Tensor, parts: Sequence[Part], packed: bool) -> Tile:
    wide = widest(q, parts[0].v)
    if q.itemsize == 4:
        return Tile(16, 32, 8)
    if wide > 128:
        return Tile(32, 32, 8)
    if arch(q) < 90:
        return Tile(64, 64, 4, 2) if wide <= 64 else Tile(128, 64, 8, 2)
    if wide <= 64:
        # Wider tiles take longer to start, and pay where there are many compressed keys.
        are_long = any(part.branch == "cmp" and part.k.shape[1] >= 3072 for part in parts)
        return Tile(64, 64, 4, 3, registers=168) if are_long else Tile(64, 32, 4, 3, registers=128)
    group = q.shape[2] // parts[0].k.shape[2]
    if group > 1 and 128 % group == 0 and not (packed and group >= 16):
        return Tile(128, 32, 8, 3, registers=128)  # others spill more than aot allows
    masked = wide > max(q.shape[-1], parts[0].v.shape[-1])  # masks of columns take registers
    return Tile(64, 32, 4, 3) if masked else Tile(64, 64, 4, 2)
