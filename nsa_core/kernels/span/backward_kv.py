# pyright: reportMissingImports=false
"""Attention over spans of keys, backward towards keys and values: a tile of keys meets all queries that see it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan import Part, Plan
from ..runtime.launch import launch
from ..runtime.tiles import LOG2_E, Tile, arch, ceil_div, head_sizes, widest
from ..shared import ranges
from ..shared.ranges import (
    compressed_queries,
    in_registers,
    initial_queries,
    load_rows,
    load_stats,
    local_queries,
    row_tiles,
    shared_queries,
    window_queries,
    within,
)

_PROGRAM = 1024  # numbers that a program sums up


@triton.jit
def _backward_tiles(
    begin, end, first, shift, stop, k, v, dk, dv, lo, length, Q, DO, STATS, offset, scale2,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, MASKED: tl.constexpr,
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
            p = tl.where(within((offset + i + qi)[None, :], lo[:, None], length[:, None]), p, 0.0)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        # Nothing in this turn waits for dv and dk, so they come after what is waited for.
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _backward_band(
    k, v, dk, dv, band, band0, band1, s0, s1, Q, DO, STATS, offset, scale2,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """dk, dv += those of the queries in `band` of each key; band0 and band1 are those of the first and last key."""
    lo, length = band[0], band[1] - band[0]
    a, b, c, stop = row_tiles(band0[0], band1[0], band0[1], band1[1], s0, s1, offset, M // G)
    dk, dv = _backward_tiles(
        b, c, 0, 0, stop, k, v, dk, dv, lo, length, Q, DO, STATS, offset, scale2, HQ, G, D, DV, DP, DVP, M, False
    )
    return _backward_tiles(
        c - (b - a), stop, c, b - c, stop, k, v, dk, dv, lo, length, Q, DO, STATS, offset, scale2,
        HQ, G, D, DV, DP, DVP, M, True)  # fmt: skip


@triton.jit
def _queries(
    n, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The band of queries of key n in the branch that is on; of the initial blocks if none is."""
    if CMP:
        return compressed_queries(n, BLOCK, STRIDE)
    elif WIN:  # noqa: RET505  Triton compiles what follows a return, too
        return window_queries(n, WINDOW)
    elif SLC:
        return local_queries(n, ALIGN, LOCAL, CAUSAL)
    else:
        return initial_queries(n, CAUSAL)


@triton.jit
def _span_backward_kv(
    Q, K, V, DO, STATS, DK, DVALUE, S, N, T, begin, offset, chunk, batch, stride, scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """DK, DVALUE [chunks,B,N,HKV,D] of one tile of keys from one chunk of the queries from row `begin` on.

    Of both WIN and SLC, for keys that they share: STATS are those of SLC_ALONE, WIN_ALONE and BOTH, `stride` apart.
    HELD: how many of keys and values stay in registers.
    """
    G: tl.constexpr = HQ // HKV
    n0 = tl.program_id(0) * BN
    n1 = tl.minimum(n0 + BN, N) - 1
    kvh, b = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    c = tl.num_programs(2) - 1 - tl.program_id(2)  # the last queries see most keys: longest work first
    n, d, e = n0 + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    n_ok = n < N
    first = (b.to(tl.int64) * T + n0) * HKV + kvh
    k = load_rows(K + first * D, n - n0, HKV * D, d, D, DP, n_ok, True)
    v = load_rows(V + first * DV, n - n0, HKV * DV, e, DV, DVP, n_ok, True)
    if HELD > 0:
        k = in_registers(k)
    if HELD > 1:
        v = in_registers(v)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DVP], tl.float32)
    first_row = b.to(tl.int64) * S * HQ + kvh * G
    Q += first_row * D
    DO += first_row * DV
    STATS += first_row * 2
    s0 = begin + c * chunk
    s1 = tl.minimum(s0 + chunk, S)
    if WIN and SLC:
        for kind in tl.static_range(3):
            of_kind = STATS + tl.cast(kind, tl.int64) * stride
            dk, dv = _backward_band(
                k, v, dk, dv, shared_queries(n, kind, WINDOW, ALIGN, LOCAL, CAUSAL),
                shared_queries(n0, kind, WINDOW, ALIGN, LOCAL, CAUSAL),
                shared_queries(n1, kind, WINDOW, ALIGN, LOCAL, CAUSAL),
                s0, s1, Q, DO, of_kind, offset, scale2, HQ, G, D, DV, DP, DVP, M)  # fmt: skip
    else:
        dk, dv = _backward_band(
            k, v, dk, dv, _queries(n, CMP, WIN, SLC, BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, CAUSAL),
            _queries(n0, CMP, WIN, SLC, BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, CAUSAL),
            _queries(n1, CMP, WIN, SLC, BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, CAUSAL),
            s0, s1, Q, DO, STATS, offset, scale2, HQ, G, D, DV, DP, DVP, M)  # fmt: skip
    out = ((c.to(tl.int64) * batch + b) * N + n0) * HKV + kvh
    at = DK + out * D + (n - n0)[:, None] * (HKV * D) + d[None, :]
    tl.store(at, (dk * scale).to(DK.dtype.element_ty), mask=n_ok[:, None] & (d < D)[None, :])
    at = DVALUE + out * DV + (n - n0)[:, None] * (HKV * DV) + e[None, :]
    tl.store(at, dv.to(DVALUE.dtype.element_ty), mask=n_ok[:, None] & (e < DV)[None, :])


