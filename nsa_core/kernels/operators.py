"""The kernels' door to PyTorch, called by backends/triton.py and layer.py.

Takes tensors [B,S,H,D], strided or not, that functional.py checked, and a call; gives outputs that autograd
differentiates and torch.compile traces. Checks no input, chooses no backend, and leaves the stages to attention.py.

A traced call (torch.compile, fake tensors) goes to custom operators of torch.library, one graph node each, whose fake
implementations are the real ones with the launches left out. Any other call goes through an autograd.Function, which
takes the host less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from .._inputs import positive
from ..config import NSAConfig, Slots
from ..routes import Branch
from . import attention
from . import compress as compression
from .call import Call
from .runtime import replay
from .runtime.custom_op import operator

__all__ = ["Call", "attend", "compress", "has_one_pair", "select"]

_SIZES = tuple(field.name for field in fields(NSAConfig) if field.name not in ("compress", "slots"))


def attend(
    q: Tensor, gates: Tensor | None, blocks: Tensor | None, pairs: Sequence[tuple[Tensor, Tensor]], call: Call
) -> Tensor:
    """Σ over the call's branches of gate · attention, [B,S,HQ,DV], differentiable in q, gates, keys and values.

    Args:
        q: [B,S,HQ,D].
        gates: [B,S,HQ,len(branches)], not negative; None: all ones.
        blocks: selected blocks; None if the call has both cmp and slc: they are then chosen here, with the compressed
            branch's softmax.
        pairs: keys and values of each branch, compressed ones for cmp, or none for cmp if the call compresses. Where
            slc and win are given the same tensors, keys that both see are computed once.
    """
    if gates is None:
        gates = q.new_ones(*q.shape[:3], len(call.branches))
    q, scale = positive(q, call.scale)
    call = replace(call, scale=scale, shared=_shares(pairs, call), keeps=_has_gradient(q, gates, pairs))
    pairs, blocks = pairs[: call.pairs], None if blocks is None else blocks.contiguous()
    q, gates, flat = q.contiguous(), gates.contiguous(), [x.contiguous() for pair in pairs for x in pair]
    if _is_traced(q):
        return _attend_operator(q, gates, blocks, flat, *_written(call))[0]
    return cast(Tensor, _Attend.apply(call, blocks, q, gates, *flat))


def compress(k: Tensor, v: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Compressed keys [B,N,HKV,D] and values [B,N,HKV,DV] of k [B,T,HKV,D] and v [B,T,HKV,DV], differentiable."""
    k, v = k.contiguous(), v.contiguous()
    if _is_traced(k):
        return _compress_operator(k, v, _sizes(config))
    return cast(tuple[Tensor, Tensor], _Compress.apply(k, v, config))


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks, int32 [B,S,HKV,slc_count], of q [B,S,HQ,D] and k_cmp [B,N,HKV,D]; not differentiable."""
    q, scale = positive(q, scale)
    return _select_operator(q.contiguous(), k_cmp.contiguous(), _sizes(config), offset, scale)


def has_one_pair(pairs: Mapping[Branch, tuple[Tensor, Tensor]], call: Call) -> bool:
    """Whether all branches have the same keys and values, so that the call may compress."""
    if call.branches != ("cmp", "slc", "win") or not _shares([pairs["slc"], pairs["win"]], call):
        return False
    return pairs["cmp"][0] is pairs["slc"][0] and pairs["cmp"][1] is pairs["slc"][1]


def _shares(pairs: Sequence[tuple[Tensor, Tensor]], call: Call) -> bool:
    """Whether slc and win have the same keys and values, and the window holds the local blocks."""
    config = call.config
    if call.branches[-2:] != ("slc", "win") or config.window < config.local_blocks * config.slc_block:
        return False
    (k_slc, v_slc), (k_win, v_win) = pairs[-2:]
    return k_slc is k_win and v_slc is v_win


def _has_gradient(q: Tensor, gates: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    given = (q, gates, *(x for pair in pairs for x in pair))
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def _is_traced(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def _sizes(config: NSAConfig) -> list[int]:
    """The configuration's sizes as a list, which an operator's schema can carry."""
    return [getattr(config, name) for name in _SIZES]


def _forward(call: Call, blocks: Tensor | None, q: Tensor, gates: Tensor, *flat: Tensor) -> list[Tensor]:
    """The output, then, if the call keeps them, the tensors that the backward needs."""
    out, saved = attention.forward(call, blocks, q, gates, flat)
    return [out, *saved]


def _backward(call: Call, do: Tensor, q: Tensor, gates: Tensor, *rest: Tensor) -> list[Tensor]:
    """Gradients of q, gates, keys and values; `rest` holds keys and values, then the tensors that the forward saved."""
    pairs = 2 * call.pairs
    dq, dgates, grads = attention.backward(call, q, gates, rest[:pairs], rest[pairs:], do)
    return [dq, dgates, *grads]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, blocks: Tensor | None, q: Tensor, gates: Tensor, *flat: Tensor) -> Tensor:
        out, *saved = replay.run(_forward, call, (blocks, q, gates, *flat))
        ctx.call = call
        ctx.save_for_backward(q, gates, *flat, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *replay.run(_backward, ctx.call, (do.contiguous(), *ctx.saved_tensors))


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
        ctx.config, ctx.length = config, k.shape[1]
        return compression.forward(k, v, config)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk_cmp: Tensor, dv_cmp: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *compression.backward(dk_cmp.contiguous(), dv_cmp.contiguous(), ctx.length, ctx.config), None


@operator("attend")
def _attend_operator(
    q: Tensor, gates: Tensor, blocks: Tensor | None, flat: list[Tensor],
    branches: str, sizes: list[int], slots: str, offset: int, scale: float, shared: bool, compresses: bool, keeps: bool,
) -> list[Tensor]:  # fmt: skip
    """The output, then, if `keeps`, the tensors that the backward needs."""
    call = _call(branches, sizes, slots, offset, scale, shared, compresses, keeps)
    return replay.run(_forward, call, (blocks, q, gates, *flat))


@operator("attend_backward")
def _attend_backward_operator(
    do: Tensor, q: Tensor, gates: Tensor, flat: list[Tensor], saved: list[Tensor],
    branches: str, sizes: list[int], slots: str, offset: int, scale: float, shared: bool, compresses: bool, keeps: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, gates and each of `flat`."""
    call = _call(branches, sizes, slots, offset, scale, shared, compresses, keeps)
    return replay.run(_backward, call, (do, q, gates, *flat, *saved))


