"""Adapter of Flash-Sparse-Attention's operators (github.com/Relaxed-System-Lab/Flash-Sparse-Attention).

Its compressed branch comes from the reference that is part of it (`nsa_ref`), which rounds the blocks' scores to
bfloat16 before it chooses. As in its module, groups of more than 8 query heads take the reference's selected branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch
from torch import Tensor

from jobs.adapters import nsa_triton
from jobs.adapters import shared as _shared
from jobs.measure.check import HeadShape
from nsa_core import NSAConfig
from nsa_core.routes import note

INSTALL = "put a checkout of https://github.com/Relaxed-System-Lab/Flash-Sparse-Attention on PYTHONPATH, with einops"
_REFERENCE = "nsa_ref.ops"
_OWN = "fsa.ops"
_LARGEST_GROUP = 8
_WIDEST = 256


def version() -> str:
    import_module(_REFERENCE)
    return _shared.version_of("flash-sparse-attention", _OWN)


def incompatible(shape: HeadShape, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
    if shape.head_dim > _WIDEST:
        return f"its head dims are at most {_WIDEST}, not {shape.head_dim}"
    return nsa_triton.sizes(config) or _shared.needs_half_on_cuda(dtype, device)


def semantics(config: NSAConfig) -> NSAConfig:
    return config


def select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    return nsa_triton.chosen_blocks(import_module(_REFERENCE), (q, k, v), config)


def attend(inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
    reference, qkv = import_module(_REFERENCE), (inputs["q"], inputs["k"], inputs["v"])
    small = qkv[0].shape[2] // qkv[1].shape[2] <= _LARGEST_GROUP
    selected = import_module(_OWN).FSA_topk_sparse_attention if small else reference.topk_sparse_attention
    for branch in ("cmp", "select"):
        note(branch, "nsa_ref")
    note("slc", "fsa" if small else "nsa_ref")
    cmp, blocks, starts = nsa_triton.compressed(reference, qkv, config)
    slc = selected(*map(_shared.flat, qkv), blocks, config.slc_block, starts, None)
    parts = (cmp.view_as(qkv[0]), slc.view_as(qkv[0]), _shared.window(*qkv, config, window_kernel))
    return _shared.gated(parts, inputs["gates"])
