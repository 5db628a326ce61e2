"""Dense causal attention by the fastest kernel available, or by a named one; the kernel that ran is noted in routes."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from .._decorators import constant
from ..errors import BackendError
from ..packed_sequences import checked_bounds, sequence_spans
from ..routes import note
from . import chunked, flash
from .flash import Host

_SDPA: Mapping[str, SDPBackend] = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
# "square": rows for all positions. "one row": the last position. "band": a window, or several of the last positions.
QueryLayout = Literal["square", "one row", "band"]
KERNELS = ("sdpa-cudnn", "sdpa-flash", *flash.PROVIDERS)  # names that a caller may give


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, kernel: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention [B,S,Hq,Dv]; the rows of q are the last S positions of k. Packed sequences: [total,Hq,Dv].

    Windows, and several rows of q at the end of a longer k, go to the flash kernels, or else to the chunked backend: a
    mask for scaled_dot_product_attention would take S² memory, and its is_causal aligns q with the first keys instead
    of the last. A flash kernel takes all packed sequences at once without waiting for the device: wrong values of
    cu_seqlens on a GPU then fail a device-side assertion. Without one, sequences are computed one by one.

    Raises:
        InputError: cu_seqlens are not bounds of sequences.
        BackendError: the named kernel cannot compute it.
    """
    rows, tokens = q.shape[-3], k.shape[-3]
    window = None if window is None or window >= tokens else window
    layout: QueryLayout = "square"
    if window is not None or 1 < rows < tokens:
        layout = "band"
    elif rows == 1:
        layout = "one row"
    if cu_seqlens is not None:
        layout = "square" if kernel in _SDPA else "band"
        if kernel == "auto" and torch.compiler.is_compiling():
            kernel = "torch-varlen"  # flash-attn 4's call would break the graph
    names = _candidates_here(kernel, layout, q.device, q.dtype, flash.common_width(q, v))
    if names[0] in flash.PROVIDERS:
        note("dense", names[0])
        bounds = None if cu_seqlens is None else checked_bounds(cu_seqlens, len(q), q.device)
        return flash.attend(names[0], q, k, v, scale, window, bounds)
    if cu_seqlens is not None:
        spans = sequence_spans(cu_seqlens, len(q))
        singles = ((q[None, a:b], k[None, a:b], v[None, a:b]) for a, b in spans if a < b)
        return torch.cat([attention(*single, scale, window, kernel)[0] for single in singles])
    if names[0] in _SDPA:
        return _sdpa(q, k, v, scale, names)
    return chunked.window(q, k, v, None, window or tokens, scale, "dense")


def available_kernels(device: torch.device, dtype: torch.dtype, width: int) -> dict[str, str | None]:
    """Names in KERNELS, each with None if it can run here for tensors on `device`, else with the reason why not."""
    host = flash.here(device)
    return {kernel: unusable(kernel, host, dtype, width) for kernel in KERNELS}


def unusable(kernel: str, host: Host, dtype: torch.dtype, width: int) -> str | None:
    """Reason why `kernel` of KERNELS cannot compute head dims up to `width` on `host`; None if none is known."""
    if kernel not in _SDPA:
        return flash.unusable(kernel, host, dtype, width)
    if host.capability is None:
        return None if kernel == "sdpa-flash" else "it runs on cuda, not on the cpu"
    return flash.unusable("torch-varlen", host, dtype, width)  # the same requirements of GPU and dtype


def candidates(kernel: str, layout: QueryLayout, host: Host, dtype: torch.dtype, width: int) -> tuple[str, ...]:
    """Kernel that computes the layout on `host`, or several of PyTorch's, of which the first to accept the input runs.
    Raises BackendError: `kernel` is neither "auto" nor a kernel that can compute it.
    """
    if kernel == "auto":
        return _fastest(layout, host, dtype, width)
    if kernel not in KERNELS:
        raise BackendError("backend", repr(kernel), f"use one of auto, {', '.join(KERNELS)}")
    reason = unusable(kernel, host, dtype, width)
    if reason is None and kernel in _SDPA and layout == "band":
        reason = "it has neither windows nor several rows behind a longer k"
    if reason is not None:
        usable = [name for name in KERNELS if name != kernel and unusable(name, host, dtype, width) is None]
        raise BackendError("backend", repr(kernel), f"{reason}; use one of {', '.join(['auto', *usable])}")
    return (kernel,)