@operator("compress")
def _compress_operator(k: Tensor, v: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    return compression.forward(k, v, NSAConfig(*sizes))


@operator("compress_backward")
def _compress_backward_operator(dk_cmp: Tensor, dv_cmp: Tensor, length: int, sizes: list[int]) -> tuple[Tensor, Tensor]:
    return compression.backward(dk_cmp, dv_cmp, length, NSAConfig(*sizes))


@operator("select")
def _select_operator(q: Tensor, k_cmp: Tensor, sizes: list[int], offset: int, scale: float) -> Tensor:
    return attention.select(q, k_cmp, NSAConfig(*sizes), offset, scale)


def _written(call: Call) -> tuple[str, list[int], str, int, float, bool, bool, bool]:
    """The call as plain values, which an operator's schema can carry."""
    branches, sizes = ",".join(call.branches), _sizes(call.config)
    return branches, sizes, call.config.slots, call.offset, call.scale, call.shared, call.compresses, call.keeps


def _call(
    branches: str, sizes: list[int], slots: str, offset: int, scale: float, shared: bool, compresses: bool, keeps: bool
) -> Call:
    names, config = cast(tuple[Branch, ...], tuple(branches.split(","))), NSAConfig(*sizes, slots=cast(Slots, slots))
    return Call(config, names, offset, scale, shared, compresses, keeps)


def _keep_attend(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, gates, _, flat, *ctx.call = inputs
    saved = output[1:]
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)  # else autograd would make zeros for each of them
    ctx.pairs = len(flat)
    ctx.save_for_backward(q, gates, *flat, *saved)


def _grad_attend(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    q, gates, *rest = ctx.saved_tensors
    if grads[0] is None:
        return (None, None, None, [None] * ctx.pairs, *[None] * len(ctx.call))
    do, flat, saved = grads[0].contiguous(), rest[: ctx.pairs], rest[ctx.pairs :]
    dq, dgates, *dflat = _attend_backward_operator(do, q, gates, flat, saved, *ctx.call)
    return dq, dgates, None, dflat, *[None] * len(ctx.call)


def _keep_compress(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k, _, ctx.sizes = inputs
    ctx.length = k.shape[1]


def _grad_compress(ctx: Any, dk_cmp: Tensor, dv_cmp: Tensor) -> tuple[Any, ...]:
    return *_compress_backward_operator(dk_cmp.contiguous(), dv_cmp.contiguous(), ctx.length, ctx.sizes), None


_attend_operator.register_autograd(_grad_attend, setup_context=_keep_attend)
_compress_operator.register_autograd(_grad_compress, setup_context=_keep_compress)
