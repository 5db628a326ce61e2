"""Flash attention by third-party kernels: flash-attn 4, flash-attn 2 and PyTorch's variable-length attention.

All take half precision on a GPU, and rows of q at the last positions of k. Queries, keys and values have one head dim,
a multiple of 8: zeros pad them, which change neither q·k nor the columns that are kept. As a backend they compute the
window branch alone, whose route names the kernel. Gradients are bit-reproducible only under
torch.use_deterministic_algorithms(True), at some cost in time: "auto" does not take this backend.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from .._decorators import constant
from ..errors import BackendError
from ..routes import note
from ._common import gated

# Package and module of each kernel; PyTorch's own needs none.
_PACKAGES = {"flash-attn-4": ("flash-attn-4", "flash_attn.cute"), "flash-attn-2": ("flash-attn", "flash_attn")}
# Fastest first, as measured on an H200 (docs/kernel-log.md); flash-attn 2 and PyTorch's are the same algorithm. The
# last can run wherever another can.
PROVIDERS = ("flash-attn-4", "flash-attn-2", "torch-varlen")

_HALF = (torch.bfloat16, torch.float16)
# Widest head dim of each kernel, forward and backward, by the major number of the compute capability.
_WIDEST: Mapping[str, Mapping[int, int]] = {
    "flash-attn-4": {9: 256, 10: 128, 11: 128},
    "flash-attn-2": {8: 256, 9: 256, 10: 256, 11: 256, 12: 256},
    "torch-varlen": {8: 256, 9: 256, 10: 256, 11: 256, 12: 256},
}


@dataclass(frozen=True)
class Host:
    """GPU and packages of a host, which decide which kernels can run there."""

    capability: tuple[int, int] | None  # compute capability of the GPU; None without one
    lacks: Mapping[str, str]  # kernels whose package cannot be used, with the reason


def here(device: torch.device) -> Host:
    """This process's host, for tensors on `device`."""
    if device.type != "cuda":
        return Host(None, {})
    return Host(torch.cuda.get_device_capability(device), _lacking())


def lacking(versions: Mapping[str, str]) -> dict[str, str]:
    """Kernels whose package is not among the installed `versions`, with what to do about it."""
    missing = [(name, package) for name, (package, _) in _PACKAGES.items() if package not in versions]
    return {name: f"{package} is not installed on the GPU host: pip install {package}" for name, package in missing}


def unusable(name: str, host: Host, dtype: torch.dtype, width: int) -> str | None:
    """Reason why kernel `name` cannot compute head dims up to `width` in `dtype` on `host`; None if it can."""
    if host.capability is None:
        return "it runs on cuda, not on the cpu"
    if dtype not in _HALF:
        return f"it computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    widest = _WIDEST[name]
    major, minor = host.capability
    if major not in widest:
        return f"it needs a GPU of compute capability {min(widest)}.0 to {max(widest)}.x, this one has {major}.{minor}"
    if width > widest[major]:
        return f"it takes head dims up to {widest[major]} there, not {width}"
    return host.lacks.get(name)


def first_usable(host: Host, dtype: torch.dtype, width: int) -> str | None:
    """Fastest of PROVIDERS that can compute it on `host`; None without one."""
    return next((name for name in PROVIDERS if unusable(name, host, dtype, width) is None), None)


