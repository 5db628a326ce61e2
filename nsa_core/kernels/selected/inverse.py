# pyright: reportMissingImports=false
"""The inverse of the selection, for all cards: which queries chose each block freely, cut into work items.

Only choosing rows have entries: the rows of every sequence from `skip` on, numbered by sequence, kv head and row. They
are taken in chunks, which bounds the slots that the selected branch writes for each (row, chosen block); in this order
of rows, few blocks have entries in more than one chunk. Within a chunk, entries (row, rank) are sorted stably by block,
so that every block meets its queries in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call, Part
from ..runtime.launch import launch
from ..runtime.tiles import Tile, ceil_div, larger, smaller
from ..shared.ranges import sequence_of

PARTS_OF_INDEX = ("ITEMS", "PIECES", "BOUNDS")  # kernel arguments that begin anywhere: a chunk's part of a tensor
_PROGRAM = 256  # numbers per program


@triton.jit
def _sort_keys(
    CHOSEN, KEYS, CU, total, S, choosing, rows, blocks, keys, skip, bias, sequences,
    HKV: tl.constexpr, COUNT: tl.constexpr, FREE: tl.constexpr, INIT: tl.constexpr, N: tl.constexpr,
    SB: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Sort keys of all entries: the number of (chunk, sequence, kv head, block), in that order.

    Grid: (entries / N, 1). A program owns N entries; it writes numbers less `bias` to KEYS [total], int16 or int32.
    CHOSEN int32 [B,S,HKV,COUNT], of which FREE ranks behind the INIT first are free; `choosing` rows per sequence and
    kv head, `rows` per chunk, `blocks` per sequence, `keys` blocks of all sequences and kv heads.
    VARLEN: blocks of SB keys are numbered as in ranges.sequence_of, and rows before CAUSAL of a sequence, which choose
    nothing, have the last number of a chunk.
    """
    i = tl.program_id(0) * N + tl.arange(0, N)
    row = i // FREE
    group = row // choosing
    place = (group // HKV * S + skip + row % choosing).to(tl.int64) * HKV + group % HKV
    block = tl.load(CHOSEN + place * COUNT + INIT + i % FREE, mask=i < total, other=0)
    # A row whose scores are NaN may have chosen fewer blocks: -1 in place of one would be another sequence's.
    block = tl.maximum(block, 0)
    if VARLEN:
        b, start, _, _ = sequence_of(CU, sequences, row % choosing, 1, 0)
        block = tl.where(row % choosing - start < CAUSAL, keys - 1 - group * blocks, start // SB + b + block)
    key = row // rows * keys + group * blocks + block
    tl.store(KEYS + i, (key - bias).to(KEYS.dtype.element_ty), mask=i < total)


@triton.jit
def _count(SORTED, BOUNDS, PIECES, total, keys, last, cap, bias, steps, N: tl.constexpr, VARLEN: tl.constexpr):
    """Where every key's entries begin, and how many work items they make.

    Grid: (keys of all chunks / N, 1). A program owns N keys; it writes the first entry of each to BOUNDS [last + 1] and
    the number of its work items, of `cap` entries, to PIECES [chunks,keys + 1] behind a 0. SORTED [total]: the sorted
    KEYS; `last`: keys of all chunks. VARLEN: the last key of a chunk, of rows that choose nothing, has no items.
    """
    key = tl.program_id(0) * N + tl.arange(0, N)
    begin = _first(SORTED, key - bias, total, steps)
    pieces = tl.cdiv(_first(SORTED, key + 1 - bias, total, steps) - begin, cap)
    if VARLEN:
        pieces = tl.where(key % keys == keys - 1, 0, pieces)
    tl.store(BOUNDS + key, begin, mask=key <= last)
    at = PIECES + key // keys * (keys + 1) + key % keys
    tl.store(at + 1, pieces, mask=key < last)
    tl.store(at, 0, mask=(key < last) & (key % keys == 0))


@triton.jit
def _first(SORTED, key, total, steps):
    """Index of the first of `total` ascending numbers that is >= key, by `steps` halvings."""
    low, high = key * 0, key * 0 + total
    for _ in range(steps):
        middle = (low + high) // 2
        below = (low < high) & (tl.load(SORTED + middle, mask=low < high, other=0) < key)
        high = tl.where(below, high, middle)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def _assign(PIECES, ITEMS, limit, keys, steps, N: tl.constexpr):
    """Which block every work item belongs to.

    Grid: (work items of a chunk / N, chunks). A program owns N work items of one chunk and writes each one's key, or
    `keys` for those beyond the last, to ITEMS [chunks,limit]. PIECES [chunks,keys + 1]: cumulative sums of _count's.
    """
    item, chunk = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1)
    # Key j has the items PIECES[j] .. PIECES[j+1]-1, so j+1 is the first index whose sum exceeds the item.
    key = _first(PIECES + chunk * (keys + 1) + 1, item + 1, keys, steps)
    tl.store(ITEMS + chunk * limit + item, key, mask=item < limit)


@triton.jit
def work_item(ITEMS, PIECES, BOUNDS, item, KEYS, cap):
    """(block's key, first entry, end of entries) of a work item; (KEYS, 0, 0) for one that has no block."""
    key = tl.load(ITEMS + item)
    piece = item - tl.load(PIECES + key)
    begin = tl.load(BOUNDS + key) + piece * cap
    end = tl.minimum(begin + cap, tl.load(BOUNDS + tl.minimum(key + 1, KEYS)))
    none = key >= KEYS
    return key, tl.where(none, 0, begin), tl.where(none, 0, end)


@dataclass(frozen=True)
class Inverse:
    """Entries sorted by (chunk, sequence, kv head, block).

    The first four attributes are kept for a backward, the others are `inverse_sizes`.

    Attributes:
        entries: int32 [entries]; an entry is row · free + free rank.
        bounds: int32 [chunks · keys + 1], the index at which each block's entries begin.
        pieces: int32 [chunks, keys + 1], the number of work items before each block within its chunk.
        items: int32 [chunks, limit], the block of every work item; `keys` for unused items.
        rows: rows per chunk; the last chunk may be shorter.
        keys: blocks of all sequences and kv heads, B · HKV · blocks; with one more for rows of packed sequences that
            choose nothing.
        blocks: selection blocks per sequence; of packed sequences, of all.
        cap: largest number of entries in a work item.
        limit: largest number of work items in a chunk.
    """

    entries: Tensor
    bounds: Tensor
    pieces: Tensor
    items: Tensor
    rows: int
    keys: int
    blocks: int
    cap: int
    limit: int


def slot_rows(q: Tensor, kv_heads: int, dim: int, free: int) -> int:
    """Largest number of rows of one kv head's group in a chunk.

    Its slots take at most four times q's bytes, a limit that is itself kept within 64 MiB and 2 GiB. Kernels address a
    chunk's rows from its first in 32 bits, with all heads of q in between.

    Args:
        dim: the wider of the head dims of keys and values.
        free: blocks that a row chooses.
    """
    row = q.shape[2] // kv_heads * free * dim * q.itemsize
    budget = smaller(larger(4 * q.numel() * q.itemsize, 64 << 20), 2 << 30)
    return larger(1, smaller(budget // row, ((1 << 31) - 1) // (q.shape[2] * dim)))


def inverse_sizes(q: Tensor, part: Part, call: Call) -> tuple[int, int, int, int, int]:
    """Rows, keys, blocks, cap and limit, as in `Inverse`; they follow from shapes, maybe a compiler's symbols."""
    (batch, tokens, kv_heads, dim), free = part.k.shape, call.config.free_blocks
    length, groups = q.shape[1] - call.skipped(q.shape[1]), batch * kv_heads
    most = slot_rows(q, kv_heads, max(dim, part.v.shape[-1]), free)
    rows = ceil_div(groups * length, larger(ceil_div(groups * length, most), 1))
    size = call.config.slc_block
    blocks = call.tiles(tokens, size, 1) if call.packed else call.config.slc_blocks(tokens)
    # About 1024 work items per chunk, each of at least 1024 (row, head) pairs.
    cap = larger(ceil_div(1024, q.shape[2] // kv_heads), ceil_div(rows * free, 1024))
    # Full ones, and one more for every block that the rows of a chunk may choose.
    some, length = larger(rows, 1), larger(length, 1)
    across = smaller(1, length % some) * smaller(1, some % length)  # 1 if chunks and groups end apart
    reached = larger(1, some // length) * (1 - across) + smaller(groups, some // length + 2) * across
    limit = some * free // cap + smaller(reached * blocks, some * free)
    return rows, groups * blocks + call.packed, blocks, cap, limit


def unwritten(q: Tensor, parts: Sequence[Part], call: Call) -> list[Tensor]:
    """Tensors like an inverse's, unwritten; without elements where no row chooses, so that there are as many."""
    free = call.config.free_blocks
    if "slc" not in call.branches or not free:
        return []
    part = parts[call.branches.index("slc")]
    rows, keys, _, _, limit = inverse_sizes(q, part, call)
    choosing = q.shape[0] * part.k.shape[2] * (q.shape[1] - call.skipped(q.shape[1]))
    chunks = ceil_div(choosing, larger(rows, 1))
    shapes = (choosing * free,), (chunks * keys + 1,), (chunks, keys + 1), (chunks, limit)
    return [q.new_empty(shape, dtype=torch.int32) for shape in shapes]


def invert(q: Tensor, part: Part, chosen: Tensor, call: Call) -> Inverse:
    """The inverse of `chosen` for q [B,S,HQ,D] and the selected branch's keys and values.

    Args:
        chosen: selected blocks, int32 [B,S,HKV,slc_count], ascending; rows that choose have no padding. The call's
            config.init_blocks first and local_blocks last of them are forced, the others free.
    """
    (batch, length, kv_heads, count), config, skip = chosen.shape, call.config, call.skipped(chosen.shape[1])
    rows, keys, blocks, cap, limit = sizes = inverse_sizes(q, part, call)
    free, choosing, groups = config.free_blocks, length - skip, batch * kv_heads
    total, chunks = groups * choosing * free, ceil_div(groups * choosing, rows)
    last = chunks * keys
    # Sorting makes a pass for each byte of the keys.
    kind, bias = (torch.int16, 1 << 15) if last <= 1 << 16 else (torch.int32, 0)
    sort_keys = torch.empty(total, dtype=kind, device=chosen.device)
    numbers = dict(total=total, S=length, choosing=choosing, rows=rows, blocks=blocks, keys=keys, skip=skip, bias=bias)
    ranks = dict(HKV=kv_heads, COUNT=count, FREE=free, INIT=config.init_blocks, SB=config.slc_block)
    ranks |= dict(CAUSAL=config.slc_count * config.slc_block, VARLEN=call.packed)
    _launch(_sort_keys, total, 1, dict(CHOSEN=chosen, KEYS=sort_keys) | call.bounds(chosen) | numbers, ranks)
    ordered, order = sort_keys.sort(stable=True)
    bounds, pieces, items = (
        torch.empty(shape, dtype=torch.int32, device=chosen.device)
        for shape in ((last + 1,), (chunks, keys + 1), (chunks, limit))
    )
    numbers = dict(total=total, keys=keys, last=last, cap=cap, bias=bias, steps=total.bit_length() + 1)
    tensors = dict(SORTED=ordered, BOUNDS=bounds, PIECES=pieces)
    _launch(_count, last + 1, 1, tensors | numbers, dict(VARLEN=call.packed))
    pieces = pieces.cumsum(1, dtype=torch.int32)
    numbers = dict(limit=limit, keys=keys, steps=keys.bit_length() + 1)
    _launch(_assign, limit, chunks, dict(PIECES=pieces, ITEMS=items) | numbers, {})
    return Inverse(order.int(), bounds, pieces, items, *sizes)


def _launch(
    kernel: object, total: int, chunks: int, arguments: dict[str, Tensor | int], constants: dict[str, int]
) -> None:
    """Launch over `total` numbers of each chunk."""
    grid, constants = (ceil_div(total, _PROGRAM), chunks), constants | dict(N=_PROGRAM)
    launch(kernel, grid, arguments, constants, Tile(warps=4), stage="inverse_index")
