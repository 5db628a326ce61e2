"""The oracle: Native Sparse Attention as the paper writes it (arXiv 2502.11089, section 3), in plain PyTorch.

Written to be read beside the paper, not to be fast: memory and time grow as S². float64 inputs are computed in
float64, all others in float32; results come in the input's dtype. Everything is differentiable by autograd, except
the selection, through which the paper passes no gradient.

Symbols: B batch, S query rows, T tokens of the sequence (query row r is at position T - S + r), H query heads in
groups of G per kv head, N compressed tokens.
"""

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
    return _attend_exactly(q, k_cmp, v_cmp, gate, ended(q, k_cmp, config, offset), scale)


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
    p = probabilities(wide(q), wide(k_cmp), ended(q, k_cmp, config, offset), scale)  # p_cmp (Eq. 8)
    kv_heads = k_cmp.shape[2]
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
    return _attend_exactly(q, k, v, gate, in_blocks(q, k, blocks, config), scale)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    """Window branch [B,S,H,Dv]: attention over positions max(0, t - window + 1) .. t."""
    note("win", "reference")
    return _attend_exactly(q, k, v, gate, in_window(q, k, window), scale)


def positions(q: Tensor, offset: int) -> Tensor:
    """Positions [S] of the rows of q [B,S,..]."""
    return torch.arange(q.shape[1], device=q.device) + offset


def wide(x: Tensor) -> Tensor:
    """x in float32, or float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def ended(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int) -> Tensor:
    """Whether compressed token i ends, at i·d + l - 1, at or before each row of q: [S,N]."""
    ends = torch.arange(k_cmp.shape[1], device=q.device) * config.cmp_stride + config.cmp_block - 1
    return ends <= positions(q, offset)[:, None]


def in_blocks(q: Tensor, k: Tensor, blocks: Tensor, config: NSAConfig) -> Tensor:
    """Whether a token is in the chosen blocks and at or before the row of q: [B,H,S,T]."""
    count = config.slc_blocks(k.shape[1])
    chosen = blocks.new_zeros(*blocks.shape[:-1], count + 1, dtype=torch.bool)
    chosen.scatter_(-1, torch.where(blocks < 0, count, blocks).long(), True)
    per_token = chosen[..., :count].repeat_interleave(config.slc_block, -1)[..., : k.shape[1]]  # [B,S,Hkv,T]
    visible = per_token.transpose(1, 2) & in_window(q, k, k.shape[1])
    return visible.repeat_interleave(q.shape[2] // k.shape[2], 1)


def in_window(q: Tensor, k: Tensor, window: int) -> Tensor:
    """Whether a token is among the last `window` up to the row of q: [S,T]."""
    tokens, rows = torch.arange(k.shape[1], device=q.device), positions(q, k.shape[1] - q.shape[1])[:, None]
    return (tokens <= rows) & (tokens > rows - window)


def probabilities(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax of q·k·scale over the visible keys, [B,H,S,T]; zeros, and not NaN, in rows that see none.

    The product is in the inputs' dtype, the softmax in float32, or float64 for float64.
    """
    group, hidden = q.shape[2] // k.shape[2], ~visible
    scores = wide(q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(group, 1).transpose(-1, -2) * scale)
    return torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1).masked_fill(hidden, 0)


def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, visible: Tensor, scale: float) -> Tensor:
    """Gated output gate · Σ_s p[t,s] v[s] over the visible keys, [B,S,H,Dv], with products in the inputs' dtype."""
    p, group = probabilities(q, k, visible, scale), q.shape[2] // v.shape[2]
    out = (p.to(v.dtype) @ v.transpose(1, 2).repeat_interleave(group, 1)).transpose(1, 2)
    return out if gate is None else (out * gate.unsqueeze(-1)).to(out.dtype)


def _attend_exactly(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, visible: Tensor, scale: float) -> Tensor:
    gate = None if gate is None else wide(gate)
    return attend(wide(q), wide(k), wide(v), gate, visible, scale).to(q.dtype)