@triton.jit
def _sum_chunks(
    DKPART, DVPART, DK, DVALUE, chunks, batch, rows, T,
    D: tl.constexpr, DV: tl.constexpr, ADD: tl.constexpr, UNROLL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """DK [B,T,D] and DVALUE [B,T,DV] of the first `rows` tokens: sums of parts [chunks,B,rows,D], added if ADD.

    Heads are flattened into D; N numbers a program.
    """
    b, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    for of_values in tl.static_range(2):
        part, out = (DVPART, DVALUE) if of_values else (DKPART, DK)
        width = DV if of_values else D
        inside = i < rows * width
        at = out + b * T * width + i
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32) if ADD else tl.zeros([N], tl.float32)
        for chunk in range(0, chunks, UNROLL):
            for u in tl.static_range(UNROLL):  # loads that do not wait for each other
                of = part + (tl.cast(chunk + u, tl.int64) * batch + b) * rows * width + i
                total += tl.load(of, mask=inside & (0 * i + chunk + u < chunks), other=0.0)
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def backward_kv(
    q: Tensor, do: Tensor, part: Part, stats: Tensor, plan: Plan, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of a part's keys [B,N,HKV,D] and values [B,N,HKV,DV], in `dtype`.

    Args:
        q: [B,S,HQ,D], whose row s is query offset + s; contiguous, as all tensors here.
        do: gradient [B,S,HQ,DV] of the gated sum.
        stats: float32 [B,S,HQ,2] from merge.prepare. Of the selected branch, where the window shares its keys, these,
            the window's and those of both [3,B,S,HQ,2]: the gradients are those of both branches then.
    """
    if part.branch == "cmp":
        dk, dv = (torch.empty_like(x, dtype=dtype) for x in (part.k, part.v))
        _sum(compressed_kv(q, do, part, stats, plan), dk, dv, add=False)
        return dk, dv
    given = q, part.k, part.v, do, stats
    rows, tokens = q.shape[1], part.k.shape[1]
    on = {"CMP": False, "WIN": part.branch == "win" or stats.dim() == 5, "SLC": part.branch == "slc"}
    dk, dv = (x[0] for x in _launch(given, on, tokens, 0, 1, plan, dtype))
    initial = min(plan.config.init_blocks * plan.config.slc_block, tokens)
    begin = plan.causal_rows(rows)
    if part.branch == "slc" and initial and begin < rows:
        chunks = _chunks(q, part.k, part.v, initial, rows - begin)
        far = _launch(given, dict.fromkeys(on, False), initial, begin, chunks, plan, torch.float32)
        _sum(far, dk, dv, add=True)
    return dk, dv


def compressed_kv(q: Tensor, do: Tensor, part: Part, stats: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Gradients of compressed keys and values in parts, [chunks,B,N,HKV,D] and [chunks,B,N,HKV,DV], in float32."""
    chunks = _chunks(q, part.k, part.v, part.k.shape[1], q.shape[1])
    on = {"CMP": True, "WIN": False, "SLC": False}
    return _launch((q, part.k, part.v, do, stats), on, part.k.shape[1], 0, chunks, plan, torch.float32)


def _sum(parts: tuple[Tensor, Tensor], dk: Tensor, dv: Tensor, add: bool) -> None:
    """Sums parts [chunks,B,rows,HKV,.] into the first rows of dk [B,T,HKV,D] and dv [B,T,HKV,DV], or adds them."""
    chunks, batch, rows = parts[0].shape[:3]
    dims = [x.shape[2] * x.shape[3] for x in (dk, dv)]
    pointers = dict(DKPART=parts[0], DVPART=parts[1], DK=dk, DVALUE=dv)
    numbers = dict(chunks=chunks, batch=batch, rows=rows, T=dk.shape[1])
    constants = dict(D=dims[0], DV=dims[1], ADD=add, UNROLL=4, N=_PROGRAM)
    grid = ceil_div(rows * max(dims), _PROGRAM), batch
    launch(_sum_chunks, grid, pointers | numbers, constants, Tile(warps=4))


def _chunks(q: Tensor, k: Tensor, v: Tensor, tokens: int, rows: int) -> int:
    """Few keys with many queries each would leave most of the device idle: their queries are cut into chunks.

    A function of shape alone; at most about as many as make the float32 parts take the memory of k and v.
    """
    batch, length, kv_heads, _ = k.shape
    tiles = ceil_div(tokens, _tile(q, v).keys) * batch * kv_heads
    return max(1, min(max(16, length // max(1, tokens)), ceil_div(2048, max(1, tiles)), ceil_div(rows, 512)))


def _launch(
    given: tuple[Tensor, ...], on: Mapping[str, bool], tokens: int, begin: int, chunks: int, plan: Plan,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the first `tokens` keys and values from the queries from row `begin` on, a part for each chunk."""
    q, k, v, do, stats = given
    batch, _, kv_heads, dim = k.shape
    tile = _tile(q, v).holding(q.shape[2] // kv_heads)
    dk, dv = (q.new_empty(chunks, batch, tokens, kv_heads, size, dtype=dtype) for size in (dim, v.shape[-1]))
    pointers = dict(Q=q, K=k, V=v, DO=do, STATS=stats, DK=dk, DVALUE=dv)
    chunk = ceil_div(q.shape[1] - begin, chunks)
    places = dict(begin=begin, offset=plan.offset, chunk=chunk, batch=batch, stride=stats.stride(0))
    numbers = dict(S=q.shape[1], N=tokens, T=k.shape[1]) | places
    scales = dict(scale2=plan.scale * LOG2_E, scale=plan.scale)
    sizes = ranges.sizes(plan.config)
    del sizes["INIT"]
    constants = head_sizes(q, v) | dict(M=tile.rows, BN=tile.keys) | on | sizes | dict(HELD=_held(q, v, on["CMP"]))
    grid = ceil_div(tokens, tile.keys), batch * kv_heads, chunks
    launch(_span_backward_kv, grid, pointers | numbers | scales, constants, tile)
    return dk, dv


def _held(q: Tensor, v: Tensor, compressed: bool) -> int:
    """How many of keys and values stay in registers: both, keys alone or none.

    Where registers are left, on Hopper, whose products else read them from shared memory each time.
    """
    wide = widest(q, v)
    if q.itemsize == 4 or arch(q) < 90 or wide > 128:
        return 0
    if wide == 128:
        return 1
    return 2 if compressed else 0


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
