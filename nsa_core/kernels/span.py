# pyright: reportMissingImports=false
"""Attention over a span of keys: compressed attention, the window, and causal attention, forward and backward.

Which keys a query sees is `Span`'s to say. A loop over keys, or over queries, runs in up to three parts, so that only
the tiles at the ends of the span pay for masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import LOG2_E, Tile, arch, ceil_div, launch, padded, widest
from .ranges import Span, key_range, load_rows, query_range, sees


@triton.jit
def _forward_tiles(
    begin, end, q, t, m, l, acc, K, V, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, HAS_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for every tile of keys in [begin, end)."""
    n, d, dv = tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    for j in tl.range(begin, end, BN):
        start = tl.cast(j, tl.int64) * HKV
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, j + n < N, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            s = tl.where(sees(t[:, None], (j + n)[None, :], BLOCK, STRIDE, WINDOW), s, float("-inf"))
        larger = tl.maximum(m, tl.max(s, 1) * scale2)
        shrink = tl.exp2(m - larger)
        p = tl.exp2(s * scale2 - larger[:, None])
        l = l * shrink + tl.sum(p, 1)
        if HAS_V:
            v = load_rows(V + start * DV, n, HKV * DV, dv, DV, DVP, j + n < N, MASKED)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = larger
    return m, l, acc


