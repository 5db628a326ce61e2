"""Adapter of native-sparse-attention-triton's operators (github.com/XunhaoLai/native-sparse-attention-triton)."""

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

INSTALL = "pip install git+https://github.com/XunhaoLai/native-sparse-attention-triton einops"
_NAME = "native-sparse-attention-triton"
_MODULE = "native_sparse_attention.ops"
_WIDEST = 128


def version() -> str:
    return _shared.version_of(_NAME, _MODULE)


def incompatible(shape: HeadShape, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
    if shape.head_dim > _WIDEST:
        return f"its head dims are at most {_WIDEST}, not {shape.head_dim}"
    return sizes(config) or _shared.needs_half_on_cuda(dtype, device)


def sizes(config: NSAConfig) -> str | None:
    """Reason against the block sizes, also those of flash_sparse_attention, which has these operators, too."""
    if config.slc_block not in (32, 64, 128, 256):
        return f"its selected blocks have 32, 64, 128 or 256 tokens, not {config.slc_block}"
    if config.cmp_block not in (16, 32, 64, 128):
        return f"its compressed blocks have 16, 32, 64 or 128 tokens, not {config.cmp_block}"
    return None


def semantics(config: NSAConfig) -> NSAConfig:
    return config


def select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    return chosen_blocks(import_module(_MODULE), (q, k, v), config)


def attend(inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
    ops, qkv = import_module(_MODULE), (inputs["q"], inputs["k"], inputs["v"])
    for branch in ("cmp", "select", "slc"):
        note(branch, _NAME)
    cmp, blocks, starts = compressed(ops, qkv, config)
    slc = ops.topk_sparse_attention(*map(_shared.flat, qkv), blocks, config.slc_block, starts, None)
    parts = (cmp.view_as(qkv[0]), slc.view_as(qkv[0]), _shared.window(*qkv, config, window_kernel))
    return _shared.gated(parts, inputs["gates"])


def compressed(ops: Any, qkv: tuple[Tensor, Tensor, Tensor], config: NSAConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Compressed branch [B*S,Hq,D] of flat sequences, blocks [Hkv,B*S,n] and the sequences' bounds."""
    q, k, v = map(_shared.flat, qkv)
    batch, seq_len = qkv[0].shape[:2]
    starts = _shared.bounds(batch, seq_len, q.device)
    k_cmp, starts_cmp = ops.avgpool_compress(k, None, starts, config.cmp_block, config.cmp_stride)
    v_cmp, _ = ops.avgpool_compress(v, None, starts, config.cmp_block, config.cmp_stride)
    out, blocks = ops.compressed_attention(
        q, k_cmp, v_cmp, config.cmp_block, config.cmp_stride, config.slc_block, config.slc_count, starts, starts_cmp,
        seq_len, config.cmp_tokens(seq_len), None, config.init_blocks, config.local_blocks,
    )  # fmt: skip
    return out, blocks, starts


def chosen_blocks(ops: Any, qkv: tuple[Tensor, Tensor, Tensor], config: NSAConfig) -> Tensor:
    """Blocks [B,S,Hkv,n] that `compressed` chooses."""
    with torch.no_grad():
        return _shared.per_sequence(compressed(ops, qkv, config)[1], qkv[0].shape[0])
