# pyright: reportMissingImports=false
"""Which queries chose a block freely: the inverse of the selection, cut into work items of bounded size.

Only rows that choose have entries: those from `skip` on of every sequence, numbered by sequence, kv head and row. They
are taken in chunks, so that what the selected branch writes for each (row, chosen block) stays small; numbered so, few
blocks are met in more than one. Within a chunk, entries (row, rank) are sorted by block, stably, so that every block
meets its queries in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import NSAConfig
from ..runtime.launch import launch
from ..runtime.tiles import Tile, ceil_div

_PROGRAM = 256
_TILE = Tile(warps=4)


@triton.jit
def _sort_keys(
    CHOSEN, KEYS, total, S, choosing, rows, blocks, keys, skip,
    HKV: tl.constexpr, COUNT: tl.constexpr, FREE: tl.constexpr, INIT: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """KEYS of the free ranks of CHOSEN [B,S,HKV,COUNT]: chunk, sequence, kv head, block; less BIAS."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    row = i // FREE
    group = row // choosing
    place = (group // HKV * S + skip + row % choosing).to(tl.int64) * HKV + group % HKV
    block = tl.load(CHOSEN + place * COUNT + INIT + i % FREE, mask=i < total, other=0)
    key = row // rows * keys + group * blocks + block
    tl.store(KEYS + i, (key - BIAS).to(KEYS.dtype.element_ty), mask=i < total)


@triton.jit
def _count(SORTED, BOUNDS, PIECES, total, keys, last, cap, BIAS: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr):
    """BOUNDS [last + 1]: the first entry of every key; PIECES [chunks,keys+1]: 0, then each key's work items."""
    key = tl.program_id(0) * N + tl.arange(0, N)
    begin = _first(SORTED, key - BIAS, total, STEPS)
    pieces = tl.cdiv(_first(SORTED, key + 1 - BIAS, total, STEPS) - begin, cap)
    tl.store(BOUNDS + key, begin, mask=key <= last)
    at = PIECES + key // keys * (keys + 1) + key % keys
    tl.store(at + 1, pieces, mask=key < last)
    tl.store(at, 0, mask=(key < last) & (key % keys == 0))


@triton.jit
def _first(SORTED, key, total, STEPS: tl.constexpr):
    """Index of the first of `total` ascending numbers that is not below key; STEPS halvings."""
    low, high = key * 0, key * 0 + total
    for _ in range(STEPS):
        middle = (low + high) // 2
        below = (low < high) & (tl.load(SORTED + middle, mask=low < high, other=0) < key)
        high = tl.where(below, high, middle)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def _assign(PIECES, ITEMS, limit, keys, STEPS: tl.constexpr, N: tl.constexpr):
    """ITEMS [chunks,limit]: the key whose pieces hold the work item, or `keys`; PIECES are summed up here."""
    item, chunk = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1)
    # Key j holds the items PIECES[j] .. PIECES[j+1]-1: the first j+1 whose sum is beyond the item.
    key = _first(PIECES + chunk * (keys + 1) + 1, item + 1, keys, STEPS)
    tl.store(ITEMS + chunk * limit + item, key, mask=item < limit)


@triton.jit
def work_item(ITEMS, PIECES, BOUNDS, item, KEYS, cap):
    """(block's key, first entry, end of entries) of a work item; the key is KEYS and both bounds 0 for none."""
    key = tl.load(ITEMS + item)
    piece = item - tl.load(PIECES + key)
    begin = tl.load(BOUNDS + key) + piece * cap
    end = tl.minimum(begin + cap, tl.load(BOUNDS + tl.minimum(key + 1, KEYS)))
    none = key >= KEYS
    return key, tl.where(none, 0, begin), tl.where(none, 0, end)


@dataclass(frozen=True)
class Inverse:
    """Entries sorted by (chunk, sequence, kv head, block).

    Attributes:
        entries: int32; an entry is row · free + free rank.
        bounds: int32 [chunks · keys + 1], where the entries of each block begin.
        pieces: int32 [chunks, keys + 1], work items before each block within its chunk.
        items: int32 [chunks, limit], the block of every work item; `keys` for those not needed.
        rows: of a chunk, the last one possibly shorter.
        keys: blocks of all heads: B · HKV · blocks.
        blocks: selection blocks of a sequence.
        cap: entries of a work item at most.
    """

    entries: Tensor
    bounds: Tensor
    pieces: Tensor
    items: Tensor
    rows: int
    keys: int
    blocks: int
    cap: int

    @property
    def limit(self) -> int:
        """Work items of a chunk at most."""
        return self.items.shape[1]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order of the attributes, for a backward that keeps them; the numbers follow from shapes."""
        return self.entries, self.bounds, self.pieces, self.items


def invert(chosen: Tensor, config: NSAConfig, blocks: int, rows: int, cap: int, skip: int) -> Inverse:
    """The inverse of `chosen` int32 [B,S,HKV,slc_count], which has no padding in the rows that choose.

    Args:
        config: how many of the blocks, first and last of those chosen, are forced.
        blocks: selection blocks of a sequence.
        rows: of a chunk.
        cap: entries of a work item.
        skip: rows at the start of every sequence whose choice does not count.
    """
    batch, length, kv_heads, count = chosen.shape
    free, choosing, groups = config.free_blocks, length - skip, batch * kv_heads
    keys, total, chunks = groups * blocks, groups * choosing * free, ceil_div(groups * choosing, rows)
    last = chunks * keys
    # Sorting takes as many passes as the keys have bytes.
    kind, bias = (torch.int16, 1 << 15) if last <= 1 << 16 else (torch.int32, 0)
    sort_keys = torch.empty(total, dtype=kind, device=chosen.device)
    sizes = dict(total=total, S=length, choosing=choosing, rows=rows, blocks=blocks, keys=keys, skip=skip)
    ranks = dict(HKV=kv_heads, COUNT=count, FREE=free, INIT=config.init_blocks, BIAS=bias)
    _launch_flat(_sort_keys, total, dict(CHOSEN=chosen, KEYS=sort_keys) | sizes, ranks)
    ordered, order = sort_keys.sort(stable=True)
    # Full items, and for every block that the chunk can meet one that is not.
    limit = rows * free // cap + min(_reached(rows, choosing, groups) * blocks, rows * free)
    bounds, pieces, items = (
        torch.empty(shape, dtype=torch.int32, device=chosen.device)
        for shape in ((last + 1,), (chunks, keys + 1), (chunks, limit))
    )
    arguments = dict(SORTED=ordered, BOUNDS=bounds, PIECES=pieces, total=total, keys=keys, last=last, cap=cap)
    _launch_flat(_count, last + 1, arguments, dict(BIAS=bias, STEPS=total.bit_length() + 1))
    pieces = pieces.cumsum(1, dtype=torch.int32)
    arguments = dict(PIECES=pieces, ITEMS=items, limit=limit, keys=keys)
    _launch_flat(_assign, limit, arguments, dict(STEPS=keys.bit_length() + 1), chunks)
    return Inverse(order.int(), bounds, pieces, items, rows, keys, blocks, cap)


def _reached(rows: int, length: int, groups: int) -> int:
    """Groups of `length` rows that a chunk of `rows` rows may reach into."""
    if length % rows == 0 or rows % length == 0:
        return max(1, rows // length)
    return min(groups, rows // length + 2)


def _launch_flat(
    kernel: object, total: int, arguments: dict[str, Tensor | int], constants: dict[str, int], chunks: int = 1
) -> None:
    launch(kernel, (ceil_div(total, _PROGRAM), chunks), arguments, constants | dict(N=_PROGRAM), _TILE)
