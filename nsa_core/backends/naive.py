"""Every branch as dense attention under a mask: S² memory, all of it kept by autograd.

The project's starting point, and the contrast in every scaling benchmark. Products run in the input's dtype, softmax in
float32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..config import NSAConfig
from ..reference import positions, wide
from ..routes import note
from . import _common
from ._common import gated

unavailable = reference.unavailable


def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    """Compressed branch; its scores [B,Hq,S,Nc] take S²/d memory."""
    note("cmp", "naive")
    ends = torch.arange(k_cmp.shape[1], device=q.device) * config.cmp_stride + config.cmp_block - 1
    return _attend(q, k_cmp, v_cmp, gate, ends <= positions(q, offset).unsqueeze(-1), scale)


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float, kernel: str = "naive") -> Tensor:
    """Selected blocks of all queries at once, from scores in float32 (float64 for float64); noted as `kernel`'s."""
    note("select", kernel)
    chosen = _common.choose(_scores(q, k_cmp, config, offset, scale), positions(q, offset), config)
    return chosen.unflatten(0, (q.shape[0], -1)).transpose(1, 2).contiguous()


def block_ranks(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Scores [B·Hkv,S,blocks] by which blocks are selected: infinite for forced ones, -1 for those after the query."""
    return _common.ranked(_scores(q, k_cmp, config, offset, scale), positions(q, offset), config)


@torch.no_grad()
def _scores(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    ends = torch.arange(k_cmp.shape[1], device=q.device) * config.cmp_stride + config.cmp_block - 1
    p = _probabilities(wide(q), wide(k_cmp), ends <= positions(q, offset).unsqueeze(-1), scale)
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
    tokens, rows = torch.arange(k.shape[1], device=q.device), positions(q, k.shape[1] - q.shape[1]).unsqueeze(-1)
    visible = per_token.transpose(1, 2) & (tokens <= rows)
    return _attend(q, k, v, gate, visible.repeat_interleave(q.shape[2] // k.shape[2], 1), scale)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    """Window branch under an [S,T] mask."""
    note("win", "naive")
    tokens, rows = torch.arange(k.shape[1], device=q.device), positions(q, k.shape[1] - q.shape[1]).unsqueeze(-1)
    return _attend(q, k, v, gate, (tokens <= rows) & (tokens > rows - window), scale)


def _probabilities(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax over the visible keys [B,Hq,S,T]; zeros in rows that see none."""
    group = q.shape[2] // k.shape[2]
    scores = wide(q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(group, 1).transpose(-1, -2) * scale)
    hidden = ~visible
    return torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1).masked_fill(hidden, 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, visible: Tensor, scale: float) -> Tensor:
    p, group = _probabilities(q, k, visible, scale), q.shape[2] // v.shape[2]
    return gated((p.to(v.dtype) @ v.transpose(1, 2).repeat_interleave(group, 1)).transpose(1, 2), gate)
