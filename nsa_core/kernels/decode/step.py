# pyright: reportMissingImports=false
"""Attention of one new token over a cache, in five launches that a CUDA graph can replay.

1. `_decode_take` stores the token in the cache (take.py).
2. `_decode_compressed` computes compressed attention, its keys split into parts, and keeps the scores.
3. `_decode_window` finds the best blocks of every chunk (choose.py), and computes window attention beside that.
4. `_decode_selected` computes attention to each chosen block.
5. `_decode_merge` merges the parts of every branch in order, applies the gates and counts the token (merge.py).

The number of tokens is read from the device, so that a launch depends on the cache's room alone; a program without keys
writes an empty part. A branch's keys are split evenly among its parts. All heads of a group are computed together: each
key and value is read once. Dense attention takes the first launch, one like the second, and the last.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...cache import DenseCache, NSACache
from ...config import NSAConfig
from ..runtime.launch import launch
from ..runtime.tiles import LOG2_E, Tile, ceil_div, head_sizes, padded, power_of_two, widest
from ..shared.ranges import load_rows
from .choose import best_of_chunk, chosen_block
from .merge import _decode_merge, held_tokens
from .take import _decode_take, _decode_take_dense

_PROGRAMS = 256  # most parts of a branch over all sequences and kv heads
_MOST_PARTS = 128  # of one sequence and kv head
_STEP = 16  # parts merged at a time


@triton.jit
def _attend(
    Q, K, V, SCORES, PARTS, LPARTS, row, slot, begin, end, score_row, scale2,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Attention of the G heads from `row` of Q to keys begin..end-1 of K, V (at their kv head), written as part `slot`.

    PARTS [slots,G,DV] and LPARTS [slots,G] are float32; LPARTS is base 2, -inf for an empty part. KEEP: base-2 scores
    go to SCORES, rows of `score_row`.
    """
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
    at = PARTS + (tl.cast(slot, tl.int64) * G + r)[:, None] * DV + dv[None, :]
    tl.store(at, acc, mask=(r < G)[:, None] & (dv < DV)[None, :])
    tl.store(LPARTS + slot * G + r, tl.where(l > 0, m + tl.log2(l), float("-inf")), mask=r < G)


@triton.jit
def _share(part, keys, PARTS: tl.constexpr, BN: tl.constexpr):
    """Bounds of one of PARTS even shares of the keys: whole tiles of BN keys, except for the last."""
    size = tl.cdiv(tl.cdiv(keys, PARTS), BN) * BN
    return part * size, tl.minimum(part * size + size, keys)