@triton.jit
def _span_forward(
    Q, K, V, O, LSE, S, rows, N, offset, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_V: tl.constexpr,
):  # fmt: skip
    """O = softmax(q k^T) v and its base-2 log-sum-exp for one tile of queries of one kv head."""
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ  # longest spans first
    kvh, b = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    r, d, dv = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, DVP)
    qi, h = r // G, r % G
    t, ok = offset + i + qi, (qi < BQ) & (i + qi < rows)
    first_row = (b.to(tl.int64) * S + i) * HQ + kvh * G
    row = qi * HQ + h
    q = load_rows(Q + first_row * D, row, D, d, D, DP, ok, True)
    m = tl.full([M], -1e30, tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    K += (b.to(tl.int64) * N * HKV + kvh) * D
    V += (b.to(tl.int64) * N * HKV + kvh) * DV
    lo, whole, part, hi = key_range(offset + i, offset + tl.minimum(i + BQ, rows) - 1, N, BLOCK, STRIDE, WINDOW, BN)
    if WINDOW > 0:
        m, l, acc = _forward_tiles(
            lo, whole, q, t, m, l, acc, K, V, N, scale2, HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, WINDOW, HAS_V, True
        )
    m, l, acc = _forward_tiles(
        whole, part, q, t, m, l, acc, K, V, N, scale2, HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, WINDOW, HAS_V, False
    )
    m, l, acc = _forward_tiles(
        part, hi, q, t, m, l, acc, K, V, N, scale2, HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, WINDOW, HAS_V, True
    )
    any_key = l > 0
    tl.store(LSE + first_row + row, tl.where(any_key, m + tl.log2(l), float("inf")), mask=ok)
    if HAS_V:
        acc = acc * tl.where(any_key, 1.0 / l, 0.0)[:, None]
        at = O + first_row * DV + row[:, None] * DV + dv[None, :]
        tl.store(at, acc.to(O.dtype.element_ty), mask=ok[:, None] & (dv < DV)[None, :])


@triton.jit
def _backward_q_tiles(
    begin, end, q, do, lse, delta, t, dq, K, V, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq += ds k for every tile of keys in [begin, end); ds without the factor scale."""
    n, d, dv = tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    for j in tl.range(begin, end, BN):
        start = tl.cast(j, tl.int64) * HKV
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, j + n < N, MASKED)
        v = load_rows(V + start * DV, n, HKV * DV, dv, DV, DVP, j + n < N, MASKED)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
        if MASKED:
            p = tl.where(sees(t[:, None], (j + n)[None, :], BLOCK, STRIDE, WINDOW), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _span_backward_q(
    Q, K, V, DO, LSE, DELTA, DQ, S, rows, N, offset, scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """DQ = scale · Σ ds k for one tile of queries of one kv head."""
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ
    kvh, b = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    r, d, dv = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, DVP)
    qi, h = r // G, r % G
    t, ok = offset + i + qi, (qi < BQ) & (i + qi < rows)
    first_row = (b.to(tl.int64) * S + i) * HQ + kvh * G
    row = qi * HQ + h
    q = load_rows(Q + first_row * D, row, D, d, D, DP, ok, True)
    do = load_rows(DO + first_row * DV, row, DV, dv, DV, DVP, ok, True)
    lse = tl.load(LSE + first_row + row, mask=ok, other=float("inf"))
    delta = tl.load(DELTA + first_row + row, mask=ok, other=0.0)
    dq = tl.zeros([M, DP], tl.float32)
    K += (b.to(tl.int64) * N * HKV + kvh) * D
    V += (b.to(tl.int64) * N * HKV + kvh) * DV
    lo, whole, part, hi = key_range(offset + i, offset + tl.minimum(i + BQ, rows) - 1, N, BLOCK, STRIDE, WINDOW, BN)
    if WINDOW > 0:
        dq = _backward_q_tiles(
            lo, whole, q, do, lse, delta, t, dq, K, V, N, scale2,
            HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, WINDOW, True)  # fmt: skip
    dq = _backward_q_tiles(
        whole, part, q, do, lse, delta, t, dq, K, V, N, scale2,
        HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, WINDOW, False)  # fmt: skip
    dq = _backward_q_tiles(
        part, hi, q, do, lse, delta, t, dq, K, V, N, scale2,
        HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, WINDOW, True)  # fmt: skip
    # The gradient has a row for each query of the range alone.
    at = ((b.to(tl.int64) * rows + i) * HQ + kvh * G + row)[:, None] * D + d[None, :]
    inside = ok[:, None] & (d < D)[None, :]
    tl.store(DQ + at, (dq * scale).to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kv_tiles(
    begin, end, stop, k, v, dk, dv, n, Q, DO, LSE, DELTA, offset, scale2,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk += ds^T q and dv += p^T do for every tile of queries in [begin, end); rows from `stop` on do not count."""
    BQ: tl.constexpr = M // G
    r, d, e = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, DVP)
    qi, h = r // G, r % G
    row = qi * HQ + h
    for i in tl.range(begin, end, BQ):
        ok = (qi < BQ) & (i + qi < stop)
        first = tl.cast(i, tl.int64) * HQ
        q = load_rows(Q + first * D, row, D, d, D, DP, ok, True)
        do = load_rows(DO + first * DV, row, DV, e, DV, DVP, ok, True)
        lse = tl.load(LSE + first + row, mask=ok, other=float("inf"))
        delta = tl.load(DELTA + first + row, mask=ok, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - lse[None, :])
        if MASKED:
            p = tl.where(sees((offset + i + qi)[None, :], n[:, None], BLOCK, STRIDE, WINDOW), p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _span_backward_kv(
    Q, K, V, DO, LSE, DELTA, DK, DVALUE, S, rows, N, offset, chunk, batch, scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """DK, DVALUE [chunks,B,N,HKV,D] of one tile of keys from one chunk of queries."""
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    n0 = tl.program_id(0) * BN
    kvh, b = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    c = tl.num_programs(2) - 1 - tl.program_id(2)  # the last queries see most keys: longest work first
    n, d, e = n0 + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    n_ok = n < N
    first = (b.to(tl.int64) * N + n0) * HKV + kvh
    k = load_rows(K + first * D, n - n0, HKV * D, d, D, DP, n_ok, True)
    v = load_rows(V + first * DV, n - n0, HKV * DV, e, DV, DVP, n_ok, True)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DVP], tl.float32)
    first_row = b.to(tl.int64) * S * HQ + kvh * G
    Q += first_row * D
    DO += first_row * DV
    LSE += first_row
    DELTA += first_row
    s1 = tl.minimum((c + 1) * chunk, rows)
    lo, whole, part, hi = query_range(n0, tl.minimum(n0 + BN, N) - 1, c * chunk, s1, offset, BLOCK, STRIDE, WINDOW, BQ)
    dk, dv = _backward_kv_tiles(
        lo, whole, hi, k, v, dk, dv, n, Q, DO, LSE, DELTA, offset, scale2,
        HQ, G, D, DV, DP, DVP, M, BLOCK, STRIDE, WINDOW, True)  # fmt: skip
    dk, dv = _backward_kv_tiles(
        whole, part, hi, k, v, dk, dv, n, Q, DO, LSE, DELTA, offset, scale2,
        HQ, G, D, DV, DP, DVP, M, BLOCK, STRIDE, WINDOW, False)  # fmt: skip
    if WINDOW > 0:
        dk, dv = _backward_kv_tiles(
            part, hi, hi, k, v, dk, dv, n, Q, DO, LSE, DELTA, offset, scale2,
            HQ, G, D, DV, DP, DVP, M, BLOCK, STRIDE, WINDOW, True)  # fmt: skip
    out = first + c.to(tl.int64) * batch * N * HKV
    at = DK + out * D + (n - n0)[:, None] * (HKV * D) + d[None, :]
    tl.store(at, (dk * scale).to(DK.dtype.element_ty), mask=n_ok[:, None] & (d < D)[None, :])
    at = DVALUE + out * DV + (n - n0)[:, None] * (HKV * DV) + e[None, :]
    tl.store(at, dv.to(DVALUE.dtype.element_ty), mask=n_ok[:, None] & (e < DV)[None, :])


def forward(
    q: Tensor, k: Tensor, v: Tensor | None, span: Span, offset: int, scale: float, rows: int | None = None
) -> tuple[Tensor | None, Tensor]:
    """Attention of every query over its span.

    Args:
        q: [B,S,HQ,D], whose row s is query offset + s; contiguous, as all tensors here.
        k, v: [B,N,HKV,D] and [B,N,HKV,DV]; without v only the log-sum-exp is computed.
        rows: of q that are computed, the first ones; all unless given.

    Returns:
        o [B,S,HQ,DV] in q's dtype (None without v), and the log-sum-exp of its scores, float32 [B,S,HQ], base 2.
        Rows that are not computed stay unwritten.
    """
    batch, length, heads, _ = q.shape
    tile = _forward_tile(q, k, v, span).holding(q.shape[2] // k.shape[2])
    o = None if v is None else q.new_empty(batch, length, heads, v.shape[-1])
    lse = torch.empty(batch, length, heads, dtype=torch.float32, device=q.device)
    pointers = dict(Q=q, K=k, V=k if v is None else v, O=q if o is None else o, LSE=lse)
    numbers = _numbers(q, k, rows, offset, scale)
    constants = _constants(q, k, k if v is None else v, tile, span) | dict(HAS_V=v is not None)
    launch(_span_forward, _query_grid(q, k, tile, rows), pointers | numbers, constants, tile)
    return o, lse


def backward_q(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, span: Span, offset: int, scale: float,
    rows: int | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of q, in its dtype: [B,S,HQ,D], or [B,rows,HQ,D].

    Args:
        do: gradient [B,S,HQ,DV] of the gated sum.
        lse, delta: float32 [B,S,HQ] with the gate folded in, from merge.prepare.
        rows: of q that count, the first ones; all unless given.
    """
    tile, dq = (
        _backward_q_tile(q, v).holding(q.shape[2] // k.shape[2]),
        q.new_empty(len(q), q.shape[1] if rows is None else rows, *q.shape[2:]),
    )
    pointers = dict(Q=q, K=k, V=v, DO=do, LSE=lse, DELTA=delta, DQ=dq)
    numbers = _numbers(q, k, rows, offset, scale) | dict(scale=scale)
    launch(_span_backward_q, _query_grid(q, k, tile, rows), pointers | numbers, _constants(q, k, v, tile, span), tile)
    return dq


def backward_kv(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, span: Span, offset: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v; the arguments as in backward_q.

    Few keys with many queries each (compressed attention) would leave most of the device idle: their queries are cut
    into chunks, a function of shape alone, whose float32 parts are summed in order.
    """
    (batch, rows), (_, tokens, kv_heads, _) = q.shape[:2], k.shape
    tile = _backward_kv_tile(q, v, span).holding(q.shape[2] // k.shape[2])
    tiles = ceil_div(tokens, tile.keys)
    chunks = 1 if span.window else min(16, ceil_div(2048, max(1, tiles * batch * kv_heads)), ceil_div(rows, 512))
    parts = [x.new_empty(chunks, *x.shape, dtype=x.dtype if chunks == 1 else torch.float32) for x in (k, v)]
    given = q, k, v, do, lse, delta
    _launch_backward_kv(given, (parts[0], parts[1]), (tiles, batch * kv_heads, chunks), tile, span, offset, scale, None)
    dk, dv = (part[0] if chunks == 1 else part.sum(0).to(x.dtype) for part, x in zip(parts, (k, v), strict=True))
    return dk, dv


def backward_kv_into(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, totals: tuple[Tensor, Tensor],
    offset: int, scale: float, rows: int,
) -> None:  # fmt: skip
    """Writes the part that the first `rows` queries have, by causal attention, of the gradients of the keys they see.

    totals: float32 [B,N,HKV,D] and [B,N,HKV,DV].
    """
    span = Span()
    tile = _backward_kv_tile(q, v, span).holding(q.shape[2] // k.shape[2])
    grid = ceil_div(offset + rows, tile.keys), k.shape[0] * k.shape[2], 1
    _launch_backward_kv((q, k, v, do, lse, delta), totals, grid, tile, span, offset, scale, rows)


def _launch_backward_kv(
    given: tuple[Tensor, ...], into: tuple[Tensor, Tensor], grid: tuple[int, int, int], tile: Tile, span: Span,
    offset: int, scale: float, rows: int | None,
) -> None:  # fmt: skip
    q, k, v, do, lse, delta = given
    pointers = dict(Q=q, K=k, V=v, DO=do, LSE=lse, DELTA=delta, DK=into[0], DVALUE=into[1])
    chunk = ceil_div(q.shape[1] if rows is None else rows, grid[2])
    numbers = _numbers(q, k, rows, offset, scale) | dict(scale=scale, batch=len(q), chunk=chunk)
    launch(_span_backward_kv, grid, pointers | numbers, _constants(q, k, v, tile, span), tile)


def _numbers(q: Tensor, k: Tensor, rows: int | None, offset: int, scale: float) -> dict[str, float]:
    length = q.shape[1]
    return dict(S=length, rows=length if rows is None else rows, N=k.shape[1], offset=offset, scale2=scale * LOG2_E)


def _query_grid(q: Tensor, k: Tensor, tile: Tile, rows: int | None) -> tuple[int, int]:
    queries = tile.rows // (q.shape[2] // k.shape[2])
    return ceil_div(q.shape[1] if rows is None else rows, queries), q.shape[0] * k.shape[2]


def _constants(q: Tensor, k: Tensor, v: Tensor, tile: Tile, span: Span) -> dict[str, int]:
    dim, value_dim = q.shape[-1], v.shape[-1]
    heads = dict(HQ=q.shape[2], HKV=k.shape[2], D=dim, DV=value_dim, DP=padded(dim), DVP=padded(value_dim))
    return heads | dict(M=tile.rows, BN=tile.keys, BLOCK=span.block, STRIDE=span.stride, WINDOW=span.window)


def _forward_tile(q: Tensor, k: Tensor, v: Tensor | None, span: Span) -> Tile:
    wide = widest(q, k if v is None else v)
    if q.itemsize == 4:
        return Tile(32, 32, 4, 1)
    if wide > 128:
        return Tile(128, 32, 8, 2)
    if arch(q) < 90:
        return Tile(128, 64, 8, 2)
    return Tile(64, 64, 4, 2) if span.window else Tile(128, 64, 8, 3)


def _backward_q_tile(q: Tensor, v: Tensor) -> Tile:
    if q.itemsize == 4:
        return Tile(32, 32, 4, 1)
    wide = widest(q, v)
    if wide > 128:
        return Tile(64, 32, 8, 1)
    return Tile(64, 64, 4, 2) if arch(q) >= 90 or wide <= 64 else Tile(128, 64, 8, 2)


def _backward_kv_tile(q: Tensor, v: Tensor, span: Span) -> Tile:
    if q.itemsize == 4:
        return Tile(32, 32, 4, 1)
    wide = widest(q, v)
    if wide <= 64:
        return Tile(64, 64, 4, 2)
    if wide > 128:
        return Tile(32, 32, 8, 1)
    if arch(q) < 90:
        return Tile(64, 64, 8, 2)
    return Tile(64, 64, 4, 2) if span.window else Tile(64, 128, 8, 2)
