"""Every query's keys and values copied beside it, for all queries at once: S times the keys that a query sees.

The contrast to the chunked backend, which copies for some queries at a time and copies again in the backward: here
autograd keeps all copies. Fewer keys than a query's most are padded and masked. Products run in the input's dtype,
softmax in float32 (float64 for float64). "auto" does not take this backend.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import NSAConfig
from ..reference import ended, positions, wide
from ..routes import note
from . import naive
from ._common import copies, gated

unavailable = naive.unavailable


def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    """Compressed branch; all compressed tokens are copied for every query, S²/d of them."""
    note("cmp", "gather")
    tokens = torch.arange(k_cmp.shape[1], device=q.device)
    hidden = ~ended(q, k_cmp, config, offset)
    return _attend(q, k_cmp, v_cmp, gate, tokens.expand_as(hidden)[None, None], hidden[None, None], scale)


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks of all queries at once; nothing is selected yet that could be copied."""
    return naive.select(q, k_cmp, config, offset, scale, "gather")


def selected(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor, config: NSAConfig, scale: float
) -> Tensor:
    """Selected branch; the selected blocks are copied whole for every query."""
    note("slc", "gather")
    per_head = blocks.transpose(1, 2).long()  # [B,Hkv,S,n]
    tokens = per_head.unsqueeze(-1) * config.slc_block + torch.arange(config.slc_block, device=q.device)
    hidden = (tokens < 0) | (tokens > positions(q, k.shape[1] - q.shape[1])[:, None, None])
    return _attend(q, k, v, gate, per_head.clamp(min=0), hidden.flatten(3), scale, config.slc_block)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    """Window branch; the window's keys are copied for every query."""
    note("win", "gather")
    before = torch.arange(min(window, k.shape[1]) - 1, -1, -1, device=q.device)
    tokens = positions(q, k.shape[1] - q.shape[1])[:, None] - before
    return _attend(q, k, v, gate, tokens.clamp(min=0)[None, None], (tokens < 0)[None, None], scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, places: Tensor, hidden: Tensor, scale: float, unit: int = 1
) -> Tensor:
    """Attention of every query to its own copies.

    Args:
        places: blocks of `unit` tokens that a query sees, int64 [B or 1,Hkv or 1,S,n].
        hidden: True where a key is masked, [B or 1,Hkv or 1,S,n·unit].
    """
    batch, kv_heads, per_head = k.shape[0], k.shape[2], -(-k.shape[1] // unit)
    first = torch.arange(batch * kv_heads, device=q.device).view(batch, kv_heads, 1, 1) * per_head
    rows = (first + places).flatten()
    shape = batch, kv_heads, q.shape[1], hidden.shape[-1]
    copied: list[Tensor] = []
    for x in (k, v):
        missing = -x.shape[1] % unit  # the last block is filled up with zeros
        filled = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        blocks = filled.transpose(1, 2).reshape(-1, unit * x.shape[-1])
        copied.append(copies(blocks, rows).view(*shape, x.shape[-1]))
    keys, values = copied
    queries = q.unflatten(2, (kv_heads, -1)).transpose(1, 2)  # [B,Hkv,S,G,D]
    scores, hidden = wide(queries @ keys.mT * scale), hidden.unsqueeze(-2)
    p = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1).masked_fill(hidden, 0)
    return gated((p.to(v.dtype) @ values).transpose(1, 2).flatten(2, 3), gate)
