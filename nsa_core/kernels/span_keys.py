# pyright: reportMissingImports=false
"""Attention over spans of keys, backward towards keys and values: a tile of keys meets all queries that see it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import launch
from ._tiles import LOG2_E, Tile, arch, ceil_div, head_sizes, widest
from .ranges import Span, load_rows, load_stats, query_range, sees
from .span import Part


@triton.jit
def _backward_tiles(
    begin, end, first, shift, stop, k, v, dk, dv, n, Q, DO, STATS, offset, scale2,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk += ds^T q and dv += p^T do for every tile of queries in [begin, end); those before `first` lie `shift` away.

    Rows from `stop` on do not count.
    """
    BQ: tl.constexpr = M // G
    r, d, e = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, DVP)
    qi, h = r // G, r % G
    row = qi * HQ + h
    for j in tl.range(begin, end, BQ):
        i = tl.where(j < first, j + shift, j)
        ok = (qi < BQ) & (i + qi < stop)
        start = tl.cast(i, tl.int64) * HQ
        q = load_rows(Q + start * D, row, D, d, D, DP, ok, True)
        do = load_rows(DO + start * DV, row, DV, e, DV, DVP, ok, True)
        lse, delta = load_stats(STATS + start * 2, row, ok)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - lse[None, :])
        if MASKED:
            seen = sees((offset + i + qi)[None, :], n[:, None], BLOCK, STRIDE, ALIGN, WINDOW, 0, CAUSAL)
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _span_backward_kv(
    Q, K, V, DO, STATS, DK, DVALUE, S, N, T, begin, offset, chunk, batch, scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """DK, DVALUE [chunks,B,N,HKV,D] of one tile of keys from one chunk of the queries from row `begin` on."""
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    n0 = tl.program_id(0) * BN
    kvh, b = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    c = tl.num_programs(2) - 1 - tl.program_id(2)  # the last queries see most keys: longest work first
    n, d, e = n0 + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    n_ok = n < N
    first = (b.to(tl.int64) * T + n0) * HKV + kvh
    k = load_rows(K + first * D, n - n0, HKV * D, d, D, DP, n_ok, True)
    v = load_rows(V + first * DV, n - n0, HKV * DV, e, DV, DVP, n_ok, True)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DVP], tl.float32)
    first_row = b.to(tl.int64) * S * HQ + kvh * G
    Q += first_row * D
    DO += first_row * DV
    STATS += first_row * 2
    s0 = begin + c * chunk
    lo, whole, part, hi = query_range(
        n0, tl.minimum(n0 + BN, N) - 1, s0, tl.minimum(s0 + chunk, S), offset,
        BLOCK, STRIDE, ALIGN, WINDOW, CAUSAL, BQ)  # fmt: skip
    dk, dv = _backward_tiles(
        whole, part, 0, 0, hi, k, v, dk, dv, n, Q, DO, STATS, offset, scale2,
        HQ, G, D, DV, DP, DVP, M, BLOCK, STRIDE, ALIGN, WINDOW, CAUSAL, False)  # fmt: skip
    dk, dv = _backward_tiles(
        part - (whole - lo), hi, part, whole - part, hi, k, v, dk, dv, n, Q, DO, STATS, offset, scale2,
        HQ, G, D, DV, DP, DVP, M, BLOCK, STRIDE, ALIGN, WINDOW, CAUSAL, True)  # fmt: skip
    out = ((c.to(tl.int64) * batch + b) * N + n0) * HKV + kvh
    at = DK + out * D + (n - n0)[:, None] * (HKV * D) + d[None, :]
    tl.store(at, (dk * scale).to(DK.dtype.element_ty), mask=n_ok[:, None] & (d < D)[None, :])
    at = DVALUE + out * DV + (n - n0)[:, None] * (HKV * DV) + e[None, :]
    tl.store(at, dv.to(DVALUE.dtype.element_ty), mask=n_ok[:, None] & (e < DV)[None, :])


def backward_kv(
    q: Tensor, do: Tensor, part: Part, stats: Tensor, offset: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of a part's keys [B,N,HKV,D] and values [B,N,HKV,DV], in `dtype`.

    Args:
        q: [B,S,HQ,D], whose row s is query offset + s; contiguous, as all tensors here.
        do: gradient [B,S,HQ,DV] of the gated sum.
        stats: float32 [B,S,HQ,2] from merge.prepare.
    """
    k, v, span = part.k, part.v, part.span
    given = q, k, v, do, stats
    chunks = 1 if span.align else _chunks(q, k, v, k.shape[1], q.shape[1])
    dk, dv = _launch(given, span, k.shape[1], 0, chunks, offset, scale, dtype)
    start = max(0, span.causal - offset)  # the first keys are seen by all queries from here on
    if span.init and start < q.shape[1]:
        tokens = min(span.init, k.shape[1])
        chunks = _chunks(q, k, v, tokens, q.shape[1] - start)
        far = _launch(given, Span(), tokens, start, chunks, offset, scale, torch.float32)
        for total, more in zip((dk, dv), far, strict=True):
            total[:, :tokens] += more
    return dk, dv


def _chunks(q: Tensor, k: Tensor, v: Tensor, tokens: int, rows: int) -> int:
    """Few keys with many queries each would leave most of the device idle: their queries are cut into chunks.

    A function of shape alone; at most about as many as make the float32 parts take the memory of k and v.
    """
    batch, length, kv_heads, _ = k.shape
    tiles = ceil_div(tokens, _tile(q, v).keys) * batch * kv_heads
    return max(1, min(max(16, length // max(1, tokens)), ceil_div(2048, max(1, tiles)), ceil_div(rows, 512)))


def _launch(
    given: tuple[Tensor, ...], span: Span, tokens: int, begin: int, chunks: int, offset: int, scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the first `tokens` keys and values from the queries from row `begin` on, chunks summed in order."""
    q, k, v, do, stats = given
    batch, _, kv_heads, dim = k.shape
    tile = _tile(q, v).holding(q.shape[2] // kv_heads)
    kind = dtype if chunks == 1 else torch.float32
    dk, dv = (q.new_empty(chunks, batch, tokens, kv_heads, size, dtype=kind) for size in (dim, v.shape[-1]))
    pointers = dict(Q=q, K=k, V=v, DO=do, STATS=stats, DK=dk, DVALUE=dv)
    chunk = ceil_div(q.shape[1] - begin, chunks)
    numbers = dict(S=q.shape[1], N=tokens, T=k.shape[1], begin=begin, offset=offset, chunk=chunk, batch=batch)
    sizes = dict(BLOCK=span.block, STRIDE=span.stride, ALIGN=span.align, WINDOW=span.window, CAUSAL=span.causal)
    grid = ceil_div(tokens, tile.keys), batch * kv_heads, chunks
    arguments = pointers | numbers | dict(scale2=scale * LOG2_E, scale=scale)
    launch(_span_backward_kv, grid, arguments, head_sizes(q, v) | dict(M=tile.rows, BN=tile.keys) | sizes, tile)
    return (dk[0], dv[0]) if chunks == 1 else (dk.sum(0).to(dtype), dv.sum(0).to(dtype))


def _tile(q: Tensor, v: Tensor) -> Tile:
    wide = widest(q, v)
    if q.itemsize == 4:
        return Tile(16, 32, 8)
    if wide <= 64:
        return Tile(64, 64, 4, 2 if arch(q) < 90 else 3)
    if wide > 128:
        return Tile(32, 32, 8, 1)
    if arch(q) < 90:
        return Tile(64, 64, 8, 2)
    return Tile(32, 64, 4, 3)
