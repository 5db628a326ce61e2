"""Steps that several adapters share: packed sequences, the window by a flash kernel, the gated sum, block tables."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module, metadata

import torch
from torch import Tensor

from nsa_core import NSAConfig
from nsa_core.backends import flash
from nsa_core.routes import note

TORCH_FIXED = "torch-fixed"
"""PyTorch's flash attention of sequences of one length, which it offers no public function with a window for."""

HALF = (torch.bfloat16, torch.float16)


def version_of(distribution: str, module: str) -> str:
    """Import a module; returns its distribution's version, "a checkout" where it is imported from one.

    Raises:
        Exception: whatever the import raises.
    """
    import_module(module)
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "a checkout"


def needs_half_on_cuda(dtype: torch.dtype, device: str) -> str | None:
    """Reason against a peer of Triton kernels for half precision; None if there is none."""
    if device != "cuda":
        return f"it runs on cuda, not on the {device}"
    if dtype not in HALF:
        return f"it computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return None


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def flat(x: Tensor) -> Tensor:
    """x [B,S,..] as [B*S,..]: sequences one after the other."""
    return x.flatten(0, 1)


@lru_cache(maxsize=8)
def bounds(batch: int, seq_len: int, device: torch.device) -> Tensor:
    """Bounds [batch + 1], int32, of sequences of one length that follow each other."""
    return torch.arange(0, batch * seq_len + 1, seq_len, dtype=torch.int32, device=device)


def window(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, kernel: str | None) -> Tensor:
    """Window branch [B,S,Hq,D] over `config.window` positions, the query's own included, by a flash kernel."""
    scale = q.shape[-1] ** -0.5
    if kernel != TORCH_FIXED:
        return flash.window(q, k, v, None, config.window, scale, kernel)
    note("win", TORCH_FIXED)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False,
        scale=scale, window_size_left=config.window - 1, window_size_right=0,
    )[0]  # fmt: skip


def gated(parts: tuple[Tensor, Tensor, Tensor], logits: Tensor) -> Tensor:
    """Sum of the branches [..,Hq,D], each times the sigmoid of its logit [..,Hq]."""
    cmp, slc, win = torch.sigmoid(logits).unsqueeze(-1).unbind(-2)
    return cmp * parts[0] + slc * parts[1] + win * parts[2]


def per_sequence(blocks: Tensor, batch: int) -> Tensor:
    """Table [Hkv,B*S,n] of blocks as [B,S,Hkv,n]."""
    return blocks.transpose(0, 1).unflatten(0, (batch, -1))