@cache
def _lacking() -> Mapping[str, str]:
    """Kernels lacking in this process. An installed package may still fail to load: built for another PyTorch, say."""
    versions: dict[str, str] = {}
    for package, _ in _PACKAGES.values():
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    lacks = lacking(versions)
    for name, (package, module) in _PACKAGES.items():
        if package in versions:
            try:
                import_module(module)
            except Exception as err:  # whatever its import raises, other kernels remain
                lacks[name] = f"{package} {versions[package]} does not load: {str(err).partition(chr(10))[0]}"
    return lacks


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why no flash kernel can run on `device` in `dtype`; None if one can."""
    if device.type != "cuda":
        return f"it runs on cuda, not on {device.type}"
    # Without a GPU here the question is about another host: assume the oldest GPU that has kernels.
    return unusable(PROVIDERS[-1], here(device) if torch.cuda.is_available() else Host((8, 0), {}), dtype, 0)


def window(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float, kernel: str | None = None
) -> Tensor:
    """Window branch by `kernel` of PROVIDERS; None: by the fastest. Raises BackendError: none takes the head dims."""
    provider = kernel or _fastest(q.device, q.dtype, common_width(q, v))
    note("win", provider)
    return gated(attend(provider, q, k, v, scale, window), gate)


@constant
def _fastest(device: torch.device, dtype: torch.dtype, width: int) -> str:
    host = here(device)
    if (provider := first_usable(host, dtype, width)) is None:
        reason = unusable(PROVIDERS[-1], host, dtype, width)
        raise BackendError("backend['win']", "'flash'", f"{reason}; use triton or chunked")
    return provider


def attend(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, bounds: Tensor | None = None
) -> Tensor:
    """Causal attention [B,S,Hq,Dv] over the last `window` positions (None: all), by kernel `name`.

    With int32 bounds [sequences + 1] of packed sequences: q [total,Hq,Dk] and so on. The kernels want the longest
    sequence's length on the host; the total is a bound known without waiting.
    """
    tokens, value_dim, width = k.shape[-3], v.shape[-1], common_width(q, v)
    left = None if window is None or window >= tokens else window - 1  # keys before a query's own; None: all
    padded = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))  # pad copies
    out = _ATTEND[name](*padded, scale, left, bounds)
    return out if value_dim == width else out[..., :value_dim]


def common_width(q: Tensor, v: Tensor) -> int:
    """Head dim of queries, keys and values that fused kernels take: the wider one, padded to a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _untraced(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, untraced by torch.compile, as the package compiles its own kernels. The graph breaks there."""
    if find_spec("flash_attn") is None:
        return run  # it never runs, and the compiler takes long to import
    untraced: Any = torch.compiler.disable(run)
    return untraced


def _flash_attn_4(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, bounds: Tensor | None = None
) -> Tensor:
    if torch.compiler.is_compiling() and bounds is None:
        return _flash_attn_4_operator(q, k, v, scale, left)[0]
    return _flash_attn_4_untraced(q, k, v, scale, left, bounds)[0]


@_untraced
def _flash_attn_4_untraced(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, bounds: Tensor | None = None, lse: bool = False
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    settings: Any = {"softmax_scale": scale, "causal": True, "window_size": (left, None)}
    settings |= {"return_lse": True} if lse else {}
    settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if bounds is None:
        return flash_attn_func(q, k, v, **settings)[:2]
    settings |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": len(q), "max_seqlen_k": len(k)}
    return flash_attn_varlen_func(q, k, v, **settings)[:2]


# An operator, so that a compiled training's step stays one graph.
@custom_op("nsa_core::flash_attn_4", mutates_args=())
def _flash_attn_4_operator(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None) -> tuple[Tensor, Tensor]:
    """Attention [B,S,Hq,D], and the log-sum-exp [B,Hq,S] of its scores in float32."""
    return _flash_attn_4_untraced(q, k, v, scale, left, lse=True)


@custom_op("nsa_core::flash_attn_4_backward", mutates_args=())
def _flash_attn_4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    # flash-attn-4 4.0.0b36 has no public backward pass of results that are there.
    from flash_attn.cute.interface import _flash_attn_bwd  # pyright: ignore[reportMissingImports]

    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = _flash_attn_bwd(
        q, k, v, out, dout, lse, scale, causal=True, window_size_left=left, deterministic=deterministic
    )
    return grads[0], grads[1], grads[2]


@_flash_attn_4_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    return q.new_empty(batch, rows, heads, v.shape[-1]), q.new_empty(batch, heads, rows, dtype=torch.float32)


@_flash_attn_4_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.left = inputs
    ctx.save_for_backward(q, k, v, *output)


def _grads(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_flash_attn_4_backward(dout.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.left), None, None


_flash_attn_4_operator.register_autograd(_grads, setup_context=_keep)


def _flash_attn_2(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, bounds: Tensor | None = None
) -> Tensor:
    import flash_attn  # pyright: ignore[reportMissingImports]

    settings: Any = {"softmax_scale": scale, "causal": True, "window_size": (-1 if left is None else left, 0)}
    settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if bounds is None:
        return flash_attn.flash_attn_func(q, k, v, **settings)
    return flash_attn.flash_attn_varlen_func(q, k, v, bounds, bounds, len(q), len(k), **settings)


@constant
def _groups_are_an_option() -> bool:
    """Whether grouped heads must be asked for, as from PyTorch 2.12 on; before, they were always accepted."""
    from torch.nn.attention import varlen

    return "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, bounds: Tensor | None = None
) -> Tensor:
    from torch.nn.attention import varlen  # imports torch._dynamo, which takes longer than the rest of PyTorch

    shape = q.shape[:-2]
    if bounds is None:  # a batch is packed sequences of one length
        sequences = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        each = sequences * q.shape[1], sequences * k.shape[1], q.shape[1], k.shape[1]
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    else:
        each = bounds, bounds, len(q), len(k)
    groups: Mapping[str, Any] = {"enable_gqa": True} if _groups_are_an_option() else {}
    size = (-1 if left is None else left, 0)
    out = varlen.varlen_attn(q, k, v, *each, scale=scale, window_size=size, **groups)
    assert isinstance(out, Tensor)
    return out if bounds is not None else out.unflatten(0, shape)


_ATTEND: Mapping[str, Callable[..., Tensor]] = {
    "flash-attn-4": _flash_attn_4,
    "flash-attn-2": _flash_attn_2,
    "torch-varlen": _torch_varlen,
}
