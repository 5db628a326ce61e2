"""Adapter of Scalable-Flash-NSA's operators (github.com/mdy666/Scalable-Flash-Native-Sparse-Attention, flash_nsa).

They follow each other as in its HFNSACore. It keeps the blocks' scores in float16, cubed, before it chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from jobs.adapters import shared as _shared
from jobs.measure.check import HeadShape
from nsa_core import NSAConfig
from nsa_core.routes import note

INSTALL = "pip install git+https://github.com/mdy666/Scalable-Flash-Native-Sparse-Attention 'setuptools<81'"
_NAME = "Scalable-Flash-NSA"
_COMBINE = "flash_nsa.ops.combine"


def version() -> str:
    import_module(_COMBINE)
    return _shared.version_of("flash-nsa", "flash_nsa")


def incompatible(shape: HeadShape, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
    if not _shared.is_power_of_two(shape.head_dim):
        return f"its head dims are powers of two, not {shape.head_dim}"
    if not _shared.is_power_of_two(config.cmp_stride):
        return f"its strides are powers of two, not {config.cmp_stride}"
    return _shared.needs_half_on_cuda(dtype, device)


def semantics(config: NSAConfig) -> NSAConfig:
    return config


def select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    with torch.no_grad():
        _, _, blocks = _compressed(import_module("flash_nsa"), (q, k, v), config)
    absent = blocks >= config.slc_blocks(q.shape[1])
    return _shared.per_sequence(blocks.masked_fill(absent, -1), q.shape[0])


def attend(inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
    nsa, qkv = import_module("flash_nsa"), (inputs["q"], inputs["k"], inputs["v"])
    for branch in ("cmp", "select", "slc"):
        note(branch, _NAME)
    cmp, scale, blocks = _compressed(nsa, qkv, config)
    slc = nsa.select_attn(*map(_shared.flat, qkv), blocks, sm_scale=scale)
    win = _shared.flat(_shared.window(*qkv, config, window_kernel))
    out = import_module(_COMBINE).fused_sigmoid_combine(cmp, slc, win, _shared.flat(inputs["gates"]))
    return out.view_as(qkv[0])


def _compressed(nsa: Any, qkv: tuple[Tensor, Tensor, Tensor], config: NSAConfig) -> tuple[Tensor, float, Tensor]:
    """Compressed branch [B*S,Hq,D] of flat sequences, the scale, and blocks [Hkv,B*S,n]; absent ones are too high."""
    q, k, v = map(_shared.flat, qkv)
    nsa.NSAHelper.set_hyperparameters(
        kernel_size=config.cmp_block,
        stride=config.cmp_stride,
        block_size=config.slc_block,
        window_size=config.window,
        top_n=config.slc_count,
        num_init_blocks=config.init_blocks,
        num_local_blocks=config.local_blocks,
    )
    nsa.NSAHelper.init_cu_seqlens(_shared.bounds(*qkv[0].shape[:2], q.device))
    scale = q.shape[-1] ** -0.5
    k_cmp, v_cmp = nsa.mean_pooling(k), nsa.mean_pooling(v)
    out, lse = nsa.compress_attn(q, k_cmp, v_cmp, sm_scale=scale)
    blocks, _ = nsa.slc_topk_indices(q, k_cmp, lse, sm_scale=scale, maybe_efficient_version=True, scale_slc_p=True)
    return out, scale, blocks
