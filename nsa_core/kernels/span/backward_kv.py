# pyright: reportMissingImports=false
"""Attention over spans of keys, gradients of keys and values, for all cards: a tile of keys meets its queries.

Where keys are few, their queries are cut into chunks, whose float32 parts of the gradients are summed in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...routes import Branch
from ..call import Call, Part
from ..runtime.launch import launch
from ..runtime.tiles import LOG2_E, Tile, arch, ceil_div, head_sizes, widest
from ..shared import ranges
from ..shared.ranges import (
    branch_queries,
    compressed_tokens,
    in_registers,
    load_rows,
    load_stats,
    row_tiles,
    sequence_of,
    shared_queries,
    within,
)
from .forward import stage

_PROGRAM = 1024  # sums per program


@triton.jit
def _backward_tiles(
    begin, end, first, shift, stop, k, v, dk, dv, lo, length, Q, DO, STATS, offset, scale2,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk += ds^T q and dv += p^T do for every tile of rows in [begin, end), rows from `stop` on left out.

    Tiles before `first` are read `shift` rows on.
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
        # The products of dv and dk come last: nothing in this iteration waits for them.
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
    """dk, dv += gradients from each key's `band` of queries; band0 and band1 are those of the first and last key."""
    lo, length = band[0], band[1] - band[0]
    a, b, c, stop = row_tiles(band0[0], band1[0], band0[1], band1[1], s0, s1, offset, M // G)
    dk, dv = _backward_tiles(
        b, c, 0, 0, stop, k, v, dk, dv, lo, length, Q, DO, STATS, offset, scale2, HQ, G, D, DV, DP, DVP, M, False
    )
    return _backward_tiles(
        c - (b - a), stop, c, b - c, stop, k, v, dk, dv, lo, length, Q, DO, STATS, offset, scale2,
        HQ, G, D, DV, DP, DVP, M, True)  # fmt: skip


@triton.jit
def _span_backward_kv(
    Q, K, V, DO, STATS, DK, DVALUE, CU, S, N, T, begin, offset, rows, stride, sequences, scale2, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr,
    HELD: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values in the branch that is on: CMP, WIN, SLC, or WIN and SLC that share keys.

    Grid: (tiles of keys, sequences x kv heads, chunks of queries). A program owns BN of the first N keys of one kv head
    and goes through the queries that see them in one chunk of the rows from `begin` on, with all G heads of the group.
    It writes to DK [chunks,B,N,HKV,D] and DVALUE [chunks,B,N,HKV,DV], `rows` = B·N. No branch on: keys of the initial
    blocks.
    Q [B,S,HQ,D]; DO [B,S,HQ,DV]; K, V [B,T,HKV,D or DV]; STATS [B,S,HQ,2], float32, from merge._prepare; with both WIN
    and SLC on, those of SLC_ALONE, WIN_ALONE and BOTH, `stride` numbers apart. HELD: 1 if keys stay in registers, 2 if
    keys and values do, else 0.
    VARLEN: sequences are packed, as in ranges.sequence_of; each is cut into as many chunks, the first of 512 rows or
    more. Compressed keys begin at token // STRIDE, and the keys of initial blocks, N of each sequence that is longer
    than CAUSAL, at N * (token // CAUSAL) in DK and DVALUE.
    """
    G: tl.constexpr = HQ // HKV
    tile = tl.program_id(0)
    if VARLEN:
        kvh = tl.program_id(1)
        if CMP:
            _, start, S, tile = sequence_of(CU, sequences, tile, BN * STRIDE, 1)
            N, key0 = compressed_tokens(S, BLOCK, STRIDE), (start // STRIDE).to(tl.int64)
            out0, T = key0, N
        elif WIN or SLC:
            _, start, S, tile = sequence_of(CU, sequences, tile, BN, 1)
            key0, N = start.to(tl.int64), S
            out0, T = key0, S
        else:
            place, tile = tile // tl.cdiv(N, BN), tile % tl.cdiv(N, BN)
            _, start, S, before = sequence_of(CU, sequences, place, CAUSAL, 0)
            if (before != 0) | (S <= CAUSAL):
                return
            key0, out0, T = start.to(tl.int64), place.to(tl.int64) * N, S
        if tile * BN >= N:
            return
        row0 = start.to(tl.int64)
        chunk = tl.maximum(tl.cdiv(S - begin, tl.num_programs(2)), 512)
    else:
        kvh, b = tl.program_id(1) % HKV, (tl.program_id(1) // HKV).to(tl.int64)
        row0, key0, out0, chunk = b * S, b * T, b * N, tl.cdiv(S - begin, tl.num_programs(2))
    n0 = tile * BN
    n1 = tl.minimum(n0 + BN, N) - 1
    c = tl.num_programs(2) - 1 - tl.program_id(2)  # the last queries see most keys: longest work first
    n, d, e = n0 + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    n_ok = n < N
    first = (key0 + n0) * HKV + kvh
    k = load_rows(K + first * D, n - n0, HKV * D, d, D, DP, n_ok, True)
    v = load_rows(V + first * DV, n - n0, HKV * DV, e, DV, DVP, n_ok, True)
    if HELD > 0:
        k = in_registers(k)
    if HELD > 1:
        v = in_registers(v)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DVP], tl.float32)
    first_row = row0 * HQ + kvh * G
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
            k, v, dk, dv, branch_queries(n, CMP, WIN, SLC, BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, CAUSAL),
            branch_queries(n0, CMP, WIN, SLC, BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, CAUSAL),
            branch_queries(n1, CMP, WIN, SLC, BLOCK, STRIDE, WINDOW, ALIGN, LOCAL, CAUSAL),
            s0, s1, Q, DO, STATS, offset, scale2, HQ, G, D, DV, DP, DVP, M)  # fmt: skip
    out = (c.to(tl.int64) * rows + out0 + n0) * HKV + kvh
    at = DK + out * D + (n - n0)[:, None] * (HKV * D) + d[None, :]
    tl.store(at, (dk * scale).to(DK.dtype.element_ty), mask=n_ok[:, None] & (d < D)[None, :])
    at = DVALUE + out * DV + (n - n0)[:, None] * (HKV * DV) + e[None, :]
    tl.store(at, dv.to(DVALUE.dtype.element_ty), mask=n_ok[:, None] & (e < DV)[None, :])


@triton.jit
def _sum_chunks(
    DKPART, DVPART, DK, DVALUE, CU, chunks, batch, rows, T, sequences,
    D: tl.constexpr, DV: tl.constexpr, ADD: tl.constexpr, UNROLL: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Sums over chunks of the parts of dk and dv, in order.

    Grid: (runs of N numbers, sequences). A program owns N numbers of the first `rows` tokens of one sequence; it writes
    the sums to DK [B,T,D] and DVALUE [B,T,DV], or adds them if ADD. Heads are flattened into D and DV.
    DKPART [chunks,B,rows,D], DVPART [chunks,B,rows,DV], float32. VARLEN: a sequence's parts are at the token // CAUSAL
    at which it begins, if it is longer than CAUSAL.
    """
    b, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    first = b * T
    if VARLEN:
        _, start, tokens, before = sequence_of(CU, sequences, tl.program_id(1), CAUSAL, 0)
        if (before != 0) | (tokens <= CAUSAL):
            return
        first = start.to(tl.int64)
    for of_values in tl.static_range(2):
        part, out = (DVPART, DVALUE) if of_values else (DKPART, DK)
        width = DV if of_values else D
        inside = i < rows * width
        at = out + first * width + i
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32) if ADD else tl.zeros([N], tl.float32)
        for chunk in range(0, chunks, UNROLL):
            for u in tl.static_range(UNROLL):  # independent loads
                of = part + (tl.cast(chunk + u, tl.int64) * batch + b) * rows * width + i
                total += tl.load(of, mask=inside & (0 * i + chunk + u < chunks), other=0.0)
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def backward_kv(
    q: Tensor, do: Tensor, part: Part, stats: Tensor, call: Call, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of a part's keys [B,N,HKV,D] and values [B,N,HKV,DV], in `dtype`.

    Args:
        q: [B,S,HQ,D], whose row s is query offset + s; contiguous, as all tensors here.
        do: gradient of the gated sum, [B,S,HQ,DV].
        stats: the branch's, from merge.prepare, float32 [B,S,HQ,2]. For slc with keys shared by the window: those of
            slc, of win, and of both as one, [3,B,S,HQ,2]; the gradients are then those of both branches.
    """
    if part.branch == "cmp":
        dk, dv = (torch.empty_like(x, dtype=dtype) for x in (part.k, part.v))
        _sum(compressed_kv(q, do, part, stats, call), dk, dv)
        return dk, dv
    given = q, part.k, part.v, do, stats
    rows, tokens = q.shape[1], part.k.shape[1]
    branches: tuple[Branch, ...] = ("slc", "win") if stats.dim() == 5 else (part.branch,)
    dk, dv = (x[0] for x in _launch_parts(given, branches, tokens, 0, 1, call, dtype))
    initial = min(call.config.init_blocks * call.config.slc_block, tokens)
    begin = call.causal_rows(rows)
    if part.branch == "slc" and initial and begin < rows:
        places = rows // begin if call.packed else 1  # sequences longer than `begin`, at most
        chunks = _chunks(q, part.k, part.v, places * initial, rows - begin)
        far = _launch_parts(given, (), initial, begin, chunks, call, torch.float32, places)
        _sum(far, dk, dv, call)
    return dk, dv


def compressed_kv(q: Tensor, do: Tensor, part: Part, stats: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Gradients of compressed keys and values in float32 parts, [chunks,B,N,HKV,D] and [chunks,B,N,HKV,DV].

    Args:
        q, do, part, stats: as in `backward_kv`.
    """
    tokens = part.k.shape[1]
    chunks = _chunks(q, part.k, part.v, tokens, q.shape[1])
    return _launch_parts((q, part.k, part.v, do, stats), ("cmp",), tokens, 0, chunks, call, torch.float32)


def _sum(parts: tuple[Tensor, Tensor], dk: Tensor, dv: Tensor, call: Call | None = None) -> None:
    """Write sums of parts [chunks,B,rows,HKV,.] to the first rows of dk [B,T,HKV,D] and dv [B,T,HKV,DV].

    Args:
        call: add them to the first keys of its sequences instead.
    """
    chunks, batch, rows = parts[0].shape[:3]
    dims = [x.shape[2] * x.shape[3] for x in (dk, dv)]
    pointers = dict(DKPART=parts[0], DVPART=parts[1], DK=dk, DVALUE=dv)
    numbers = dict(chunks=chunks, batch=batch, rows=rows, T=dk.shape[1])
    packed = call is not None and call.packed
    bounds = call.bounds(dk) if call is not None else dict(CU=dk, sequences=0)
    causal = 0 if call is None else call.config.slc_count * call.config.slc_block
    constants = dict(D=dims[0], DV=dims[1], ADD=call is not None, UNROLL=4, N=_PROGRAM, CAUSAL=causal, VARLEN=packed)
    grid = ceil_div(rows * max(dims), _PROGRAM), batch
    launch(_sum_chunks, grid, pointers | bounds | numbers, constants, Tile(warps=4), stage="sum_chunks_backward")


def _chunks(q: Tensor, k: Tensor, v: Tensor, tokens: int, rows: int) -> int:
    """Number of chunks of queries: more than one for few keys, which would leave most of the device idle.

    It follows from shapes alone. The float32 parts take about the memory of k and v at most.
    """
    batch, length, kv_heads, _ = k.shape
    tiles = ceil_div(tokens, _tile(q, v).keys) * batch * kv_heads
    return max(1, min(max(16, length // max(1, tokens)), ceil_div(2048, max(1, tiles)), ceil_div(rows, 512)))


def _launch_parts(
    given: tuple[Tensor, ...], branches: tuple[Branch, ...], tokens: int, begin: int, chunks: int, call: Call,
    dtype: torch.dtype, places: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the first `tokens` keys and values from the queries from row `begin` on, a part for each chunk.

    Args:
        given: q, k, v, do and stats.
        branches: those that the keys belong to; none for keys of the initial blocks and queries far behind them.
        places: sequences that may have those, if they are packed.
    """
    q, k, v, do, stats = given
    batch, _, kv_heads, dim = k.shape
    tile = _tile(q, v).holding(q.shape[2] // kv_heads)
    dk, dv = (q.new_empty(chunks, batch * places, tokens, kv_heads, size, dtype=dtype) for size in (dim, v.shape[-1]))
    pointers = dict(Q=q, K=k, V=v, DO=do, STATS=stats, DK=dk, DVALUE=dv)
    numbers = dict(S=q.shape[1], N=tokens, T=k.shape[1], begin=begin, offset=call.offset)
    numbers |= dict(rows=batch * places * tokens, stride=stats.stride(0))
    scales = dict(scale2=call.scale * LOG2_E, scale=call.scale)
    sizes, wide = ranges.sizes(call.config), widest(q, v)
    del sizes["INIT"]
    on = dict(CMP="cmp" in branches, WIN="win" in branches, SLC="slc" in branches)
    constants = head_sizes(q, v) | dict(M=tile.rows, BN=tile.keys, VARLEN=call.packed) | on | sizes
    # Hopper's products would read keys and values from shared memory each time: they stay in registers that are left.
    has_registers = q.itemsize < 4 and arch(q) >= 90 and wide <= 128
    constants |= dict(HELD=(1 if wide == 128 else 2 * on["CMP"]) if has_registers else 0)
    tiles, name = ceil_div(tokens, tile.keys) * places, stage(branches, "_backward_kv")
    if call.packed and branches:
        tiles = call.tiles(q.shape[1], tile.keys * (call.config.cmp_stride if on["CMP"] else 1), 1)
    grid = tiles, batch * kv_heads, chunks
    launch(_span_backward_kv, grid, pointers | call.bounds(q) | numbers | scales, constants, tile, stage=name)
    return dk, dv


def _tile(q: Tensor, v: Tensor) -> Tile:
    wide = widest(q, v)
    if q.itemsize == 4:
        return Tile(16, 32, 8)
    if wide <= 64 and arch(q) < 90:
        # 128 rows of a group would spill with 64 keys.
        return Tile(64, 64, 4, 2) if q.shape[2] <= 64 * v.shape[2] else Tile(128, 32, 8, 2)
    if wide <= 64:
        return Tile(64, 64, 4, 3)
    if wide > 128:
        return Tile(32, 32, 8, 1)
    if arch(q) < 90:
        return Tile(64, 64, 8, 2)
    return Tile(32, 64, 4, 3)
