"""Allocations of a call on meta tensors, which have shapes but no memory: the operator or model itself runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels.runtime import tiles

Part = Literal["gradients", "activations", "workspace"]


class Event(NamedTuple):
    """Bytes allocated; negative: freed."""

    part: Part
    size: int


_CUDA_GRANULE = 512  # PyTorch's caching allocator rounds up to multiples of so many bytes


class Allocations(TorchDispatchMode):
    """Storages made within the context, and their ends: a storage lives until nothing refers to it.

    Tensors saved by autograd count, because they refer to storages. An operation's own temporary memory does not.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []  # number of the storage, bytes; negative bytes where it is freed
        self.live: dict[int, int] = {}  # numbers of the storages that live now, by their addresses
        self._granule = _CUDA_GRANULE if device.type == "cuda" else 1
        self._ends: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [[x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), result)]
        given = {x.untyped_storage()._cdata for x in tensors[0]}  # as of views and results in place
        for x in tensors[1]:
            storage = x.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self.live:
                number, size = len(self.events), -(-storage.nbytes() // self._granule) * self._granule
                self.events.append((number, size))
                self.live[storage._cdata] = number
                self._ends[number] = weakref.ref(storage, partial(self._free, storage._cdata, number, size))
        return result

    def _free(self, key: int, number: int, size: int, _: object) -> None:
        del self.live[key], self._ends[number]
        self.events.append((number, -size))

    def parts(self, kept: set[int], gradients: Iterable[Tensor]) -> list[Event]:
        """The events, each with its part: activations are what is `kept` after the forward."""
        numbers = {self.live[x.untyped_storage()._cdata] for x in gradients}
        return [
            Event("gradients" if number in numbers else "activations" if number in kept else "workspace", size)
            for number, size in self.events
        ]


def peak(events: Sequence[Event]) -> dict[Part, int]:
    """Bytes of each part live at the peak of all."""
    live = [0, *accumulate(event.size for event in events)]
    parts: dict[Part, int] = {"gradients": 0, "activations": 0, "workspace": 0}
    for part, size in events[: live.index(max(live))]:
        parts[part] += size
    return parts


@contextmanager
def on_device(device: torch.device, grad: bool) -> Iterator[None]:
    """Within the block, meta tensors take the ways that tensors on `device` would."""
    capability = tiles.capability(device) if device.type == "cuda" else 0
    with torch.inference_mode(False), torch.set_grad_enabled(grad), tiles.assume(capability):
        yield


class DeviceFunctions(TorchFunctionMode, ContextDecorator):
    """PyTorch's functions with the memory that they take on a device, where that is not what they take on meta.

    Autocast has no part in meta tensors: the CPU's stands for any device's. RMSNorm is fused on a GPU. Fused attention
    allocates where nobody sees it.
    """

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.casts: list[Tensor] = []  # weights cast by autocast, which keeps them until its end
        self.keeps_casts = True  # whether it does; a block that is computed anew has an autocast of its own
        self._threads = threads  # of a CPU, each of which has a tile of fused attention; 0: a GPU

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if func is linear and torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            cast = [None if x is None else x.to(dtype) for x in args]
            if self.keeps_casts:
                self.casts += [y for x, y in zip(args[1:], cast[1:], strict=True) if y is not None and x.is_leaf]
            return func(*cast)
        if func is rms_norm and not self._threads:
            return _FusedNorm.apply(args[0], kwargs["weight"])
        if func is torch._fused_sdp_choice:  # pyright: ignore[reportPrivateImportUsage]
            return SDPBackend.FLASH_ATTENTION.value
        if func is scaled_dot_product_attention:
            return _FlashAttention.apply(*args, self._threads)
        return func(*args, **kwargs)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _FlashAttention(torch.autograd.Function):
    """The flash kernels of scaled_dot_product_attention, for q [B,Hq,S,D] and k, v [B,Hkv,S,D]: only lse is kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, threads: int) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
        length = q.shape[2]
        # Rows and keys of a thread's tile in PyTorch's FlashAttentionKernel.cpp.
        rows, keys = min(256 if length >= 768 else 64 if length >= 192 else 32, length), min(512, length)
        ctx.tiles = threads, 2, rows, keys
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        if threads:
            q.new_empty(threads, rows, keys + 2 + q.shape[3], dtype=torch.float32)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, _, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        if ctx.tiles[0]:
            work = [q.new_empty(ctx.tiles, dtype=torch.float32)]
        else:  # dq is summed in float32, and dk, dv for every query head before they are for the group
            work = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse)]
            work += [torch.empty_like(q) for _ in range(2 * (q.shape[1] != k.shape[1]))]
        del work
        return dq, dk, dv, None
