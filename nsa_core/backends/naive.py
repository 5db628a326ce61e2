"""Every branch as dense attention under a mask: S² memory, all of it kept by autograd.

The project's starting point, and the contrast in every scaling benchmark. Products run in the input's dtype, softmax in
float32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import NSAConfig
from ..routes import note
from . import _common
from ._common import gated, positions, wide


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    """Compressed branch; its scores [B,Hq,S,Nc] take S²/d memory."""
    note("cmp", "naive")
    return _attend(q, k_cmp, v_cmp, gate, _visible_compressed(q, k_cmp, config, offset), scale)


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks of all queries at once, from scores in float32 (float64 for float64)."""
    note("select", "naive")
    return best_blocks(q, k_cmp, config, offset, scale)


def best_blocks(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Blocks as `select` gives them, for callers that note the route themselves."""
    chosen = _common.choose(_scores(q, k_cmp, config, offset, scale), positions(q, offset), config)
    return chosen.unflatten(0, (q.shape[0], -1)).transpose(1, 2).contiguous()


def block_ranks(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Scores [B·Hkv,S,blocks] by which blocks are selected: infinite for forced ones, -1 for those after the query."""
    return _common.ranked(_scores(q, k_cmp, config, offset, scale), positions(q, offset), config)


@torch.no_grad()
def _scores(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    visible = _visible_compressed(q, k_cmp, config, offset)
    p = _probabilities(wide(q), wide(k_cmp), visible, scale)
    grouped = p.unflatten(1, (k_cmp.shape[2], -1)).transpose(2, 3).flatten(0, 1)  # [B·Hkv,S,G,Nc]
    return _common.importance(grouped, config.slc_blocks(offset + q.shape[1]), config)


def selected(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor, config: NSAConfig, scale: float
) -> Tensor:
    """Selected branch under a [B,Hq,S,T] mask."""
    note("slc", "naive")
    count = config.slc_blocks(k.shape[1])
    chosen = blocks.new_zeros(*blocks.shape[:-1], count + 1, dtype=torch.bool)
    chosen.scatter_(-1, torch.where(blocks < 0, count, blocks).long(), True)
    per_token = chosen[..., :count].repeat_interleave(config.slc_block, -1)[..., : k.shape[1]]  # [B,S,Hkv,T]
    tokens, rows = _tokens_and_rows(q, k)
    visible = per_token.transpose(1, 2) & (tokens <= rows)
    return _attend(q, k, v, gate, visible.repeat_interleave(q.shape[2] // k.shape[2], 1), scale)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    """Window branch under an [S,T] mask."""
    note("win", "naive")
    tokens, rows = _tokens_and_rows(q, k)
    return _attend(q, k, v, gate, (tokens <= rows) & (tokens > rows - window), scale)


def _tokens_and_rows(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of k [T] and of q [S,1]."""
    return torch.arange(k.shape[1], device=q.device), positions(q, k.shape[1] - q.shape[1]).unsqueeze(-1)


def _visible_compressed(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int) -> Tensor:
    ends = torch.arange(k_cmp.shape[1], device=q.device) * config.cmp_stride + config.cmp_block - 1
    return ends <= positions(q, offset).unsqueeze(-1)


def _expand(x: Tensor, heads: int) -> Tensor:
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)


def _probabilities(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax over the visible keys [B,Hq,S,T]; zeros in rows that see none."""
    scores, hidden = wide(q.transpose(1, 2) @ _expand(k, q.shape[2]).transpose(-1, -2) * scale), ~visible
    return torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1).masked_fill(hidden, 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, visible: Tensor, scale: float) -> Tensor:
    p = _probabilities(q, k, visible, scale)
    return gated((p.to(v.dtype) @ _expand(v, q.shape[2])).transpose(1, 2), gate)
