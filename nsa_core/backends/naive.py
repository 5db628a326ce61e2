"""Every branch as dense attention under a mask: S² memory, all of it kept by autograd.

The project's starting point, and the contrast in every scaling benchmark. Products run in the input's dtype, softmax in
float32 (float64 for float64); in float32 and float64 that is the oracle's attention.
"""

import torch
from torch import Tensor

from .. import reference
from ..config import NSAConfig
from ..reference import attend, ended, in_blocks, in_window, positions, probabilities, wide
from ..routes import note
from . import _common

unavailable = reference.unavailable


def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    """Compressed branch; its scores [B,Hq,S,Nc] take S²/d memory."""
    note("cmp", "naive")
    return attend(q, k_cmp, v_cmp, gate, ended(q, k_cmp, config, offset), scale)


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
    p = probabilities(wide(q), wide(k_cmp), ended(q, k_cmp, config, offset), scale)
    grouped = p.unflatten(1, (k_cmp.shape[2], -1)).transpose(2, 3).flatten(0, 1)  # [B·Hkv,S,G,Nc]
    return _common.importance(grouped, config.slc_blocks(offset + q.shape[1]), config)


def selected(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor, config: NSAConfig, scale: float
) -> Tensor:
    """Selected branch under a [B,Hq,S,T] mask."""
    note("slc", "naive")
    return attend(q, k, v, gate, in_blocks(q, k, blocks, config), scale)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    """Window branch under an [S,T] mask."""
    note("win", "naive")
    return attend(q, k, v, gate, in_window(q, k, window), scale)
