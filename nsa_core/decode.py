"""Attention of one new token over the cache, with the meaning that the operators give to its position.

It reads the compressed tokens, the chosen blocks and the window: O(S/d + n·l' + w) tokens a step, against S of dense
attention. Plain PyTorch, for every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import resolve
from .cache import Appended, DenseCache, NSACache
from .config import NSAConfig
from .routes import Branch, note

KERNEL = "decode"


def nsa_step(q: Tensor, gates: Tensor, cache: NSACache, config: NSAConfig, select_backend: str) -> Tensor:
    """Output [B,1,Hq,D] of the token that the cache took in last.

    Args:
        q: its rotated query [B,1,Hq,D].
        gates: [B,1,Hq,3] in the order cmp, slc, win.
        cache: with this token's keys and values already in it.
        config: as in prefill.
        select_backend: which one chooses the blocks; the prefill's, so that both choose alike.
    """
    scale, position = q.shape[-1] ** -0.5, cache.length - 1
    cmp, slc, win = gates.to(q.dtype).split(1, -1)
    k_cmp = cache.k_cmp.values()
    blocks = _select(q, k_cmp, position, config, scale, select_backend)
    visible = _positions(blocks, config) <= position
    k_slc, v_slc = _chosen(cache.k_slc, blocks), _chosen(cache.v_slc, blocks)
    out = slc * _attend("slc", q, k_slc, v_slc, scale, visible)
    out = out + win * _attend("win", q, _by_head(cache.k_win.values()), _by_head(cache.v_win.values()), scale)
    if k_cmp.shape[1] > 0:  # before the first compressed token this branch gives zeros
        out = out + cmp * _attend("cmp", q, _by_head(k_cmp), _by_head(cache.v_cmp.values()), scale)
    return out


def dense_step(q: Tensor, cache: DenseCache) -> Tensor:
    """Output [B,1,Hq,D] of the token that the cache took in last; q [B,1,Hq,D] is its rotated query."""
    k, v = _by_head(cache.k.values()), _by_head(cache.v.values())
    return _attend("dense", q, k, v, q.shape[-1] ** -0.5)


def _select(q: Tensor, k_cmp: Tensor, position: int, config: NSAConfig, scale: float, backend: str) -> Tensor:
    """The blocks of the one query, [B,Hkv,slc_count]."""
    select = resolve(backend, ("select",), q.device, q.dtype)["select"].select
    with torch.no_grad():
        return select(q, k_cmp, config, position, scale)[:, 0].long()


def _positions(blocks: Tensor, config: NSAConfig) -> Tensor:
    """Position of every token of the chosen blocks, [B,Hkv,slc_count·slc_block]; past the end for absent blocks."""
    within = torch.arange(config.slc_block, device=blocks.device)
    first = torch.where(blocks < 0, torch.iinfo(torch.int64).max // 2, blocks * config.slc_block)
    return (first.unsqueeze(-1) + within).flatten(2)


def _chosen(cached: Appended, blocks: Tensor) -> Tensor:
    """The tokens of the chosen blocks, [B,Hkv,slc_count·slc_block,D]."""
    batch, heads, _ = blocks.shape
    b = torch.arange(batch, device=blocks.device)[:, None, None]
    h = torch.arange(heads, device=blocks.device)[None, :, None]
    return cached.blocks()[b, blocks.clamp_min(0), :, h].flatten(2, 3)


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _attend(branch: Branch, q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """softmax(q·k·scale)·v over the visible tokens: q [B,1,Hq,D], k and v [B,Hkv,T,D], visible [B,Hkv,T]."""
    note(branch, KERNEL)
    grouped = q[:, 0].unflatten(1, (k.shape[1], -1))  # [B,Hkv,G,D]
    scores = grouped @ k.transpose(-1, -2) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(2), -torch.inf)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    p = torch.softmax(scores, -1, dtype=wide).to(v.dtype)
    return (p @ v).flatten(1, 2).unsqueeze(1)
