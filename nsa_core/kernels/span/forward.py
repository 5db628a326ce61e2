# pyright: reportMissingImports=false
"""Attention over spans of keys, forward: what of the branches is dense and contiguous.

The compressed branch, the window, and of the selected branch the blocks that every query selects. A program holds one
tile of queries and goes through the spans of all branches that it is given, so that queries are read once; where the
window and the selected branch share keys, what both see is computed once. The backward towards queries is in
span_queries.py, towards keys in span_keys.py. For Hopper there is another forward in span_hopper.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...routes import Branch
from ..plan import Part, Plan
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
from . import forward_hopper as span_hopper


@triton.jit
def _forward_tiles(
    begin, end, first, shift, q, lo, length, m, l, acc, K, V, N, scale2,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    HAS_V: tl.constexpr, LATE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for every tile of keys in [begin, end); those before `first` lie `shift` away."""
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
    """The online softmax over the keys in `band` of each row; band0 and band1 are those of the first and last row."""
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
    """The online softmax over the shared keys of one kind."""
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
    """Window and selected branch where they share keys; pointers begin at the tile's first row, or head's first key."""
    m0 = tl.full([M], -1e30, tl.float32)
    l0 = tl.zeros([M], tl.float32)
    acc0 = tl.zeros([M, DVP], tl.float32)
    m_both, l_both, acc = _shared_band(
        q, BOTH, t, t0, t1, m0, l0, acc0, K, V, T, scale2,
        HKV, D, DV, DP, DVP, BN, WINDOW, ALIGN, LOCAL, INIT, CAUSAL, LATE)  # fmt: skip
    # Of the selected branch this part waits in its output, while the window goes on from it.
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
    tl.debug_barrier()  # what one warp wrote another may read, and write anew only after that
    both = load_rows(OS, row, DV, tl.arange(0, DVP), DV, DVP, ok, True).to(tl.float32)
    tl.debug_barrier()
    acc = acc * shrink[:, None] + both * l_both[:, None]
    _write(larger, l * shrink + l_both, acc, OS, LSES, row, ok, DV, DVP, True)


