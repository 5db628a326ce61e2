"""Dense causal attention by PyTorch's scaled_dot_product_attention, with the kernel that ran on record."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from ..routes import note
from . import chunked

_NAMES = {
    SDPBackend.FLASH_ATTENTION: "sdpa-flash",
    SDPBackend.EFFICIENT_ATTENTION: "sdpa-efficient",
    SDPBackend.CUDNN_ATTENTION: "sdpa-cudnn",
    SDPBackend.MATH: "sdpa-math",
}


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention [B,S,Hq,Dv]; the rows of q are the last S positions of k.

    Windows, and several rows of q behind a longer k, go through the chunked window branch: a mask for
    scaled_dot_product_attention would take S² memory, and its is_causal aligns to the first key instead of the last.
    """
    rows, tokens = q.shape[1], k.shape[1]
    if (window is not None and window < tokens) or 1 < rows < tokens:
        note("dense", "chunked")
        return chunked.banded(q, k, v, None, min(window or tokens, tokens), scale)
    return _sdpa(q, k, v, scale, causal=rows > 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    dim, value_dim = q.shape[-1], v.shape[-1]
    # The fused kernels want one head dim; zeros change neither q·k nor the columns that are kept.
    widest = max(dim, value_dim)
    q, k, v = (_widen(x, widest).transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    kernel = _kernel(q, k, v, scale, causal, grouped)
    if kernel == SDPBackend.MATH and grouped:  # not every fused kernel knows groups: give each query head its own
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
        kernel = _kernel(q, k, v, scale, causal, grouped)
    note("dense", _NAMES[kernel])
    with sdpa_kernel(kernel):
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return (out if value_dim == widest else out[..., :value_dim]).transpose(1, 2)


def _widen(x: Tensor, width: int) -> Tensor:
    """x [..,D] with zeros up to `width`; x itself where it is as wide: padding by nothing would copy it."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, grouped: bool) -> SDPBackend:
    """The kernel that PyTorch prefers for this input."""
    choose = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]: there is no public way to ask
    return SDPBackend(choose(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped))
