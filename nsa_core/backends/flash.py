"""The window branch by the fastest flash attention kernel installed: flash-attn 4, flash-attn 2 or PyTorch's.

The route names the kernel that ran. Gradients are bit-reproducible only under
torch.use_deterministic_algorithms(True), so "auto" does not take this backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._decorators import constant
from ..errors import BackendError
from ..routes import note
from . import _providers
from ._common import gated

KERNELS = _providers.PROVIDERS


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why no flash kernel can run on `device` in `dtype`; None if one can."""
    if device.type != "cuda":
        return f"it runs on cuda, not on {device.type}"
    # Without a GPU here the question is about another host: assume the oldest GPU that has kernels.
    host = _providers.here(device) if torch.cuda.is_available() else _providers.Host((8, 0), {})
    _, reason = _providers.first_usable(_providers.PROVIDERS, host, dtype, 0)
    return reason


def window(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float, kernel: str | None = None
) -> Tensor:
    """Window branch by `kernel` of KERNELS; None: by the fastest that is installed.

    Raises:
        BackendError: no kernel takes the head dims.
    """
    provider = kernel or _fastest(q.device, q.dtype, _providers.common_width(q, v))
    note("win", provider)
    return gated(_providers.attend(provider, q, k, v, scale, window), gate)


@constant
def _fastest(device: torch.device, dtype: torch.dtype, width: int) -> str:
    host = _providers.here(device)
    provider, reason = _providers.first_usable(_providers.PROVIDERS, host, dtype, width)
    if provider is None:  # the reason is that of PyTorch's own kernel, which is never missing
        raise BackendError("backend['win']", "'flash'", f"{reason}; use triton or chunked")
    return provider