@triton.jit
def _decode_compressed(
    Q, K, V, SCORES, PARTS, LPARTS, POSITION, capacity, room, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, ALL_PARTS: tl.constexpr, CMP_PARTS: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Compressed attention of one token, and its scores.

    Grid: (CMP_PARTS, sequences x kv heads). A program owns one share of the compressed keys for the G heads of a group,
    and writes one of the first CMP_PARTS parts, and its base-2 scores.
    Q [B,HQ,D]; K [B,room,HKV,D], V [B,room,HKV,DV]; float32 SCORES [B·HKV,G,room], PARTS [B·HKV,ALL_PARTS,G,DV] and
    LPARTS [B·HKV,ALL_PARTS,G]; POSITION int32 [1].
    """
    G: tl.constexpr = HQ // HKV
    part, head = tl.program_id(0), tl.program_id(1)
    b, kvh = (head // HKV).to(tl.int64), head % HKV
    seen = tl.maximum(held_tokens(POSITION, capacity) - BLOCK + STRIDE, 0) // STRIDE
    begin, end = _share(part, seen, CMP_PARTS, BN)
    first = b * room * HKV + kvh
    _attend(
        Q, K + first * D, V + first * DV, SCORES + head.to(tl.int64) * G * room, PARTS, LPARTS,
        b * HQ + kvh * G, head * ALL_PARTS + part, begin, end, room, scale2,
        G, HKV, D, DV, DP, DVP, M, BN, True)  # fmt: skip


@triton.jit
def _decode_window(
    Q, K, V, SCORES, KEYS, PARTS, LPARTS, POSITION, capacity, cmp_room, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, ALL_PARTS: tl.constexpr, CMP_PARTS: tl.constexpr, CMP_PARTS_P: tl.constexpr,
    WIN_PARTS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, SLC_BLOCK: tl.constexpr,
    RP: tl.constexpr, COUNT_P: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The best blocks of every chunk, and window attention beside them: neither fills a device.

    Grid: (CHUNKS + WIN_PARTS, sequences x kv heads). Each of the first CHUNKS programs owns CHUNK blocks, and writes
    the COUNT_P best keys to KEYS [B·HKV,CHUNKS,COUNT_P] int64; each of the others owns one share of the window, and
    writes one of the WIN_PARTS parts behind the compressed ones.
    Q [B,HQ,D]; K [B,WINDOW,HKV,D], V [B,WINDOW,HKV,DV], rings; the rest as in `_decode_compressed`.
    """
    G: tl.constexpr = HQ // HKV
    i, head = tl.program_id(0), tl.program_id(1)
    b, kvh = (head // HKV).to(tl.int64), head % HKV
    tokens = held_tokens(POSITION, capacity)
    if i < CHUNKS:
        scores, lse_parts = SCORES + head.to(tl.int64) * G * cmp_room, LPARTS + head * ALL_PARTS * G
        keys = best_of_chunk(
            scores, lse_parts, tokens, i, cmp_room, G, CMP_PARTS, CMP_PARTS_P, BLOCK, STRIDE, SLC_BLOCK, RP, COUNT_P,
            INIT, LOCAL, CHUNK)  # fmt: skip
        tl.store(KEYS + (head * CHUNKS + i) * COUNT_P + tl.arange(0, COUNT_P), keys)
    else:
        begin, end = _share(i - CHUNKS, tl.minimum(tokens, WINDOW), WIN_PARTS, BN)
        first = b * WINDOW * HKV + kvh
        _attend(
            Q, K + first * D, V + first * DV, SCORES, PARTS, LPARTS, b * HQ + kvh * G,
            head * ALL_PARTS + CMP_PARTS + i - CHUNKS, begin, end, cmp_room, scale2,
            G, HKV, D, DV, DP, DVP, M, BN, False)  # fmt: skip


@triton.jit
def _decode_selected(
    Q, K, V, KEYS, CHOSEN, PARTS, LPARTS, POSITION, capacity, room, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, ALL_PARTS: tl.constexpr, COUNT: tl.constexpr, COUNT_P: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, SLC_BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one token to its chosen blocks.

    Grid: (COUNT, sequences x kv heads). A program owns the chosen block of one rank, which it finds in KEYS: it writes
    the block's index to CHOSEN [B·HKV,COUNT] int32 (-1: none), and one of the last COUNT parts.
    Q [B,HQ,D]; K [B,room,HKV,D], V [B,room,HKV,DV]; KEYS as in `_decode_window`, the rest as in `_decode_compressed`.
    """
    G: tl.constexpr = HQ // HKV
    rank, head = tl.program_id(0), tl.program_id(1)
    b, kvh = (head // HKV).to(tl.int64), head % HKV
    block = chosen_block(KEYS + head * CHUNKS * COUNT_P, rank, COUNT, COUNT_P, CHUNKS, CHUNKS_P)
    tl.store(CHOSEN + head * COUNT + rank, block)
    begin = tl.maximum(block, 0) * SLC_BLOCK
    end = tl.where(block < 0, begin, tl.minimum(begin + SLC_BLOCK, held_tokens(POSITION, capacity)))
    first = b * room * HKV + kvh
    _attend(
        Q, K + first * D, V + first * DV, PARTS, PARTS, LPARTS, b * HQ + kvh * G, (head + 1) * ALL_PARTS - COUNT + rank,
        begin, end, room, scale2, G, HKV, D, DV, DP, DVP, M, BN, False)  # fmt: skip


@triton.jit
def _decode_dense(
    Q, K, V, PARTS, LPARTS, POSITION, capacity, room, scale2,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, ALL_PARTS: tl.constexpr,
):  # fmt: skip
    """Dense attention of one token.

    Grid: (ALL_PARTS, sequences x kv heads). A program owns one share of all tokens for the G heads of a group, and
    writes one part.
    Q [B,HQ,D]; K [B,room,HKV,D], V [B,room,HKV,DV]; PARTS, LPARTS, POSITION as in `_decode_compressed`.
    """
    G: tl.constexpr = HQ // HKV
    part, head = tl.program_id(0), tl.program_id(1)
    b, kvh = (head // HKV).to(tl.int64), head % HKV
    begin, end = _share(part, held_tokens(POSITION, capacity), ALL_PARTS, BN)
    first = b * room * HKV + kvh
    _attend(
        Q, K + first * D, V + first * DV, PARTS, PARTS, LPARTS, b * HQ + kvh * G, head * ALL_PARTS + part,
        begin, end, room, scale2, G, HKV, D, DV, DP, DVP, M, BN, False)  # fmt: skip


def take(q: Tensor, k: Tensor, v: Tensor, cache: NSACache) -> Tensor:
    """Rotated query [B,HQ,D] of one token, whose keys and values are stored in the cache but not counted.

    A learned compression is left to the caller.

    Args:
        q: [B,HQ,D].
        k, v: [B,3,HKV,D] and [B,3,HKV,DV] of the cmp, slc and win branches; unrotated and contiguous, as q.
    """
    config, pointers = cache.config, dict(Q=q, K=k, V=v)
    for name, held in (("C", "cmp"), ("S", "slc"), ("W", "win"), ("O", "open")):
        pointers |= {f"K{name}": getattr(cache, f"k_{held}").buffer, f"V{name}": getattr(cache, f"v_{held}").buffer}
    block = dict(BLOCK=config.cmp_block, BLOCK_P=padded(config.cmp_block), STRIDE=config.cmp_stride)
    constants = block | dict(WINDOW=config.window, MEAN=config.compress == "mean")
    numbers = dict(cmp_room=cache.k_cmp.buffer.shape[1])
    return _launch_take(_decode_take, "decode_take", pointers, numbers, constants, cache, cache.k_slc.buffer.shape[1])


def take_dense(q: Tensor, k: Tensor, v: Tensor, cache: DenseCache) -> Tensor:
    """Rotated query of one token, as `take`, for dense attention: k [B,HKV,D], v [B,HKV,DV]."""
    pointers = dict(Q=q, K=k, V=v, KT=cache.k.buffer, VT=cache.v.buffer)
    return _launch_take(_decode_take_dense, "decode_take_dense", pointers, {}, {}, cache, cache.k.buffer.shape[1])


def attend(q: Tensor, gates: Tensor, cache: NSACache) -> tuple[Tensor, Tensor]:
    """Gated sum of the three branches for the token that `take` stored last; counts it on the device.

    Args:
        q: its rotated query [B,HQ,D].
        gates: logits [B,HQ,3] in the order cmp, slc, win; contiguous.

    Returns:
        [B,HQ,DV], and the selected blocks, int32 [B·HKV,slc_count], ascending, padded with -1.
    """
    config, v = cache.config, cache.v_slc.buffer
    rows, room, cmp_room = q.shape[0] * v.shape[2], v.shape[1], cache.k_cmp.buffer.shape[1]
    tile, (chunks, chunk, kept), group = _tile(q, v), _chunks(config, room), q.shape[1] // v.shape[2]
    near = _parts(cmp_room, rows, tile), _parts(config.window, rows, tile)
    shape = rows, sum(near) + config.slc_count, group
    parts, lse_parts = (q.new_empty(*shape, *dim, dtype=torch.float32) for dim in (v.shape[3:], ()))
    scores = q.new_empty(rows, group, cmp_room, dtype=torch.float32)
    keys = q.new_empty(rows, chunks, kept, dtype=torch.int64)
    chosen = q.new_empty(rows, config.slc_count, dtype=torch.int32)

    outputs = dict(PARTS=parts, LPARTS=lse_parts, POSITION=cache.position)
    numbers = dict(capacity=cache.capacity or room, scale2=q.shape[-1] ** -0.5 * LOG2_E)
    common = head_sizes(q, v) | dict(M=tile.rows, BN=tile.keys, ALL_PARTS=parts.shape[1])
    sizes = dict(BLOCK=config.cmp_block, STRIDE=config.cmp_stride)
    tensors = dict(Q=q, K=cache.k_cmp.buffer, V=cache.v_cmp.buffer, SCORES=scores)
    constants = common | sizes | dict(CMP_PARTS=near[0])
    arguments = tensors | outputs | numbers | dict(room=cmp_room)
    launch(_decode_compressed, (near[0], rows), arguments, constants, tile, stage="decode_compressed")

    tensors = dict(Q=q, K=cache.k_win.buffer, V=cache.v_win.buffer, SCORES=scores, KEYS=keys)
    constants = constants | dict(CMP_PARTS_P=padded(near[0]), WIN_PARTS=near[1], WINDOW=config.window)
    constants |= dict(INIT=config.init_blocks, LOCAL=config.local_blocks, SLC_BLOCK=config.slc_block)
    constants |= dict(RP=power_of_two(config.slc_block // config.cmp_stride), COUNT_P=kept, CHUNK=chunk, CHUNKS=chunks)
    arguments = tensors | outputs | numbers | dict(cmp_room=cmp_room)
    grid = chunks + near[1], rows
    launch(_decode_window, grid, arguments, constants, replace(tile, stages=1), stage="decode_window")

    tensors = dict(Q=q, K=cache.k_slc.buffer, V=v, KEYS=keys, CHOSEN=chosen)
    constants = common | dict(COUNT=config.slc_count, COUNT_P=kept, SLC_BLOCK=config.slc_block)
    constants |= dict(CHUNKS=chunks, CHUNKS_P=power_of_two(chunks))
    arguments = tensors | outputs | numbers | dict(room=room)
    launch(_decode_selected, (config.slc_count, rows), arguments, constants, tile, stage="decode_selected")
    return _merge(q, parts, lse_parts, gates, cache, room, (*near, config.slc_count)), chosen


def attend_dense(q: Tensor, cache: DenseCache) -> Tensor:
    """Attention [B,HQ,DV] to all tokens for the one that `take_dense` stored last; counts it on the device."""
    k, v = cache.k.buffer, cache.v.buffer
    rows, room, tile = q.shape[0] * v.shape[2], v.shape[1], _tile(q, v, longest=True)
    shape = rows, _parts(room, rows, tile), q.shape[1] // v.shape[2]
    parts, lse_parts = (q.new_empty(*shape, *dim, dtype=torch.float32) for dim in (v.shape[3:], ()))
    tensors = dict(Q=q, K=k, V=v, PARTS=parts, LPARTS=lse_parts, POSITION=cache.position)
    numbers = dict(capacity=cache.capacity or room, room=room, scale2=q.shape[-1] ** -0.5 * LOG2_E)
    constants = head_sizes(q, v) | dict(M=tile.rows, BN=tile.keys, ALL_PARTS=parts.shape[1])
    launch(_decode_dense, (parts.shape[1], rows), tensors | numbers, constants, tile, stage="decode_dense")
    return _merge(q, parts, lse_parts, None, cache, room, (parts.shape[1], 0, 0))


def _launch_take(
    kernel: object, stage: str, pointers: dict[str, Tensor], numbers: dict[str, int], constants: dict[str, int],
    cache: NSACache | DenseCache, room: int,
) -> Tensor:  # fmt: skip
    """Launch over sequences and kv heads; returns the rotated query. `room`: tokens that the cache's buffers hold."""
    assert cache.position is not None
    assert cache.frequencies is not None
    q, rotated = pointers["Q"], torch.empty_like(pointers["Q"])
    (batch, heads, dim), (kv_heads, value_dim) = q.shape, pointers["V"].shape[-2:]
    arguments = pointers | dict(ROTATED=rotated, POSITION=cache.position, FREQUENCIES=cache.frequencies) | numbers
    arguments |= dict(room=room, capacity=cache.capacity or room)
    sizes = dict(HQ=heads, HKV=kv_heads, D=dim, DV=value_dim)
    sizes |= dict(HP=padded(dim // 2), DVP=padded(value_dim), GP=padded(heads // kv_heads))
    # One warp, which waits for no other, where its registers hold a row; else four.
    tile = Tile(warps=1 if max(dim, value_dim) * q.itemsize <= 256 else 4)
    launch(kernel, (batch * kv_heads,), arguments, sizes | constants, tile, stage=stage)
    return rotated


def _merge(
    q: Tensor, parts: Tensor, lse_parts: Tensor, gates: Tensor | None, cache: NSACache | DenseCache, room: int,
    counts: tuple[int, int, int],
) -> Tensor:  # fmt: skip
    """Output [B,HQ,DV] for q [B,HQ,D] from `counts` parts of cmp, win and slc, or of dense attention in cmp's place."""
    group, value_dim = parts.shape[2:]
    out = q.new_empty(*q.shape[:2], value_dim)
    tensors = dict(PARTS=parts, LPARTS=lse_parts, GATES=out if gates is None else gates, OUT=out)
    arguments = tensors | dict(POSITION=cache.position, capacity=cache.capacity or room)
    sizes = dict(HQ=q.shape[1], HKV=q.shape[1] // group, DV=value_dim, DVP=padded(value_dim), STEP=_STEP)
    numbers = dict(zip(("COUNT1", "COUNT2", "COUNT3"), counts, strict=True))
    constants = sizes | dict(GATED=gates is not None) | numbers
    tile = Tile(warps=1 if value_dim <= 128 else 4)
    launch(_decode_merge, (q.shape[0] * q.shape[1],), arguments, constants, tile, stage="decode_merge")
    return out


def _chunks(config: NSAConfig, room: int) -> tuple[int, int, int]:
    """How the choice of blocks is split: number of chunks, blocks of a chunk, and those of them kept, the best ones.

    For a cache with room for `room` tokens: at most 16 chunks, each of 128 blocks or more.
    """
    blocks, kept = config.slc_blocks(room), padded(config.slc_count)
    size = max(kept, min(128, padded(blocks)), power_of_two(ceil_div(blocks, 16)))
    return power_of_two(ceil_div(blocks, size)), size, kept


def _parts(keys: int, rows: int, tile: Tile) -> int:
    """Parts to split `keys` keys into, for `rows` (sequence, kv head) pairs; few values: each is compiled for."""
    return max(1, min(_PROGRAMS // rows, power_of_two(ceil_div(keys, tile.keys)), _MOST_PARTS))


def _tile(q: Tensor, v: Tensor, longest: bool = False) -> Tile:
    """Tile with rows for a group, and keys by the bytes of a key and value; `longest`: more keys, for long parts."""
    group, wide = q.shape[1] // v.shape[2], widest(q, v)
    if q.itemsize == 4:
        return Tile(padded(group), 32 if wide <= 64 else 16, 4, 2)
    keys = 128 if longest and wide <= 64 else 64 if wide <= 128 else 32
    return Tile(padded(group), keys, 4, 3)


def trace(heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Make the launches of a sparse and a dense step on CPU tensors. Call it within `launch.record`."""
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
