"""Adapter of PyTorch's scaled_dot_product_attention: dense causal attention, the baseline, which runs everywhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jobs.measure.check import HeadShape
from nsa_core import NSAConfig
from nsa_core.routes import note

INSTALL = "pip install torch"


def version() -> str:
    return torch.__version__


def incompatible(shape: HeadShape, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
    return None


def semantics(config: NSAConfig) -> None:
    return None


def select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    raise AssertionError("dense attention selects nothing")


def attend(inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
    note("dense", "sdpa")
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
