"""Predicted memory of a configuration, before anything is allocated.

No account has to be kept in step with the code: the operator or model itself runs, with autograd, on meta tensors, and
its allocations are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from ..backends import triton
from ..config import NSAConfig
from ..errors import InputError
from ..functional import BRANCHES, dense_attention, nsa_attention
from ..model import ModelConfig, NSATransformer
from .allocations import Allocations, DeviceFunctions, Event, on_device, peak

IMPLEMENTATIONS = ("chunked", "naive", "reference", "triton", "dense")
_QUADRATIC = ("naive", "reference")
_LONGEST = 1 << 19  # most tokens that are traced; a longer call only has more equal chunks


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes live at the peak."""

    parameters: int  # the model's weights
    optimizer: int  # its state
    inputs: int  # tensors that the caller holds: the operator's and the output's gradient, or tokens and targets
    gradients: int  # of parameters, or of the operator's tensors
    # What the forward pass leaves: outputs, and tensors kept for the backward pass; among them the loss's gradients,
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
