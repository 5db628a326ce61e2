"""The oracle: Native Sparse Attention as the paper writes it (arXiv 2502.11089, section 3), in plain PyTorch.

Written to be read beside the paper, not to be fast: memory and time grow as S². float64 inputs are computed in
float64, all others in float32; results come in the input's dtype. Everything is differentiable by autograd, except
the selection, through which the paper passes no gradient.

Symbols: B batch, S query rows, T tokens of the sequence (query row r is at position T - S + r), H query heads in
groups of G per kv head, N compressed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import NSAConfig
from .routes import note


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    """Compressed branch [B,S,H,Dv]: attention over the compressed tokens that end at or before the query."""
    note("cmp", "reference")
    p = _compressed_probabilities(q, k_cmp, config, offset, scale)
    return _weigh(p, v_cmp, gate, q.dtype)


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks, int32 [B,S,Hkv,slc_count], ascending, padded with -1 (Eq. 8 to 12).

    Those of a query are the n best candidates: forced ones first, then by (score descending, index ascending).
    """
    note("select", "reference")
    with torch.no_grad():
        scores = block_scores(q, k_cmp, config, offset, scale)
        index = torch.arange(scores.shape[-1], device=scores.device)
        own = (positions(q, offset) // config.slc_block)[:, None]
        candidate = index <= own
        forced = candidate & ((index < config.init_blocks) | (index > own - config.local_blocks))
        ranked = scores.masked_fill(forced, torch.inf).masked_fill(~candidate, -torch.inf)
        order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., : config.slc_count]
        is_candidate = candidate.expand_as(scores).gather(-1, order)
        after_all = scores.shape[-1]
        ascending = order.masked_fill(~is_candidate, after_all).sort(-1).values
        chosen = ascending.new_full((*scores.shape[:-1], config.slc_count), -1)
        chosen[..., : ascending.shape[-1]] = ascending.masked_fill(ascending == after_all, -1)
        return chosen.int().transpose(1, 2).contiguous()


def block_scores(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """p_slc [B,Hkv,S,blocks] of every selection block up to that of the last query (Eq. 8 to 10).

    Sums run in a fixed order, one head after the other and one token after the other, so that blocks of equal
    importance get equal scores to the last bit.
    """
    p, kv_heads = _compressed_probabilities(q, k_cmp, config, offset, scale), k_cmp.shape[2]
    batch, heads, rows, tokens = p.shape
    per_head = p.view(batch, kv_heads, heads // kv_heads, rows, tokens).unbind(2)
    shared = sum(per_head[1:], per_head[0])  # [B,Hkv,S,N]
    scores = p.new_zeros(batch, kv_heads, rows, config.slc_blocks(offset + rows))
    for j in range(scores.shape[-1]):
        start, end = j * config.slc_block, (j + 1) * config.slc_block
        first = max(0, (start - config.cmp_block) // config.cmp_stride + 1)  # of the tokens that overlap block j
        for i in range(first, min(tokens, end // config.cmp_stride)):
            token = i * config.cmp_stride
            overlap = min(token + config.cmp_block, end) - max(token, start)  # |[i·d, i·d + l) ∩ [j·l', (j+1)·l')|
            scores[..., j] += shared[..., i] * (overlap / config.cmp_stride)
    return scores


def selected(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor, config: NSAConfig, scale: float
) -> Tensor:
    """Selected branch [B,S,H,Dv]: attention over the tokens of the chosen blocks at positions <= t."""
    note("slc", "reference")
    tokens, rows = torch.arange(k.shape[1], device=q.device), positions(q, k.shape[1] - q.shape[1])[:, None]
    chosen = (blocks.transpose(1, 2).unsqueeze(-1) == tokens // config.slc_block).any(3)  # [B,Hkv,S,T]
    visible = chosen & (tokens <= rows)
    group = q.shape[2] // k.shape[2]
    p = _probabilities(q, k, visible.repeat_interleave(group, 1), scale)
    return _weigh(p, v, gate, q.dtype)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    """Window branch [B,S,H,Dv]: attention over positions max(0, t - window + 1) .. t."""
    note("win", "reference")
    tokens, rows = torch.arange(k.shape[1], device=q.device), positions(q, k.shape[1] - q.shape[1])[:, None]
    visible = (tokens <= rows) & (tokens > rows - window)
    return _weigh(_probabilities(q, k, visible, scale), v, gate, q.dtype)


def positions(q: Tensor, offset: int) -> Tensor:
    """Positions [S] of the rows of q [B,S,..]."""
    return torch.arange(q.shape[1], device=q.device) + offset


def wide(x: Tensor) -> Tensor:
    """x in float32, or float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def _probabilities(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax of q·k·scale over the visible keys, [B,H,S,T]; zeros, and not NaN, in rows that see none."""
    group = q.shape[2] // k.shape[2]
    scores = wide(q).transpose(1, 2) @ wide(k).transpose(1, 2).repeat_interleave(group, 1).transpose(-1, -2) * scale
    least = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(~visible, least), -1).masked_fill(~visible, 0)


def _weigh(p: Tensor, v: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Gated output gate · Σ_s p[t,s] v[s], [B,S,H,Dv]."""
    out = (p @ wide(v).transpose(1, 2).repeat_interleave(p.shape[1] // v.shape[2], 1)).transpose(1, 2)
    if gate is not None:
        out = out * wide(gate).unsqueeze(-1)
    return out.to(dtype)


def _compressed_probabilities(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """p_cmp [B,H,S,N] (Eq. 8): softmax over the tokens i whose last position i·d + l - 1 is <= t."""
    ends = torch.arange(k_cmp.shape[1], device=q.device) * config.cmp_stride + config.cmp_block - 1
    return _probabilities(q, k_cmp, ends <= positions(q, offset)[:, None], scale)
