# pyright: reportMissingImports=false
"""Attention over spans of keys, forward, for all cards: compressed keys, the window, and the forced blocks.

Spans are contiguous: all compressed keys before a query, its window, and the blocks that every query selects (the
initial and local ones). A program holds one tile of queries and goes through the spans of all branches that are on, so
that queries are read once; where the window and the selected branch share keys, their common keys are computed once.
Hopper has a kernel of its own for the common case (spans_hopper.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...routes import Branch
from ..call import Call, Part
from ..runtime.launch import launch
from ..runtime.tiles import LOG2_E, Tile, arch, ceil_div, head_sizes, widest
from ..shared import hopper, ranges
from ..shared.ranges import (
    BOTH,
    SLC_ALONE,
    WIN_ALONE,
    compressed_keys,
    initial_keys,
    key_tiles,
    load_rows,
    local_keys,
    shared_keys,
    tile_of_rows,
    window_keys,
    within,
)
from ..shared.rescale import later_maximum, rescaled
from . import spans_hopper


@triton.jit
def _forward_tiles(
    begin, end, first, shift, q, lo, length, m, l, acc, K, V, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    HAS_V: tl.constexpr, LATE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles of keys in [begin, end); tiles before `first` are read `shift` keys on."""
    n, d, dv = tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    for i in tl.range(begin, end, BN):
        j = tl.where(i < first, i + shift, i)
        start = tl.cast(j, tl.int64) * HKV
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, j + n < N, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            s = tl.where(within((j + n)[None, :], lo[:, None], length[:, None]), s, float("-inf"))
        top = tl.max(s, 1) * scale2
        larger = later_maximum(m, top) if LATE else tl.maximum(m, top)
        shrink = tl.exp2(m - larger)
        p = tl.exp2(s * scale2 - larger[:, None])
        l = l * shrink + tl.sum(p, 1)
        if HAS_V:
            v = load_rows(V + start * DV, n, HKV * DV, dv, DV, DVP, j + n < N, MASKED)
            acc = rescaled(acc, shrink, LATE) if LATE else acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m = larger
    return m, l, acc