@triton.jit
def _span_forward(
    Q, KC, VC, OC, LSEC, KW, VW, OW, LSEW, KS, VS, OS, LSES, S, NC, T, offset, skip, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, CMP: tl.constexpr, WIN: tl.constexpr, SLC: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, ALIGN: tl.constexpr, LOCAL: tl.constexpr,
    INIT: tl.constexpr, CAUSAL: tl.constexpr, HAS_V: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Outputs and base-2 log-sum-exp of the branches that are on, for one tile of queries of one kv head.

    LATE: this program's warps where sums are rescaled late (rescale.py), else 0.
    """
    G: tl.constexpr = HQ // HKV
    i, stop = tile_of_rows(S, skip, M // G)
    kvh, b = tl.program_id(1) % HKV, tl.program_id(1) // HKV
    r, d = tl.arange(0, M), tl.arange(0, DP)
    qi, h = r // G, r % G
    t, t0, t1, ok = offset + i + qi, offset + i, offset + stop - 1, i + qi < stop
    first_row = (b.to(tl.int64) * S + i) * HQ + kvh * G
    row = qi * HQ + h
    q = load_rows(Q + first_row * D, row, D, d, D, DP, ok, True)
    OC, OW, OS = OC + first_row * DV, OW + first_row * DV, OS + first_row * DV
    LSEC, LSEW, LSES = LSEC + first_row, LSEW + first_row, LSES + first_row
    m0 = tl.full([M], -1e30, tl.float32)
    l0 = tl.zeros([M], tl.float32)
    acc0 = tl.zeros([M, DVP], tl.float32)
    if CMP:
        head = b.to(tl.int64) * NC * HKV + kvh
        m, l, acc = _forward_band(
            q, compressed_keys(t, BLOCK, STRIDE), compressed_keys(t0, BLOCK, STRIDE),
            compressed_keys(t1, BLOCK, STRIDE), m0, l0, acc0, KC + head * D, VC + head * DV, NC, scale2,
            HKV, D, DV, DP, DVP, BN, HAS_V, LATE)  # fmt: skip
        _write(m, l, acc, OC, LSEC, row, ok, DV, DVP, HAS_V)
    head = b.to(tl.int64) * T * HKV + kvh
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


def forward(
    q: Tensor, parts: Sequence[Part], plan: Plan, gates: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Attention of every query over its span of each part.

    Args:
        q: [B,S,HQ,D], whose row s is query offset + s; contiguous, as all tensors here.
        parts: of different branches.
        gates: [B,S,HQ,len(parts)], by which cmp and win may be summed.

    Returns:
        for each part o [B,S,HQ,DV] in q's dtype, and for each the log-sum-exp of its scores, float32 [B,S,HQ], base 2.
        Or, where cmp and win are summed: their sum and o of slc, and the log-sum-exps of cmp and slc.
    """
    summed = gates is not None and hopper.attends_to_all(q, parts, plan)
    own = parts[:-1] if summed else parts
    results = [q.new_empty(*q.shape[:3], part.v.shape[-1]) for part in own]
    lses = [_like_lse(q) for _ in own]
    outputs = {part.branch: {"O": o, "LSE": lse} for part, o, lse in zip(own, results, lses, strict=True)}
    if summed:
        outputs["win"] = outputs["slc"]  # of the right types, and not written
    _launch(q, parts, outputs, plan, has_v=True, gates=gates if summed else None)
    return results, lses


def log_sum_exp(q: Tensor, k_cmp: Tensor, plan: Plan) -> Tensor:
    """Of the scores of every query over compressed keys [B,N,HKV,D]: float32 [B,S,HQ], base 2."""
    lse = _like_lse(q)
    _launch(q, [Part("cmp", k_cmp, k_cmp)], {"cmp": {"O": q, "LSE": lse}}, plan, has_v=False)
    return lse


def _launch(
    q: Tensor, parts: Sequence[Part], outputs: Mapping[Branch, Mapping[str, Tensor]], plan: Plan, has_v: bool,
    gates: Tensor | None = None,
) -> None:  # fmt: skip
    """`gates`: by which compressed branch and window are summed, if they are."""
    arguments = dict(Q=q) | pointers(parts, outputs, ("O", "LSE"), q) | numbers(q, parts, plan)
    if hopper.attends_to_all(q, parts, plan):
        span_hopper.start(arguments, constants(q, parts, span_hopper.TILE, plan), gates)
        return
    tile = _tile(q, parts).holding(q.shape[2] // parts[0].k.shape[2])
    late = tile.warps if _rescales_late(q, parts) else 0
    sizes = constants(q, parts, tile, plan) | dict(HAS_V=has_v, LATE=late)
    launch(_span_forward, grid(q, parts, tile, plan), arguments, sizes, tile)


_SUFFIX: dict[Branch, str] = {"cmp": "C", "win": "W", "slc": "S"}


def pointers(
    parts: Sequence[Part], rows: Mapping[Branch, Mapping[str, Tensor]], names: tuple[str, ...], absent: Tensor
) -> dict[str, Tensor]:
    """Keys, values and the named tensors of every branch; `absent` stands for those of branches that are off."""
    found: dict[str, Tensor] = {}
    given = {part.branch: {"K": part.k, "V": part.v} | dict(rows[part.branch]) for part in parts}
    for branch, suffix in _SUFFIX.items():
        for name in ("K", "V", *names):
            found[name + suffix] = given[branch][name] if branch in given else absent
    return found


def numbers(q: Tensor, parts: Sequence[Part], plan: Plan) -> dict[str, float]:
    compressed = [part.k.shape[1] for part in parts if part.branch == "cmp"]
    tokens = [part.k.shape[1] for part in parts if part.branch != "cmp"]
    sizes = dict(S=q.shape[1], NC=compressed[0] if compressed else 0, T=tokens[0] if tokens else 0)
    places = dict(offset=plan.offset, skip=_early_rows(q, parts, plan))
    return sizes | places | dict(scale2=plan.scale * LOG2_E)


def constants(q: Tensor, parts: Sequence[Part], tile: Tile, plan: Plan) -> dict[str, int]:
    names = {part.branch for part in parts}
    on = dict(CMP="cmp" in names, WIN="win" in names, SLC="slc" in names, SHARED=plan.shared)
    return head_sizes(q, parts[0].v) | dict(M=tile.rows, BN=tile.keys) | on | ranges.sizes(plan.config)


def grid(q: Tensor, parts: Sequence[Part], tile: Tile, plan: Plan) -> tuple[int, int]:
    """Tiles of rows, of which none holds rows before and after those that select every block."""
    kv_heads, skip = parts[0].k.shape[2], _early_rows(q, parts, plan)
    rows = tile.rows // (q.shape[2] // kv_heads)
    return ceil_div(skip, rows) + ceil_div(q.shape[1] - skip, rows), q.shape[0] * kv_heads


def _early_rows(q: Tensor, parts: Sequence[Part], plan: Plan) -> int:
    return plan.causal_rows(q.shape[1]) if any(part.branch == "slc" for part in parts) else 0


def _like_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _rescales_late(q: Tensor, parts: Sequence[Part]) -> bool:
    """Whether sums are rescaled late (rescale.py): it pays where they are many numbers a row."""
    return arch(q) >= 90 and q.itemsize == 2 and widest(q, parts[0].v) == 128


def _tile(q: Tensor, parts: Sequence[Part]) -> Tile:
    wide = widest(q, parts[0].v)
    if q.itemsize == 4:
        return Tile(32, 32, 8) if wide <= 64 else Tile(16, 16, 8)
    if wide > 128:
        return Tile(64, 32, 8, 2)
    if arch(q) < 90:
        return Tile(128, 64, 8, 2) if wide <= 64 else Tile(64, 64, 4, 2)
    if wide <= 64:
        return Tile(128, 64, 8, 3, registers=128)
    if q.shape[2] > 8 * parts[0].k.shape[2]:
        return Tile(128, 32, 8, 3, registers=128)
    return Tile(64, 32, 4, 3, registers=168)
