# pyright: reportMissingImports=false
"""Which queries chose a block: the inverse of the selection, cut into work items of bounded size.

Queries are taken in chunks, so that what the selected branch writes for each (query, chosen block) stays small. Within
a chunk, entries (query, kv head, rank) are sorted by block, stably, so that every block meets its queries in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._launch import ceil_div


@dataclass(frozen=True)
class Inverse:
    """Entries sorted by (chunk, batch, kv head, block).

    Attributes:
        entries: int32; an entry is (query row · HKV + kv head) · n + rank within its chunk, query row counting from the
            chunk's first over batch and sequence.
        bounds: int32 [chunks · (keys + 1) + 1], where the entries of each block begin; the extra key of each chunk
            collects the padding.
        pieces: int32 [chunks, keys + 2], work items before each block within its chunk.
        items: int32 [chunks, limit], the block of every work item; `keys` for those not needed.
        rows: query rows of a chunk (batch and sequence flattened), the last one possibly shorter.
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
    def chunks(self) -> int:
        return len(self.items)

    @property
    def limit(self) -> int:
        """Work items of a chunk at most."""
        return self.items.shape[1]


def invert(chosen: Tensor, blocks: int, rows: int, cap: int) -> Inverse:
    """The inverse of `chosen` int32 [B,S,HKV,n].

    Args:
        blocks: selection blocks of a sequence.
        rows: query rows of a chunk.
        cap: entries of a work item.
    """
    batch, length, kv_heads, count = chosen.shape
    keys, total = batch * kv_heads * blocks, batch * length
    chunks = ceil_div(total, rows)
    row = torch.arange(total, device=chosen.device, dtype=torch.int32)
    head = torch.arange(kv_heads, device=chosen.device, dtype=torch.int32)
    first = (row // rows * (keys + 1))[:, None] + ((row // length * kv_heads)[:, None] + head) * blocks
    flat = chosen.view(total, kv_heads, count)
    padding = (row // rows * (keys + 1) + keys)[:, None, None]
    key = torch.where(flat < 0, padding, flat + first[:, :, None]).flatten()
    sorted_key, order = key.sort(stable=True)
    per_chunk = rows * kv_heads * count
    every = torch.arange(chunks * (keys + 1) + 1, device=chosen.device, dtype=torch.int32)
    bounds = torch.searchsorted(sorted_key, every, out_int32=True)
    counts = bounds.diff().view(chunks, keys + 1)[:, :keys]
    pieces = torch.zeros(chunks, keys + 2, dtype=torch.int32, device=chosen.device)
    torch.cumsum((counts + (cap - 1)) // cap, 1, dtype=torch.int32, out=pieces[:, 1 : keys + 1])
    pieces[:, keys + 1] = pieces[:, keys]
    limit = per_chunk // cap + min(keys, per_chunk)
    work = torch.arange(limit, device=chosen.device, dtype=torch.int32).expand(chunks, limit).contiguous()
    items = torch.searchsorted(pieces[:, 1 : keys + 1].contiguous(), work, right=True, out_int32=True)
    entries = (order % per_chunk).int()
    return Inverse(entries, bounds, pieces, items, rows, keys, blocks, cap)