_candidates_here = constant(
    lambda kernel, layout, device, dtype, width: candidates(kernel, layout, flash.here(device), dtype, width)
)


def _fastest(layout: QueryLayout, host: Host, dtype: torch.dtype, width: int) -> tuple[str, ...]:
    """Kernels in order of speed as measured on an H200 (docs/kernel-log.md): flash-attn 4, cuDNN, then those of A100s.

    For a single row PyTorch's flash kernel comes first: it splits the keys over the GPU, which cuDNN's does not.
    """
    hopper = host.capability is not None and host.capability[0] >= 9
    if layout == "band":
        return (flash.first_usable(host, dtype, width) or "chunked",)
    ahead = "flash-attn-4" if hopper else "flash-attn-2"
    if layout == "square" and flash.unusable(ahead, host, dtype, width) is None:
        return (ahead,)
    first = ("sdpa-cudnn", "sdpa-flash") if hopper and layout == "square" else ("sdpa-flash", "sdpa-cudnn")
    return (*first, "sdpa-efficient", "sdpa-math")


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, order: tuple[str, ...]) -> Tensor:
    one_row = q.shape[1] == 1
    causal = not one_row  # a plain bool, also where torch.compile traces the length as a symbol
    value_dim, width = v.shape[-1], flash.common_width(q, v)
    padded = [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v)]  # pad copies
    q, k, v = (x.transpose(1, 2) for x in padded)
    grouped = q.shape[1] != k.shape[1]
    kernel = _first_viable(order, q, k, v, causal, grouped)
    if kernel in (None, "sdpa-math") and grouped:  # not every fused kernel has groups: repeat keys for each query head
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
        kernel = _first_viable(order, q, k, v, causal, grouped)
    if kernel is None:  # only for a named kernel: "auto" ends with "sdpa-math"
        raise BackendError("backend", repr(order[0]), "PyTorch cannot run it on this input; use auto")
    note("dense", kernel)
    with sdpa_kernel(_SDPA[kernel]):
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return (out if value_dim == width else out[..., :value_dim]).transpose(1, 2)


def _first_viable(order: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, causal: bool, grouped: bool) -> str | None:
    """The first of `order` that PyTorch can run on this input."""
    if not torch.compiler.is_compiling():
        return _ask(order, q, k, v, causal, grouped)
    heads = q.shape[1], k.shape[1], q.shape[3]
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    rows = 64 if causal else 1  # any length but one gives the same answer
    return _ask_while_tracing(order, *heads, rows, str(q.device), q.dtype, trained, grouped)


def _ask(order: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, causal: bool, grouped: bool) -> str | None:
    choose = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]: no public function tells
    try:
        with sdpa_kernel([_SDPA[name] for name in order], set_priority=True):
            chosen = SDPBackend(choose(q, k, v, None, 0.0, causal, enable_gqa=grouped))
    except RuntimeError:
        return None
    return next((name for name in order if _SDPA[name] == chosen), None)


@constant
def _ask_while_tracing(
    order: tuple[str, ...], heads: int, kv_heads: int, dim: int, rows: int, device: str, dtype: torch.dtype,
    trained: bool, grouped: bool,
) -> str | None:  # fmt: skip
    """Answer of `_ask` on stand-in tensors of these sizes: torch.compile has none to pass while it traces."""
    row = torch.empty(dim, device=device, dtype=dtype, requires_grad=trained)
    q, k = row.expand(1, heads, rows, dim), row.expand(1, kv_heads, 64, dim)
    return _ask(order, q, k, k, rows > 1, grouped)
