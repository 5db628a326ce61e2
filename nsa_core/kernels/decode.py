# pyright: reportMissingImports=false
"""Attention of one new token over a cache, in five launches that a CUDA graph can replay.

1. `_decode_take`: the token into the cache (decode_take.py).
2. `_decode_near`: compressed and window attention, the keys split into parts; the compressed scores are kept.
3. `_decode_choose`: importance and the choice of blocks (decode_choose.py).
4. `_decode_selected`: a program for each chosen block.
5. `_decode_merge`: the parts of every branch in order, the gates; counts the token.

How many tokens there are is read from the device, so that nothing but the cache's room shapes a launch: programs
without keys leave an empty part behind. A branch's parts share its keys evenly. All heads of a group meet a key
together, and each key and value is read once. Dense attention is the first, one like the second, and the last of these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache import DenseCache, NSACache
from ..config import NSAConfig
from ._launch import LOG2_E, Tile, ceil_div, launch, padded
from .decode_choose import choose
from .decode_take import take, take_dense
from .ranges import load_rows

__all__ = ["attend", "attend_dense", "take", "take_dense", "trace"]

_PROGRAMS = 256  # that a branch's keys are split into, over all sequences and kv heads
_MOST_PARTS = 128
_STEP = 16  # parts merged at a time


@triton.jit
def _attend(
    Q, K, V, SCORES, PARTS, LPARTS, row, slot, begin, end, score_row, scale2,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A part: the G heads from `row` of Q over keys begin..end-1 of K, V (at their kv head), to slot `slot`."""
    r, n, d, dv = tl.arange(0, M), tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    q = load_rows(Q + row * D, r, D, d, D, DP, r < G, True)
    m = tl.full([M], -1e30, tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    for j in tl.range(begin, end, BN):
        start, ok = tl.cast(j, tl.int64) * HKV, j + n < end
        k = load_rows(K + start * D, n, HKV * D, d, D, DP, ok, True)
        v = load_rows(V + start * DV, n, HKV * DV, dv, DV, DVP, ok, True)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        s = tl.where(ok[None, :], s, float("-inf"))
        if KEEP:
            tl.store(SCORES + r[:, None] * score_row + (j + n)[None, :], s, mask=(r < G)[:, None] & ok[None, :])
        larger = tl.maximum(m, tl.max(s, 1))
        shrink = tl.exp2(m - larger)
        p = tl.exp2(s - larger[:, None])
        l = l * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = larger
    acc = acc * tl.where(l > 0, 1.0 / l, 0.0)[:, None]
    at = PARTS + (slot * G + r)[:, None] * DV + dv[None, :]
    tl.store(at, acc, mask=(r < G)[:, None] & (dv < DV)[None, :])
    tl.store(LPARTS + slot * G + r, tl.where(l > 0, m + tl.log2(l), float("-inf")), mask=r < G)


@triton.jit
def _share(part, keys, PARTS: tl.constexpr, BN: tl.constexpr):
    """Bounds of one of PARTS even shares of the keys, whole tiles each but the last."""
    size = tl.cdiv(tl.cdiv(keys, PARTS), BN) * BN
    return part * size, tl.minimum(part * size + size, keys)


@triton.jit
def _decode_near(
    Q, KC, VC, KW, VW, SCORES, PARTS, LPARTS, POSITION, room, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, ALL_PARTS: tl.constexpr, CMP_PARTS: tl.constexpr, WIN_PARTS: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One part of the compressed branch, whose SCORES [B·HKV,G,room] are kept, or of the window."""
    G: tl.constexpr = HQ // HKV
    part, head = tl.program_id(0), tl.program_id(1)
    b, kvh = (head // HKV).to(tl.int64), head % HKV
    tokens = tl.load(POSITION) + 1
    row, slot = b * HQ + kvh * G, head * ALL_PARTS + part
    if part < CMP_PARTS:
        begin, end = _share(part, tl.maximum(tokens - BLOCK + STRIDE, 0) // STRIDE, CMP_PARTS, BN)
        first = b * room * HKV + kvh
        _attend(
            Q, KC + first * D, VC + first * DV, SCORES + head.to(tl.int64) * G * room, PARTS, LPARTS,
            row, slot, begin, end, room, scale2, G, HKV, D, DV, DP, DVP, M, BN, True)  # fmt: skip
    else:
        begin, end = _share(part - CMP_PARTS, tl.minimum(tokens, WINDOW), WIN_PARTS, BN)
        first = b * WINDOW * HKV + kvh
        _attend(
            Q, KW + first * D, VW + first * DV, SCORES, PARTS, LPARTS,
            row, slot, begin, end, room, scale2, G, HKV, D, DV, DP, DVP, M, BN, False)  # fmt: skip


@triton.jit
def _decode_selected(
    Q, K, V, CHOSEN, PARTS, LPARTS, POSITION, room, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, ALL_PARTS: tl.constexpr, COUNT: tl.constexpr, SLC_BLOCK: tl.constexpr,
):  # fmt: skip
    """The part of one chosen block, the last COUNT parts being these; empty where no block was chosen."""
    G: tl.constexpr = HQ // HKV
    rank, head = tl.program_id(0), tl.program_id(1)
    b, kvh = (head // HKV).to(tl.int64), head % HKV
    block = tl.load(CHOSEN + head * COUNT + rank)
    begin = tl.maximum(block, 0) * SLC_BLOCK
    end = tl.where(block < 0, begin, tl.minimum(begin + SLC_BLOCK, tl.load(POSITION) + 1))
    first = b * room * HKV + kvh
    _attend(
        Q, K + first * D, V + first * DV, PARTS, PARTS, LPARTS, b * HQ + kvh * G, (head + 1) * ALL_PARTS - COUNT + rank,
        begin, end, room, scale2, G, HKV, D, DV, DP, DVP, M, BN, False)  # fmt: skip


@triton.jit
def _decode_dense(
    Q, K, V, PARTS, LPARTS, POSITION, room, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, ALL_PARTS: tl.constexpr,
):  # fmt: skip
    """One part of attention over all tokens."""
    G: tl.constexpr = HQ // HKV
    part, head = tl.program_id(0), tl.program_id(1)
    b, kvh = (head // HKV).to(tl.int64), head % HKV
    begin, end = _share(part, tl.load(POSITION) + 1, ALL_PARTS, BN)
    first = b * room * HKV + kvh
    _attend(
        Q, K + first * D, V + first * DV, PARTS, PARTS, LPARTS, b * HQ + kvh * G, head * ALL_PARTS + part,
        begin, end, room, scale2, G, HKV, D, DV, DP, DVP, M, BN, False)  # fmt: skip


@triton.jit
def _merged(
    PARTS, LPARTS, g, FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr,
    G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Output [DVP] of head g of the group from COUNT parts, STEP at a time, in order; zeros if all are empty."""
    within, dv = tl.arange(0, STEP), tl.arange(0, DVP)
    largest = tl.full([STEP], -1e30, tl.float32)
    for i in tl.static_range(0, COUNT, STEP):
        lse = tl.load(LPARTS + (FIRST + i + within) * G + g, mask=i + within < COUNT, other=float("-inf"))
        largest = tl.maximum(largest, lse)
    m = tl.max(largest, 0)
    l = tl.zeros([STEP], tl.float32)
    acc = tl.zeros([STEP, DVP], tl.float32)
    for i in tl.static_range(0, COUNT, STEP):
        at = (FIRST + i + within) * G + g
        p = tl.exp2(tl.load(LPARTS + at, mask=i + within < COUNT, other=float("-inf")) - m)
        o = tl.load(PARTS + at[:, None] * DV + dv[None, :], mask=(p > 0)[:, None] & (dv < DV)[None, :], other=0.0)
        l += p
        acc += p[:, None] * o
    total = tl.sum(l, 0)
    return tl.sum(acc, 0) * tl.where(total > 0, 1.0 / total, 0.0)


@triton.jit
def _gate(LOGIT):
    x = tl.load(LOGIT)
    return tl.sigmoid(x.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _decode_merge(
    PARTS, LPARTS, GATES, OUT, POSITION,
    HQ: tl.constexpr, HKV: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr,
    COUNT1: tl.constexpr, COUNT2: tl.constexpr, COUNT3: tl.constexpr,
):  # fmt: skip
    """OUT [B,HQ,DV] of one head: its branches' parts merged, times the sigmoids of GATES [B,HQ,3 (cmp, slc, win)].

    Parts lie in the order cmp, win, slc. Without gates there is one branch. Counts the token in POSITION.
    """
    G: tl.constexpr = HQ // HKV
    ALL_PARTS: tl.constexpr = COUNT1 + COUNT2 + COUNT3
    i = tl.program_id(0)
    head, g, dv = i // G, i % G, tl.arange(0, DVP)
    PARTS += head.to(tl.int64) * (ALL_PARTS * G * DV)
    LPARTS += head * (ALL_PARTS * G)
    out = _merged(PARTS, LPARTS, g, 0, COUNT1, STEP, G, DV, DVP)
    if GATED:
        win = _merged(PARTS, LPARTS, g, COUNT1, COUNT2, STEP, G, DV, DVP)
        slc = _merged(PARTS, LPARTS, g, COUNT1 + COUNT2, COUNT3, STEP, G, DV, DVP)
        out = _gate(GATES + i * 3) * out + _gate(GATES + i * 3 + 1) * slc + _gate(GATES + i * 3 + 2) * win
    tl.store(OUT + i.to(tl.int64) * DV + dv, out.to(OUT.dtype.element_ty), mask=dv < DV)
    if i == 0:
        tl.store(POSITION, tl.load(POSITION) + 1)


def attend(q: Tensor, gates: Tensor, cache: NSACache) -> Tensor:
    """Gated sum of the three branches for the token that `take` took in last, [B,HQ,DV]; counts it on the device.

    Args:
        q: its rotated query [B,HQ,D].
        gates: logits [B,HQ,3] in the order cmp, slc, win; contiguous.
    """
    config, position, v_slc = cache.config, cache.position, cache.v_slc.buffer
    assert position is not None
    heads, tile = _heads(q, cache.k_slc.buffer, v_slc), _tile(q, v_slc)
    rows, room, cmp_room = q.shape[0] * heads["HKV"], v_slc.shape[1], cache.k_cmp.buffer.shape[1]
    near = _parts(cmp_room, rows, tile), _parts(config.window, rows, tile)
    parts, lse_parts = _slots(q, v_slc, sum(near) + config.slc_count)
    scores = torch.empty(rows, heads["HQ"] // heads["HKV"], cmp_room, dtype=torch.float32, device=q.device)
    common = heads | dict(M=tile.rows, BN=tile.keys, ALL_PARTS=parts.shape[1])
    scale2 = q.shape[-1] ** -0.5 * LOG2_E

    kept = dict(KC=cache.k_cmp.buffer, VC=cache.v_cmp.buffer, KW=cache.k_win.buffer, VW=cache.v_win.buffer)
    pointers = dict(Q=q) | kept | dict(SCORES=scores, PARTS=parts, LPARTS=lse_parts, POSITION=position)
    sizes = dict(BLOCK=config.cmp_block, STRIDE=config.cmp_stride, WINDOW=config.window)
    constants = common | dict(CMP_PARTS=near[0], WIN_PARTS=near[1]) | sizes
    launch(_decode_near, (sum(near), rows), pointers | dict(room=cmp_room, scale2=scale2), constants, tile)

    chosen = choose(scores, lse_parts, near[0], position, room, config)

    pointers = dict(Q=q, K=cache.k_slc.buffer, V=v_slc, CHOSEN=chosen, PARTS=parts, LPARTS=lse_parts, POSITION=position)
    constants = common | dict(COUNT=config.slc_count, SLC_BLOCK=config.slc_block)
    arguments = pointers | dict(room=room, scale2=scale2)
    launch(_decode_selected, (config.slc_count, rows), arguments, constants, tile)
    return _merge(q, parts, lse_parts, gates, position, (*near, config.slc_count))


def attend_dense(q: Tensor, cache: DenseCache) -> Tensor:
    """Attention [B,HQ,DV] of the token that `take_dense` took in last to all tokens; counts it on the device."""
    k, v, position = cache.k.buffer, cache.v.buffer, cache.position
    assert position is not None
    heads, tile = _heads(q, k, v), _tile(q, v)
    rows = q.shape[0] * heads["HKV"]
    parts, lse_parts = _slots(q, v, _parts(k.shape[1], rows, tile))
    pointers = dict(Q=q, K=k, V=v, PARTS=parts, LPARTS=lse_parts, POSITION=position)
    arguments = pointers | dict(room=k.shape[1], scale2=q.shape[-1] ** -0.5 * LOG2_E)
    constants = heads | dict(M=tile.rows, BN=tile.keys, ALL_PARTS=parts.shape[1])
    launch(_decode_dense, (parts.shape[1], rows), arguments, constants, tile)
    return _merge(q, parts, lse_parts, None, position, (parts.shape[1], 0, 0))


def _merge(
    q: Tensor, parts: Tensor, lse_parts: Tensor, gates: Tensor | None, position: Tensor, counts: tuple[int, int, int]
) -> Tensor:
    """Output [B,HQ,DV] of q [B,HQ,D] from `counts` parts of cmp, win and slc, or of the one branch there is."""
    group, value_dim = parts.shape[2:]
    out = q.new_empty(*q.shape[:2], value_dim)
    pointers = dict(PARTS=parts, LPARTS=lse_parts, GATES=out if gates is None else gates, OUT=out, POSITION=position)
    sizes = dict(HQ=q.shape[1], HKV=q.shape[1] // group, DV=value_dim, DVP=padded(value_dim), STEP=_STEP)
    numbers = dict(zip(("COUNT1", "COUNT2", "COUNT3"), counts, strict=True))
    constants = sizes | dict(GATED=gates is not None) | numbers
    launch(_decode_merge, (q.shape[0] * q.shape[1],), pointers, constants, Tile(warps=4))
    return out


def _slots(q: Tensor, v: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Room for float32 outputs [B·HKV,parts,G,DV] and their log-sum-exp [B·HKV,parts,G]."""
    rows, group = q.shape[0] * v.shape[2], q.shape[1] // v.shape[2]
    o = torch.empty(rows, parts, group, v.shape[3], dtype=torch.float32, device=q.device)
    return o, torch.empty(rows, parts, group, dtype=torch.float32, device=q.device)


def _parts(keys: int, rows: int, tile: Tile) -> int:
    """Parts of `keys` keys of each of `rows` (sequence, kv head) pairs."""
    return max(1, min(_PROGRAMS // rows, ceil_div(keys, tile.keys), _MOST_PARTS))


def _heads(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Of q [B,HQ,D], k [B,T,HKV,D] and v [B,T,HKV,DV]."""
    dim, value_dim = k.shape[3], v.shape[3]
    return dict(HQ=q.shape[1], HKV=k.shape[2], D=dim, DV=value_dim, DP=padded(dim), DVP=padded(value_dim))


def _tile(q: Tensor, v: Tensor) -> Tile:
    """Rows for a group, keys by how many bytes a key and value take."""
    group, wide = q.shape[1] // v.shape[2], max(padded(q.shape[-1]), padded(v.shape[-1]))
    if q.itemsize == 4:
        return Tile(padded(group), 32 if wide <= 64 else 16, 4, 2)
    return Tile(padded(group), 64 if wide <= 128 else 32, 4, 3)


def trace(heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Make the launches of a step, sparse and dense, on CPU tensors. To be called within `_launch.record`."""
    config, room = NSAConfig(), 4096
    sparse, dense = NSACache(config, room), DenseCache(room)
    k, v = (torch.zeros(1, 1, kv_heads, width, dtype=dtype) for width in (dim, value_dim))
    sparse.take((k, k, k), (v, v, v))
    sparse.add_compressed(k, v)
    dense.take(k, v)
    sparse.frequencies = dense.frequencies = torch.zeros(dim // 2)
    q, gates = torch.zeros(1, heads, dim, dtype=dtype), torch.zeros(1, heads, 3, dtype=dtype)
    attend(take(q, k.expand(1, 3, -1, -1), v.expand(1, 3, -1, -1), sparse), gates, sparse)
    attend_dense(take_dense(q, k[0], v[0], dense), dense)
