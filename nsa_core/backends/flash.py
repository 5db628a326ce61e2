"""The window branch by flash attention kernels: flash-attn 4, flash-attn 2 or PyTorch's, the fastest that is there.

The route names the one that ran. Its gradients have the same bits twice only under
torch.use_deterministic_algorithms(True), which is why "auto" does not take it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import BackendError
from ..routes import note
from . import _providers


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no flash kernel can run there, or None."""
    if device.type != "cuda":
        return f"it runs on cuda, not on {device.type}"
    # Where there is no GPU, the question is about another host: the least that has kernels stands for it.
    host = _providers.here(device) if torch.cuda.is_available() else _providers.Host((8, 0), {})
    return _why_not(host, dtype, 0)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    """Window branch; raises BackendError where no kernel takes the head dims."""
    provider = _fastest(q.device, q.dtype, _providers.common_width(q, v))
    note("win", provider)
    out = _providers.attend(provider, q, k, v, scale, window)
    return out if gate is None else (out * gate.unsqueeze(-1)).to(q.dtype)


@torch.compiler.assume_constant_result
def _fastest(device: torch.device, dtype: torch.dtype, width: int) -> str:
    host = _providers.here(device)
    provider = _providers.first_usable(_providers.PROVIDERS, host, dtype, width)
    if provider is None:
        raise BackendError("backend['win']", "'flash'", f"{_why_not(host, dtype, width)}; use triton or chunked")
    return provider


def _why_not(host: _providers.Host, dtype: torch.dtype, width: int) -> str | None:
    """The reason of the kernel that comes with PyTorch: that one is there wherever it can run."""
    reasons = [_providers.unusable(name, host, dtype, width) for name in _providers.PROVIDERS]
    return None if None in reasons else reasons[-1]
