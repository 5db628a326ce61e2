"""Predicted memory of a configuration, before anything is allocated.

No account has to be kept in step with the code: the operator or model itself runs, with autograd, on meta tensors,
which have shapes but no memory, and its allocations are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .backends import triton
from .config import NSAConfig
from .errors import InputError
from .functional import BRANCHES, dense_attention, nsa_attention
from .kernels.runtime import tiles
from .model import ModelConfig, NSATransformer

IMPLEMENTATIONS = ("chunked", "naive", "reference", "triton", "dense")
_QUADRATIC = ("naive", "reference")
_CUDA_GRANULE = 512  # PyTorch's caching allocator rounds up to multiples of so many bytes
_LONGEST = 1 << 19  # most tokens that are traced; a longer call only has more equal chunks


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes live at the peak."""

    parameters: int  # the model's weights
    optimizer: int  # its state
    inputs: int  # tensors that the caller holds: the operator's and the output's gradient, or tokens and targets
    gradients: int  # of parameters, or of the operator's tensors
    # Left by the forward pass: outputs, and tensors kept for the backward pass; among them the loss's gradients,
    # which are made with its value, until the backward pass scales them.
    activations: int
    workspace: int  # all that the forward pass frees or, with checkpointing, that the backward pass computes anew

    @property
    def extra(self) -> int:
        """Bytes that the pass adds at its peak to those allocated before it."""
        return self.gradients + self.activations + self.workspace

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.inputs + self.extra


def predicts(implementation: str) -> bool:
    """Whether the memory of `implementation` can be predicted here; "triton" needs Triton installed."""
    return _unpredicted(implementation) is None


def estimate_attention(
    config: NSAConfig, *, implementation: str, batch: int, seq_len: int, query_heads: int, kv_heads: int, head_dim: int,
    dtype: torch.dtype, backward: bool, device: torch.device,
) -> MemoryEstimate:  # fmt: skip
    """Memory of the operator alone: q, one k, one v and gate logits, through a sigmoid, to the output and back.

    Args:
        config: block sizes; ignored for "dense".
        implementation: one of IMPLEMENTATIONS; "dense" has no gates.
        backward: include the gradients of all inputs, from a given gradient of the output.
        device: decides chunks and kernels; a GPU that is not in this host counts as an A100.

    Raises:
        InputError: `predicts` is false for the implementation.
    """
    heads, threads = (query_heads, kv_heads, head_dim), torch.get_num_threads() if device.type == "cpu" else 0
    trace = partial(_attention, config, implementation, heads, dtype, backward, device, threads)
    return _along_tokens(trace, implementation, batch, seq_len)


def estimate_model(
    config: ModelConfig, *, implementation: str, batch: int, seq_len: int, dtype: torch.dtype, backward: bool,
    optimizer: Literal["adamw"] | None, device: torch.device, autocast: torch.dtype | None = None,
) -> MemoryEstimate:  # fmt: skip
    """Memory of an NSATransformer from tokens and targets to the loss, and back to the gradients of all parameters.

    Args:
        config: the model; its checkpointing matters if `backward`, and `implementation` replaces its attention and
            backend.
        implementation: one of IMPLEMENTATIONS.
        dtype: of parameters and activations.
        backward: a training step; else a pass without gradients.
        optimizer: the optimizer whose state and step count: fused on a GPU, one parameter at a time on a CPU.
        device: as in `estimate_attention`.
        autocast: the dtype that activations are cast to, if weights are kept in a wider one.

    Raises:
        InputError: `predicts` is false for the implementation, or the model lacks a branch.
    """
    if config.branches != BRANCHES:
        raise InputError("branches", config.branches, "use all three: the memory of some alone is not predicted")
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    trace = partial(
        _model, config.under(implementation), dtype, backward, optimizer is not None, device, threads, autocast
    )
    return _along_tokens(trace, implementation, batch, seq_len)


def _unpredicted(implementation: str) -> str | None:
    """Reason why the memory of `implementation` cannot be predicted here, with the fix; None if it can."""
    if implementation not in IMPLEMENTATIONS:
        return f"use one of {', '.join(IMPLEMENTATIONS)}"
    if implementation == "triton":
        return triton.unavailable(torch.device("cuda"), torch.bfloat16)
    return None


