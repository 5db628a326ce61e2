# pyright: reportMissingImports=false
"""The choice of blocks for one new token (Eq. 8 to 12), from scores that the compressed branch left behind.

Importance and order are those of scores.py: a block's taps are summed after one another for each head of the group,
forced blocks come first, then score descending and index ascending, by distinct 64-bit keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import NSAConfig
from ._launch import Tile, launch, padded

_BLOCKS = 1024  # looked at together


@triton.jit
def _merged_lse(LPARTS, part, PARTS: tl.constexpr, G: tl.constexpr):
    """Base-2 log-sum-exp of one head's keys from those of its parts; +inf where there is no key."""
    lse = tl.load(LPARTS + part * G, mask=part < PARTS, other=float("-inf"))
    m = tl.maximum(tl.max(lse, 0), -1e30)
    l = tl.sum(tl.exp2(lse - m), 0)
    return tl.where(l > 0, m + tl.log2(l), float("inf"))


@triton.jit
def _decode_choose(
    SCORES, LPARTS, CHOSEN, POSITION, room,
    G: tl.constexpr, ALL_PARTS: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, SLC_BLOCK: tl.constexpr, RP: tl.constexpr,
    COUNT: tl.constexpr, COUNT_P: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """CHOSEN [B·HKV,COUNT] of one sequence's kv head, from SCORES [B·HKV,G,room] and the first PARTS of LPARTS."""
    R: tl.constexpr = SLC_BLOCK // STRIDE
    BEFORE: tl.constexpr = BLOCK // STRIDE - 1
    LAST: tl.constexpr = 0x7FFFFFFF
    head = tl.program_id(0)
    t = tl.load(POSITION)
    seen, own = tl.maximum(t + 1 - BLOCK + STRIDE, 0) // STRIDE, t // SLC_BLOCK
    SCORES += head.to(tl.int64) * G * room
    LPARTS += head * ALL_PARTS * G
    tap = tl.arange(0, RP)
    weight = (tl.minimum(tap * STRIDE + BLOCK, SLC_BLOCK) - tap * STRIDE) / STRIDE
    best = tl.full([COUNT_P], -1, tl.int64)
    for j in range(0, own + 1, BLOCKS):
        block = j + tl.arange(0, BLOCKS)
        n = block[:, None] * R + tap[None, :]
        score = tl.zeros([BLOCKS], tl.float32)
        for g in tl.static_range(G):
            lse = _merged_lse(LPARTS + g, tl.arange(0, PARTS_P), PARTS, G)
            for before in tl.static_range(BEFORE, 0, -1):
                i = block * R - before
                s = tl.load(SCORES + g * room + i, mask=(i >= 0) & (i < seen), other=float("-inf"))
                score += tl.exp2(s - lse) * ((BLOCK - before * STRIDE) / STRIDE)
            s = tl.load(SCORES + g * room + n, mask=(tap < R)[None, :] & (n < seen), other=float("-inf"))
            score += tl.sum(tl.exp2(s - lse) * weight[None, :], 1)
        score = tl.where((block < INIT) | (block > own - LOCAL), float("inf"), score)
        keys = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (LAST - block).to(tl.int64)
        keys = tl.topk(tl.where(block <= own, keys, -1), COUNT_P)
        best = tl.topk(tl.join(best, keys).reshape(2 * COUNT_P), COUNT_P)
    slot = tl.arange(0, COUNT_P)
    index = tl.sort(tl.where((best >= 0) & (slot < COUNT), LAST - (best & LAST).to(tl.int32), LAST))
    tl.store(CHOSEN + head * COUNT + slot, tl.where(index < LAST, index, -1), mask=slot < COUNT)


def choose(scores: Tensor, lse_parts: Tensor, parts: int, position: Tensor, room: int, config: NSAConfig) -> Tensor:
    """Selected blocks of the token at `position`, int32 [B·HKV,slc_count], ascending, padded with -1.

    Args:
        scores: of the compressed keys, times scale · log2 e, float32 [B·HKV,G,compressed tokens of room].
        lse_parts: base-2 log-sum-exp, float32 [B·HKV,all parts,G], whose first `parts` are the compressed branch's.
        position: int32 [1].
        room: tokens that the cache has room for.
    """
    rows, group, cmp_room = scores.shape
    chosen = torch.empty(rows, config.slc_count, dtype=torch.int32, device=scores.device)
    pointers = dict(SCORES=scores, LPARTS=lse_parts, CHOSEN=chosen, POSITION=position)
    heads = dict(G=group, ALL_PARTS=lse_parts.shape[1], PARTS=parts, PARTS_P=padded(parts))
    sizes = dict(BLOCK=config.cmp_block, STRIDE=config.cmp_stride, SLC_BLOCK=config.slc_block)
    count = padded(config.slc_count)
    blocks = max(count, min(_BLOCKS, padded(config.slc_blocks(room))))
    numbers = dict(COUNT=config.slc_count, COUNT_P=count, INIT=config.init_blocks, LOCAL=config.local_blocks)
    taps = dict(RP=_power(config.slc_block // config.cmp_stride), BLOCKS=blocks)
    tile = Tile(warps=8 if blocks >= 512 else 4)
    launch(_decode_choose, (rows,), pointers | dict(room=cmp_room), heads | sizes | numbers | taps, tile)
    return chosen


def _power(x: int) -> int:
    """The power of two that holds x."""
    return 1 << (x - 1).bit_length()
