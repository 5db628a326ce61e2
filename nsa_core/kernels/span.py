# pyright: reportMissingImports=false
"""Attention over spans of keys, forward and towards the queries: what of the branches is dense and contiguous.

The compressed branch, the window, and of the selected branch the blocks that every query selects. A program holds one
tile of queries and goes through the spans of all branches that it is given, so that queries are read, and their
gradient is written, once. Towards the keys see span_keys.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..routes import Branch
from ._launch import launch
from ._tiles import LOG2_E, Tile, arch, ceil_div, head_sizes, widest
from .ranges import Span, key_range, load_rows, load_stats, sees


@dataclass(frozen=True)
class Part:
    """One branch's keys [B,N,HKV,D] and values [B,N,HKV,DV], and which of them the queries see."""

    branch: Branch
    span: Span
    k: Tensor
    v: Tensor


@triton.jit
def _forward_tiles(
    begin, end, first, shift, q, t, m, l, acc, K, V, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr, INIT: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for every tile of keys in [begin, end); those before `first` lie `shift` away."""
    n, d, dv = tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    for i in tl.range(begin, end, BN):
        j = tl.where(i < first, i + shift, i)
        start = tl.cast(j, tl.int64) * HKV
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, j + n < N, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = sees(t[:, None], (j + n)[None, :], BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL)
            s = tl.where(seen, s, float("-inf"))
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
def _forward_span(
    q, t, t0, t1, ok, row, K, V, O, LSE, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    INIT: tl.constexpr, CAUSAL: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """O = softmax(q k^T) v and its log-sum-exp for the queries t0..t1; K, V, O and LSE begin at their head's first."""
    m = tl.full([M], -1e30, tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    i, a, b, c, d = key_range(t0, t1, N, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, BN)
    if INIT % BN == 0:
        m, l, acc = _forward_tiles(
            b - i, c, b, i - b, q, t, m, l, acc, K, V, N, scale2,
            HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, HAS_V, False)  # fmt: skip
    else:
        m, l, acc = _forward_tiles(
            0, i, 0, 0, q, t, m, l, acc, K, V, N, scale2,
            HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, HAS_V, True)  # fmt: skip
        m, l, acc = _forward_tiles(
            b, c, 0, 0, q, t, m, l, acc, K, V, N, scale2,
            HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, HAS_V, False)  # fmt: skip
    m, l, acc = _forward_tiles(
        c - (b - a), d, c, b - c, q, t, m, l, acc, K, V, N, scale2,
        HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, HAS_V, True)  # fmt: skip
    any_key = l > 0
    tl.store(LSE + row, tl.where(any_key, m + tl.log2(l), float("inf")), mask=ok)
    if HAS_V:
        dv = tl.arange(0, DVP)
        acc = acc * tl.where(any_key, 1.0 / l, 0.0)[:, None]
        tl.store(O + row[:, None] * DV + dv[None, :], acc.to(O.dtype.element_ty), mask=ok[:, None] & (dv < DV)[None, :])


@triton.jit
def _span_forward(
    Q, KC, VC, OC, LSEC, KW, VW, OW, LSEW, KS, VS, OS, LSES, S, NC, T, offset, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, INIT: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """Outputs and base-2 log-sum-exp of the branches that are on, for one tile of queries of one kv head."""
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ  # longest spans first
    kvh, b = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    r, d = tl.arange(0, M), tl.arange(0, DP)
    qi, h = r // G, r % G
    t, ok = offset + i + qi, (qi < BQ) & (i + qi < S)
    t0, t1 = offset + i, offset + tl.minimum(i + BQ, S) - 1
    first_row = (b.to(tl.int64) * S + i) * HQ + kvh * G
    row = qi * HQ + h
    q = load_rows(Q + first_row * D, row, D, d, D, DP, ok, True)
    if CMP:
        head = b.to(tl.int64) * NC * HKV + kvh
        _forward_span(
            q, t, t0, t1, ok, row, KC + head * D, VC + head * DV, OC + first_row * DV, LSEC + first_row, NC, scale2,
            HKV, D, DV, DP, DVP, M, BN, BLOCK, STRIDE, 0, 0, 0, 0, HAS_V)  # fmt: skip
    head = b.to(tl.int64) * T * HKV + kvh
    if WIN:
        _forward_span(
            q, t, t0, t1, ok, row, KW + head * D, VW + head * DV, OW + first_row * DV, LSEW + first_row, T, scale2,
            HKV, D, DV, DP, DVP, M, BN, 1, 1, 1, WINDOW, 0, 0, HAS_V)  # fmt: skip
    if SLC:
        _forward_span(
            q, t, t0, t1, ok, row, KS + head * D, VS + head * DV, OS + first_row * DV, LSES + first_row, T, scale2,
            HKV, D, DV, DP, DVP, M, BN, 1, 1, ALIGN, LOCAL, INIT, CAUSAL, HAS_V)  # fmt: skip


@triton.jit
def _backward_tiles(
    begin, end, first, shift, q, do, lse, delta, t, dq, K, V, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr, INIT: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq += ds k, without the scale, for every tile of keys in [begin, end); those before `first` lie `shift` away."""
    n, d, dv = tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    for i in tl.range(begin, end, BN):
        j = tl.where(i < first, i + shift, i)
        start = tl.cast(j, tl.int64) * HKV
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, j + n < N, MASKED)
        v = load_rows(V + start * DV, n, HKV * DV, dv, DV, DVP, j + n < N, MASKED)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
        if MASKED:
            seen = sees(t[:, None], (j + n)[None, :], BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL)
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _backward_span(
    q, do, dq, t, t0, t1, ok, row, K, V, STATS, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr, INIT: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """dq += ds k of one branch for the queries t0..t1."""
    lse, delta = load_stats(STATS, row, ok)
    i, a, b, c, d = key_range(t0, t1, N, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, BN)
    if INIT % BN == 0:
        dq = _backward_tiles(
            b - i, c, b, i - b, q, do, lse, delta, t, dq, K, V, N, scale2,
            HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, False)  # fmt: skip
    else:
        dq = _backward_tiles(
            0, i, 0, 0, q, do, lse, delta, t, dq, K, V, N, scale2,
            HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, True)  # fmt: skip
        dq = _backward_tiles(
            b, c, 0, 0, q, do, lse, delta, t, dq, K, V, N, scale2,
            HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, False)  # fmt: skip
    return _backward_tiles(
        c - (b - a), d, c, b - c, q, do, lse, delta, t, dq, K, V, N, scale2,
        HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, ALIGN, WINDOW, INIT, CAUSAL, True)  # fmt: skip


@triton.jit
def _span_backward_q(
    Q, DO, DQ, KC, VC, STATSC, KW, VW, STATSW, KS, VS, STATSS, S, NC, T, offset, scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, INIT: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """DQ = scale · Σ ds k over the branches that are on, for one tile of queries of one kv head."""
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = M // G
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ
    kvh, b = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    r, d, dv = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, DVP)
    qi, h = r // G, r % G
    t, ok = offset + i + qi, (qi < BQ) & (i + qi < S)
    t0, t1 = offset + i, offset + tl.minimum(i + BQ, S) - 1
    first_row = (b.to(tl.int64) * S + i) * HQ + kvh * G
    row = qi * HQ + h
    q = load_rows(Q + first_row * D, row, D, d, D, DP, ok, True)
    do = load_rows(DO + first_row * DV, row, DV, dv, DV, DVP, ok, True)
    dq = tl.zeros([M, DP], tl.float32)
    if CMP:
        head = b.to(tl.int64) * NC * HKV + kvh
        dq = _backward_span(
            q, do, dq, t, t0, t1, ok, row, KC + head * D, VC + head * DV, STATSC + first_row * 2,
            NC, scale2, HKV, D, DV, DP, DVP, BN, BLOCK, STRIDE, 0, 0, 0, 0)  # fmt: skip
    head = b.to(tl.int64) * T * HKV + kvh
    if WIN:
        dq = _backward_span(
            q, do, dq, t, t0, t1, ok, row, KW + head * D, VW + head * DV, STATSW + first_row * 2,
            T, scale2, HKV, D, DV, DP, DVP, BN, 1, 1, 1, WINDOW, 0, 0)  # fmt: skip
    if SLC:
        dq = _backward_span(
            q, do, dq, t, t0, t1, ok, row, KS + head * D, VS + head * DV, STATSS + first_row * 2,
            T, scale2, HKV, D, DV, DP, DVP, BN, 1, 1, ALIGN, LOCAL, INIT, CAUSAL)  # fmt: skip
    at = DQ + first_row * D + row[:, None] * D + d[None, :]
    tl.store(at, (dq * scale).to(DQ.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


def forward(q: Tensor, parts: Sequence[Part], offset: int, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Attention of every query over its span of each part.

    Args:
        q: [B,S,HQ,D], whose row s is query offset + s; contiguous, as all tensors here.
        parts: of different branches.

    Returns:
        for each part o [B,S,HQ,DV] in q's dtype, and the log-sum-exp of its scores, float32 [B,S,HQ], base 2.
    """
    results = [(q.new_empty(*q.shape[:3], part.v.shape[-1]), _like_lse(q)) for part in parts]
    outputs = {part.branch: {"O": o, "LSE": lse} for part, (o, lse) in zip(parts, results, strict=True)}
    tile = _forward_tile(q, parts[0].v).holding(q.shape[2] // parts[0].k.shape[2])
    pointers = dict(Q=q) | _pointers(parts, outputs, ("O", "LSE"), q)
    launch(
        _span_forward, _grid(q, parts, tile), pointers | _numbers(q, parts, offset, scale),
        _constants(q, parts, tile) | dict(HAS_V=True), tile,
    )  # fmt: skip
    return results


def log_sum_exp(q: Tensor, k: Tensor, span: Span, offset: int, scale: float) -> Tensor:
    """Of the scores of every query over its span of compressed keys k [B,N,HKV,D]: float32 [B,S,HQ], base 2."""
    lse, parts = _like_lse(q), [Part("cmp", span, k, k)]
    tile = _forward_tile(q, k).holding(q.shape[2] // k.shape[2])
    pointers = dict(Q=q) | _pointers(parts, {"cmp": {"O": q, "LSE": lse}}, ("O", "LSE"), q)
    launch(
        _span_forward, _grid(q, parts, tile), pointers | _numbers(q, parts, offset, scale),
        _constants(q, parts, tile) | dict(HAS_V=False), tile,
    )  # fmt: skip
    return lse


def backward_q(
    q: Tensor, do: Tensor, parts: Sequence[Part], stats: Sequence[Tensor], offset: int, scale: float
) -> Tensor:
    """Gradient [B,S,HQ,D] of q from all parts, in q's dtype.

    Args:
        do: gradient [B,S,HQ,DV] of the gated sum.
        stats: of each part, float32 [B,S,HQ,2] from merge.prepare.
    """
    dq = torch.empty_like(q)
    tile = _backward_q_tile(q, parts[0].v).holding(q.shape[2] // parts[0].k.shape[2])
    rows = {part.branch: {"STATS": x} for part, x in zip(parts, stats, strict=True)}
    pointers = dict(Q=q, DO=do, DQ=dq) | _pointers(parts, rows, ("STATS",), q)
    numbers = _numbers(q, parts, offset, scale) | dict(scale=scale)
    launch(_span_backward_q, _grid(q, parts, tile), pointers | numbers, _constants(q, parts, tile), tile)
    return dq


_SUFFIX: dict[Branch, str] = {"cmp": "C", "win": "W", "slc": "S"}


def _pointers(
    parts: Sequence[Part], rows: dict[Branch, dict[str, Tensor]], names: tuple[str, ...], absent: Tensor
) -> dict[str, Tensor]:
    """Keys, values and the named tensors of every branch; `absent` stands for those of branches that are off."""
    pointers: dict[str, Tensor] = {}
    given = {part.branch: {"K": part.k, "V": part.v} | rows[part.branch] for part in parts}
    for branch, suffix in _SUFFIX.items():
        for name in ("K", "V", *names):
            pointers[name + suffix] = given[branch][name] if branch in given else absent
    return pointers


def _numbers(q: Tensor, parts: Sequence[Part], offset: int, scale: float) -> dict[str, float]:
    compressed = [part.k.shape[1] for part in parts if part.branch == "cmp"]
    tokens = [part.k.shape[1] for part in parts if part.branch != "cmp"]
    sizes = dict(S=q.shape[1], NC=compressed[0] if compressed else 0, T=tokens[0] if tokens else 0)
    return sizes | dict(offset=offset, scale2=scale * LOG2_E)


def _constants(q: Tensor, parts: Sequence[Part], tile: Tile) -> dict[str, int]:
    spans = {part.branch: part.span for part in parts}
    cmp, win, slc = (spans.get(branch, Span()) for branch in _SUFFIX)
    sizes = dict(BLOCK=cmp.block, STRIDE=cmp.stride, WINDOW=win.window, ALIGN=slc.align, LOCAL=slc.window)
    on = dict(CMP="cmp" in spans, WIN="win" in spans, SLC="slc" in spans)
    tiles = head_sizes(q, parts[0].v) | dict(M=tile.rows, BN=tile.keys)
    return tiles | on | sizes | dict(INIT=slc.init, CAUSAL=slc.causal)


def _grid(q: Tensor, parts: Sequence[Part], tile: Tile) -> tuple[int, int]:
    kv_heads = parts[0].k.shape[2]
    return ceil_div(q.shape[1], tile.rows // (q.shape[2] // kv_heads)), q.shape[0] * kv_heads


def _like_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _forward_tile(q: Tensor, v: Tensor) -> Tile:
    wide = widest(q, v)
    if q.itemsize == 4:
        return Tile(32, 32, 8) if wide <= 64 else Tile(16, 16, 8)
    if wide > 128:
        return Tile(64, 32, 8, 2)
    if arch(q) < 90:
        return Tile(128, 64, 8, 2)
    return Tile(64, 32, 4, 3, registers=128 if wide <= 64 else 168)


def _backward_q_tile(q: Tensor, v: Tensor) -> Tile:
    wide = widest(q, v)
    if q.itemsize == 4:
        return Tile(16, 32, 8)
    if wide > 128:
        return Tile(32, 32, 8)
    if arch(q) < 90:
        return Tile(64, 64, 4, 2) if wide <= 64 else Tile(128, 64, 8, 2)
    return Tile(64, 32, 4, 3, registers=128) if wide <= 64 else Tile(64, 64, 4, 2)