@triton.jit
def _forward_band(
    q, band, band0, band1, m, l, acc, K, V, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    HAS_V: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """The online softmax over each row's `band` of keys; band0 and band1 are the bands of the first and last row."""
    lo, length = band[0], band[1] - band[0]
    a, b, c, d = key_tiles(band0[0], band1[0], band0[1], band1[1], BN)
    m, l, acc = _forward_tiles(
        b, c, 0, 0, q, lo, length, m, l, acc, K, V, N, scale2, HKV, D, DV, DP, DVP, BN, HAS_V, LATE, False
    )
    return _forward_tiles(
        c - (b - a), d, c, b - c, q, lo, length, m, l, acc, K, V, N, scale2, HKV, D, DV, DP, DVP, BN, HAS_V, LATE, True
    )


@triton.jit
def _write(m, l, acc, O, LSE, row, ok, DV: tl.constexpr, DVP: tl.constexpr, HAS_V: tl.constexpr):
    any_key = l > 0
    tl.store(LSE + row, tl.where(any_key, m + tl.log2(l), float("inf")), mask=ok)
    if HAS_V:
        dv = tl.arange(0, DVP)
        acc = acc * tl.where(any_key, 1.0 / l, 0.0)[:, None]
        tl.store(O + row[:, None] * DV + dv[None, :], acc.to(O.dtype.element_ty), mask=ok[:, None] & (dv < DV)[None, :])


@triton.jit
def _shared_band(
    q, kind, t, t0, t1, m, l, acc, K, V, T, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, INIT: tl.constexpr, CAUSAL: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """The online softmax over the shared keys of one kind: SLC_ALONE, WIN_ALONE or BOTH."""
    return _forward_band(
        q, shared_keys(t, kind, WINDOW, ALIGN, LOCAL, INIT, CAUSAL),
        shared_keys(t0, kind, WINDOW, ALIGN, LOCAL, INIT, CAUSAL),
        shared_keys(t1, kind, WINDOW, ALIGN, LOCAL, INIT, CAUSAL),
        m, l, acc, K, V, T, scale2, HKV, D, DV, DP, DVP, BN, True, LATE)  # fmt: skip


@triton.jit
def _forward_shared(
    q, t, t0, t1, row, ok, K, V, OW, LSEW, OS, LSES, T, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr, INIT: tl.constexpr,
    CAUSAL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Window and selected branch where they share keys.

    Row pointers start at the tile's first row, K and V at the kv head's first key.
    """
    m0 = tl.full([M], -1e30, tl.float32)
    l0 = tl.zeros([M], tl.float32)
    acc0 = tl.zeros([M, DVP], tl.float32)
    m_both, l_both, acc = _shared_band(
        q, BOTH, t, t0, t1, m0, l0, acc0, K, V, T, scale2,
        HKV, D, DV, DP, DVP, BN, WINDOW, ALIGN, LOCAL, INIT, CAUSAL, LATE)  # fmt: skip
    # The softmax over common keys is kept in the selected branch's output while the window goes on from it.
    _write(m_both, l_both, acc, OS, LSES, row, ok, DV, DVP, True)
    m, l, acc = _shared_band(
        q, WIN_ALONE, t, t0, t1, m_both, l_both, acc, K, V, T, scale2,
        HKV, D, DV, DP, DVP, BN, WINDOW, ALIGN, LOCAL, INIT, CAUSAL, LATE)  # fmt: skip
    _write(m, l, acc, OW, LSEW, row, ok, DV, DVP, True)
    m, l, acc = _shared_band(
        q, SLC_ALONE, t, t0, t1, m0, l0, acc0, K, V, T, scale2,
        HKV, D, DV, DP, DVP, BN, WINDOW, ALIGN, LOCAL, INIT, CAUSAL, LATE)  # fmt: skip
    larger = tl.maximum(m, m_both)
    shrink, l_both = tl.exp2(m - larger), l_both * tl.exp2(m_both - larger)
    tl.debug_barrier()  # between warps: rows are read after they are written, and overwritten after they are read
    both = load_rows(OS, row, DV, tl.arange(0, DVP), DV, DVP, ok, True).to(tl.float32)
    tl.debug_barrier()
    acc = acc * shrink[:, None] + both * l_both[:, None]
    _write(larger, l * shrink + l_both, acc, OS, LSES, row, ok, DV, DVP, True)


@triton.jit
def _span_forward(
    Q, KC, VC, OC, LSEC, KW, VW, OW, LSEW, KS, VS, OS, LSES, CU, S, NC, T, offset, skip, sequences, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr,
    INIT: tl.constexpr, CAUSAL: tl.constexpr, HAS_V: tl.constexpr, LATE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries over its spans of keys, for each branch that is on (CMP, WIN, SLC).

    Grid: (tiles of queries, sequences x kv heads). A program owns M // G queries of one kv head with all G heads of the
    group. For each branch it writes the output to OC, OW or OS [B,S,HQ,DV] and the base-2 log-sum-exp to LSEC, LSEW or
    LSES [B,S,HQ], float32. Rows before `skip` and later ones are never in one tile.
    Q [B,S,HQ,D]; KC, VC [B,NC,HKV,D or DV]; KW, VW, KS, VS [B,T,HKV,D or DV]. SHARED: KS and VS are the window's, too.
    HAS_V: if not, only log-sum-exps are written. LATE: warps if sums are rescaled late (shared/rescale.py), else 0.
    VARLEN: B is 1, and sequences are packed with bounds CU int32 [sequences + 1]; see ranges.sequence_of.
    """
    G: tl.constexpr = HQ // HKV
    kvh, i, stop, row0, cmp0, key0, NC, T = tile_of_rows(
        CU, sequences, S, NC, T, skip, HKV, M // G, BLOCK, STRIDE, VARLEN
    )
    if VARLEN:  # noqa: SIM102  a constant of the compiler and a number
        if i >= stop:
            return
    r, d = tl.arange(0, M), tl.arange(0, DP)
    qi, h = r // G, r % G
    t, t0, t1, ok = offset + i + qi, offset + i, offset + stop - 1, i + qi < stop
    first_row = (row0 + i) * HQ + kvh * G
    row = qi * HQ + h
    q = load_rows(Q + first_row * D, row, D, d, D, DP, ok, True)
    OC, OW, OS = OC + first_row * DV, OW + first_row * DV, OS + first_row * DV
    LSEC, LSEW, LSES = LSEC + first_row, LSEW + first_row, LSES + first_row
    m0 = tl.full([M], -1e30, tl.float32)
    l0 = tl.zeros([M], tl.float32)
    acc0 = tl.zeros([M, DVP], tl.float32)
    if CMP:
        head = cmp0 * HKV + kvh
        m, l, acc = _forward_band(
            q, compressed_keys(t, BLOCK, STRIDE), compressed_keys(t0, BLOCK, STRIDE),
            compressed_keys(t1, BLOCK, STRIDE), m0, l0, acc0, KC + head * D, VC + head * DV, NC, scale2,
            HKV, D, DV, DP, DVP, BN, HAS_V, LATE)  # fmt: skip
        _write(m, l, acc, OC, LSEC, row, ok, DV, DVP, HAS_V)
    head = key0 * HKV + kvh
    KW, VW, KS, VS = KW + head * D, VW + head * DV, KS + head * D, VS + head * DV
    if SHARED:
        _forward_shared(
            q, t, t0, t1, row, ok, KS, VS, OW, LSEW, OS, LSES, T, scale2, HKV, D, DV, DP, DVP, M, BN,
            WINDOW, ALIGN, LOCAL, INIT, CAUSAL, LATE)  # fmt: skip
    else:
        if WIN:
            m, l, acc = _forward_band(
                q, window_keys(t, WINDOW), window_keys(t0, WINDOW), window_keys(t1, WINDOW),
                m0, l0, acc0, KW, VW, T, scale2, HKV, D, DV, DP, DVP, BN, HAS_V, LATE)  # fmt: skip
            _write(m, l, acc, OW, LSEW, row, ok, DV, DVP, HAS_V)
        if SLC:
            m, l, acc = m0, l0, acc0
            if INIT > 0:
                m, l, acc = _forward_band(
                    q, initial_keys(t, INIT, CAUSAL), initial_keys(t0, INIT, CAUSAL), initial_keys(t1, INIT, CAUSAL),
                    m, l, acc, KS, VS, T, scale2, HKV, D, DV, DP, DVP, BN, HAS_V, LATE)  # fmt: skip
            m, l, acc = _forward_band(
                q, local_keys(t, ALIGN, LOCAL, CAUSAL), local_keys(t0, ALIGN, LOCAL, CAUSAL),
                local_keys(t1, ALIGN, LOCAL, CAUSAL),
                m, l, acc, KS, VS, T, scale2, HKV, D, DV, DP, DVP, BN, HAS_V, LATE)  # fmt: skip
            _write(m, l, acc, OS, LSES, row, ok, DV, DVP, HAS_V)


def attend_spans(
    q: Tensor, parts: Sequence[Part], call: Call, gates: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Attention of every query over its span of each part.

    Args:
        q: [B,S,HQ,D], whose row s is query offset + s; contiguous, as all tensors here.
        parts: keys and values of each branch.
        gates: [B,S,HQ,len(parts)]; if given, Hopper's kernel sums cmp and win, weighted by these.

    Returns:
        each part's output [B,S,HQ,DV] in q's dtype, and each part's base-2 log-sum-exp, float32 [B,S,HQ]. Where cmp and
        win are summed: their sum and slc's output, and the log-sum-exps of cmp and slc.
    """
    summed = gates is not None and hopper.attends_to_all(q, parts, call)
    own = parts[:-1] if summed else parts
    results = [q.new_empty(*q.shape[:3], part.v.shape[-1]) for part in own]
    lses = [q.new_empty(q.shape[:3], dtype=torch.float32) for _ in own]
    outputs = {part.branch: dict(O=o, LSE=lse) for part, o, lse in zip(own, results, lses, strict=True)}
    if summed:
        outputs["win"] = outputs["slc"]  # placeholders of the right types, never written
    _launch_forward(q, parts, outputs, call, has_v=True, gates=gates if summed else None)
    return results, lses


def log_sum_exp(q: Tensor, k_cmp: Tensor, call: Call) -> Tensor:
    """Base-2 log-sum-exp of every query's scores over compressed keys [B,N,HKV,D]: float32 [B,S,HQ]."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _launch_forward(q, [Part("cmp", k_cmp, k_cmp)], {"cmp": dict(O=q, LSE=lse)}, call, has_v=False)
    return lse


def _launch_forward(
    q: Tensor, parts: Sequence[Part], outputs: Mapping[Branch, Mapping[str, Tensor]], call: Call, has_v: bool,
    gates: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel that fits; `gates`: those by which cmp and win are summed, if they are."""
    arguments = dict(Q=q) | span_arguments(q, parts, outputs, call)
    if hopper.attends_to_all(q, parts, call):
        constants = span_constants(q, parts, spans_hopper.FORWARD[1], call) | dict(SUMMED=gates is not None)
        arguments, rows = arguments | dict(GATES=q if gates is None else gates), ("Q", "OC", "OW", "OS")
        hopper.start(spans_hopper.FORWARD, None, arguments, constants, stage="compressed_window_forced", by_rows=rows)
        return
    tile = _tile(q, parts).holding(q.shape[2] // parts[0].k.shape[2])
    is_late = arch(q) == 90 and q.itemsize == 2 and widest(q, parts[0].v) == 128  # it pays for wide rows
    constants = dict(HAS_V=has_v, LATE=tile.warps if is_late else 0)
    launch_spans(_span_forward, parts, arguments, constants, tile, call)


# By branch: the suffix of kernel arguments, and the stage.
_NAMES: dict[Branch, tuple[str, str]] = {"cmp": ("C", "compressed"), "win": ("W", "window"), "slc": ("S", "forced")}


@cache
def stage(branches: tuple[Branch, ...], direction: str = "") -> str:
    """Stage of a launch over the spans of `branches`, or over the initial blocks alone if there are none."""
    return ("_".join(name for branch, (_, name) in _NAMES.items() if branch in branches) or "forced") + direction


def span_arguments(
    q: Tensor, parts: Sequence[Part], tensors: Mapping[Branch, Mapping[str, Tensor]], call: Call
) -> dict[str, Any]:
    """Kernel arguments: keys, values and the named `tensors` of every branch; lengths, positions and the scale, base 2.

    q is the placeholder for the tensors of branches that are off.
    """
    given = {part.branch: dict(K=part.k, V=part.v) | tensors[part.branch] for part in parts}
    names = given[parts[0].branch]
    found: dict[str, Any] = {
        name + suffix: given[branch][name] if branch in given else q
        for branch, (suffix, _) in _NAMES.items()
        for name in names
    }
    tokens = {part.branch: part.k.shape[1] for part in parts}
    skip = call.causal_rows(q.shape[1]) if "slc" in tokens else 0
    found |= dict(S=q.shape[1], NC=tokens.pop("cmp", 0), T=next(iter(tokens.values()), 0))
    return found | dict(offset=call.offset, skip=skip, scale2=call.scale * LOG2_E)


def span_constants(q: Tensor, parts: Sequence[Part], tile: Tile, call: Call) -> dict[str, int]:
    """Kernel constants: head sizes, the tile, branches that are on, and block sizes."""
    names = {part.branch for part in parts}
    on = dict(CMP="cmp" in names, WIN="win" in names, SLC="slc" in names, SHARED=call.shared)
    return head_sizes(q, parts[0].v) | dict(M=tile.rows, BN=tile.keys) | on | ranges.sizes(call.config)


def launch_spans(
    kernel: object, parts: Sequence[Part], arguments: dict[str, Any], constants: dict[str, int], tile: Tile, call: Call,
    direction: str = "",
) -> None:  # fmt: skip
    """Launch over tiles of rows, and sequences x kv heads; rows that select every block share no tile with later ones.

    Args:
        arguments, constants: Q and `span_arguments`, and constants besides `span_constants`.
    """
    q, kv_heads, skip = arguments["Q"], parts[0].k.shape[2], arguments["skip"]
    rows = tile.rows // (q.shape[2] // kv_heads)
    grid = ceil_div(skip, rows) + ceil_div(q.shape[1] - skip, rows), q.shape[0] * kv_heads
    if call.packed:
        grid = call.tiles(q.shape[1], rows, 2), kv_heads
    constants = span_constants(q, parts, tile, call) | constants | dict(VARLEN=call.packed)
    launch(kernel, grid, arguments | call.bounds(q), constants, tile, stage=stage(call.branches, direction))


def _tile(q: Tensor, parts: Sequence[Part]) -> Tile:
    wide = widest(q, parts[0].v)
    if q.itemsize == 4:
        return Tile(32, 32, 8) if wide <= 64 else Tile(16, 16, 8)
    if wide > 128:
        return Tile(64, 32, 8, 2)
    if arch(q) < 90:
        # Rows of a group beyond 64 heads would spill with four warps.
        wide_tile = wide <= 64 or q.shape[2] > 64 * parts[0].k.shape[2]
        return Tile(128, 64, 8, 2) if wide_tile else Tile(64, 64, 4, 2)
    if wide <= 64:
        return Tile(128, 64, 8, 3, registers=128)
    if q.shape[2] > 8 * parts[0].k.shape[2]:
        return Tile(128, 32, 8, 3, registers=128)
    return Tile(64, 32, 4, 3, registers=168)