def _along_tokens(
    trace: Callable[[int, int], MemoryEstimate], implementation: str, batch: int, seq_len: int
) -> MemoryEstimate:
    """trace(batch, seq_len), or the continued line through two traces of fewer, or shorter, sequences."""
    if (reason := _unpredicted(implementation)) is not None:
        raise InputError("implementation", repr(implementation), reason)
    tokens = batch * seq_len
    if tokens <= _LONGEST or implementation in _QUADRATIC:
        return trace(batch, seq_len)
    shapes = [(most // min(seq_len, most), min(seq_len, most)) for most in (_LONGEST, _LONGEST // 2)]
    longer, shorter = (rows * length for rows, length in shapes)
    further = (tokens - longer) / (longer - shorter)
    ends = zip(*(astuple(trace(*shape)) for shape in shapes), strict=True)
    return MemoryEstimate(*(round(far + further * (far - near)) for far, near in ends))


@lru_cache(maxsize=1024)
def _attention(
    config: NSAConfig, implementation: str, heads: tuple[int, int, int], dtype: torch.dtype, backward: bool,
    device: torch.device, threads: int, batch: int, seq_len: int,
) -> MemoryEstimate:  # fmt: skip
    (query_heads, kv_heads, dim), log = heads, Allocations(device)
    shapes = (query_heads, dim), (kv_heads, dim), (kv_heads, dim), (query_heads, 3)
    with on_device(device, backward):
        kind = {"dtype": dtype, "device": "meta", "requires_grad": backward}
        q, k, v, gates = (torch.empty(batch, seq_len, *shape, **kind) for shape in shapes)
        inputs = [q, k, v] if implementation == "dense" else [q, k, v, gates]
        with DeviceFunctions(threads), log:
            if implementation == "dense":
                out = dense_attention(q, k, v)
            else:
                out = nsa_attention(q, k, v, torch.sigmoid(gates), config, backend=implementation)
            kept = set(log.live.values())
            gradients = torch.autograd.grad(out, inputs, q.detach()) if backward else ()
    given = sum(x.nbytes for x in inputs) + (q.nbytes if backward else 0)  # with the output's gradient
    return MemoryEstimate(0, 0, given, **peak(log.parts(kept, gradients)))


@lru_cache(maxsize=1024)
def _model(
    config: ModelConfig, dtype: torch.dtype, backward: bool, optimizer: bool, device: torch.device, threads: int,
    autocast: torch.dtype | None, batch: int, seq_len: int,
) -> MemoryEstimate:  # fmt: skip
    """Trace of a model of two layers at most; the last one stands for all further ones."""
    log, functions, repeats = Allocations(device), DeviceFunctions(threads), max(1, config.layers - 1)
    with torch.inference_mode(False), torch.device("meta"):
        model = NSATransformer(replace(config, layers=min(config.layers, 2))).to(dtype)
        tokens = torch.empty(batch, seq_len, dtype=torch.int64)
    starts: list[int] = []  # events before each block's forward, and after the last one's
    ends: list[int] = []  # events before the last block's backward, and after each one's
    casts: list[int] = []  # weights that autocast had cast, before each block and after the last one

    def mark(_: object, inputs: tuple[Tensor]) -> None:
        starts.append(len(log.events))
        casts.append(len(functions.casts))
        if backward:
            inputs[0].register_hook(lambda _: ends.append(len(log.events)))

    with on_device(device, backward), log:
        modules = *model.blocks, model.norm
        for module in modules:  # a mode around the backward would not be in force where checkpointed blocks run again
            module.forward = functions(module.forward)
        hooks = [module.register_forward_pre_hook(mark) for module in modules]
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = model(tokens, tokens)
        for hook in hooks:
            hook.remove()
        functions.keeps_casts = False
        autocast_end = len(log.events)
        del functions.casts[casts[-2] : casts[-1]]
        of_last_block = [(starts[-2], starts[-1]), (autocast_end, len(log.events))]
        functions.casts.clear()
        kept = set(log.live.values())
        if backward:
            loss.backward()
            of_last_block.append((ends[0], ends[1]))
    weights = list(model.parameters())
    events = log.parts(kept, [x.grad for x in weights if x.grad is not None])
    events = _repeated(events, of_last_block, repeats)
    if optimizer and device.type != "cuda":
        largest = max(x.nbytes for x in weights)
        events += [Event("workspace", largest), Event("workspace", -largest)]  # AdamW's denominator
    further = (repeats - 1) * sum(x.nbytes for x in model.blocks[-1].parameters())
    parameters = sum(x.nbytes for x in weights) + further
    return MemoryEstimate(parameters, 2 * parameters if optimizer else 0, 2 * tokens.nbytes, **peak(events))


def _repeated(events: list[Event], spans: Sequence[tuple[int, int]], times: int) -> list[Event]:
    """Events, of which those within each span happen so many times."""
    result, done = list[Event](), 0
    for start, stop in spans:
        result += [*events[done:start], *events[start:stop] * times]
        done = stop
    return [*result, *events[done:]]


Part = Literal["gradients", "activations", "workspace"]


class Event(NamedTuple):
    """Bytes allocated; negative: freed."""

    part: Part
    size: int


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
