"""Adapter of flash-linear-attention's parallel_nsa (github.com/fla-org/flash-linear-attention, package fla-core).

It pools keys and values without overlap, in blocks as long as the selected ones, and always selects the first block and
the last two: its oracle is the attention of such a configuration, a smaller problem than the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from jobs.adapters import shared as _shared
from jobs.measure.check import HeadShape
from nsa_core import NSAConfig
from nsa_core.routes import note

INSTALL = "pip install fla-core einops"
_NAME = "flash-linear-attention"
_LEAST_GROUP = 16


def version() -> str:
    return _shared.version_of("fla-core", "fla.ops.nsa.parallel")


def incompatible(shape: HeadShape, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
    group = shape.query_heads // shape.kv_heads
    if group < _LEAST_GROUP or not _shared.is_power_of_two(group):
        return f"its groups of query heads are powers of two from {_LEAST_GROUP} on, not {group}"
    if not _shared.is_power_of_two(config.slc_count) or config.slc_block < 2 * config.slc_count:
        return f"it selects a power of two of blocks, at most half as many as slc_block, not {config.slc_count}"
    if not _shared.is_power_of_two(config.slc_block):
        return f"its blocks are powers of two, not {config.slc_block} tokens"
    if (config.init_blocks, config.local_blocks) != (1, 2):
        return "it always selects the first block and the last two: use init_blocks: 1, local_blocks: 2"
    return _shared.needs_half_on_cuda(dtype, device)


def semantics(config: NSAConfig) -> NSAConfig:
    return replace(config, cmp_block=config.slc_block, cmp_stride=config.slc_block)


def select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    nsa, block, scale = import_module("fla.ops.nsa.parallel"), config.slc_block, q.shape[-1] ** -0.5
    pooled = [nsa.mean_pooling(x, block, None) for x in (k, v)]
    _, lse = nsa.parallel_nsa_compression(q, *pooled, TK=k.shape[1], block_size=block, scale=scale)
    return nsa.parallel_nsa_topk(
        q=q, k=pooled[0], TK=k.shape[1], lse=lse, block_counts=config.slc_count, block_size=block, scale=scale
    )


def attend(inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
    nsa = import_module("fla.ops.nsa.parallel")
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    cmp, slc, win = torch.sigmoid(inputs["gates"]).unbind(-1)
    for branch in ("cmp", "select", "slc"):
        note(branch, _NAME)
    out = nsa.parallel_nsa(q, k, v, cmp, slc, None, block_counts=config.slc_count, block_size=config.slc_block)
    return torch.addcmul(out, _shared.window(q, k, v, config, window_kernel), win.unsqueeze(-1))
