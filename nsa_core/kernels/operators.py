"""The kernels' door to PyTorch, called by backends/triton.py and layer.py.

Takes tensors [B,S,H,D], strided or not, that functional.py checked, and a call; gives outputs that autograd
differentiates and torch.compile traces. Checks no input, chooses no backend, and leaves the stages to attention.py.

A traced call (torch.compile, fake tensors) goes to custom operators of torch.library, one graph node each. Any
other call goes through an autograd.Function, which takes the host less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import custom_op

from .._decorators import undifferentiable
from ..config import NSAConfig, Slots
from ..routes import Branch
from . import attention, scores
from . import compress as compression
from .call import Call
from .runtime import replay
from .span.forward import log_sum_exp
from .warm import compile_layout

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
    of_keys = any(x.requires_grad for pair in pairs for x in pair)
    keeps = torch.is_grad_enabled() and (of_keys or q.requires_grad or gates.requires_grad)
    cu, shared = call.cu, _shares(pairs, call)
    call = replace(call, shared=shared, keeps=keeps, of_q=q.requires_grad, of_keys=of_keys, cu=None)
    pairs, blocks = pairs[: call.pairs], None if blocks is None else blocks.contiguous()
    q, gates, flat = q.contiguous(), gates.contiguous(), [x.contiguous() for pair in pairs for x in pair]
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
        flags = call.shared, call.compresses, call.keeps, call.of_q, call.of_keys
        given = ",".join(call.branches), _sizes(call.config), call.config.slots, call.offset, call.scale, *flags
        return _attend_operator(q, gates, blocks, cu, flat, *given, call.longest)[0]
    return cast(Tensor, _Attend.apply(call, blocks, cu, q, gates, *flat))


def compress(k: Tensor, v: Tensor, config: NSAConfig, cu: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compressed keys [B,N,HKV,D] and values [B,N,HKV,DV] of k [B,T,HKV,D] and v [B,T,HKV,DV], differentiable.

    Args:
        cu: bounds of packed sequences, whose compressed tokens are where `Call` has them.
    """
    k, v = k.contiguous(), v.contiguous()
    if torch.compiler.is_compiling() or isinstance(k, FakeTensor):
        return _compress_operator(k, v, cu, _sizes(config))
    return cast(tuple[Tensor, Tensor], _Compress.apply(k, v, cu, config))


def select(
    q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float, cu: Tensor | None = None, longest: int = 0
) -> Tensor:
    """Selected blocks, int32 [B,S,HKV,slc_count], of q [B,S,HQ,D] and k_cmp [B,N,HKV,D]; not differentiable."""
    return _select_operator(q.contiguous(), k_cmp.contiguous(), cu, _sizes(config), offset, scale, longest)


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


def _sizes(config: NSAConfig) -> list[int]:
    """The configuration's sizes as a list, which an operator's schema can carry."""
    return [getattr(config, name) for name in _SIZES]


def _forward(
    call: Call, blocks: Tensor | None, cu: Tensor | None, q: Tensor, gates: Tensor, *flat: Tensor
) -> list[Tensor]:
    """The output, then, if the call keeps them, the tensors that the backward needs."""
    call = replace(call, cu=cu)
    compile_layout(call, q, gates, flat)
    out, saved = attention.forward(call, blocks, q, gates, flat)
    return [out, *saved]


def _backward(call: Call, do: Tensor, cu: Tensor | None, q: Tensor, gates: Tensor, *rest: Tensor) -> list[Tensor]:
    """Gradients of q, gates, keys and values; `rest` holds keys and values, then the tensors that the forward saved."""
    pairs = 2 * call.pairs
    dq, dgates, grads = attention.backward(replace(call, cu=cu), q, gates, rest[:pairs], rest[pairs:], do)
    return [dq, dgates, *grads]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, blocks: Tensor | None, cu: Tensor | None, q: Tensor, gates: Tensor, *flat: Tensor
    ) -> Tensor:
        out, *saved = replay.run(_forward, call, (blocks, cu, q, gates, *flat))
        ctx.call = call
        ctx.save_for_backward(cu, q, gates, *flat, *saved)
        return out

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = replay.run(_backward, ctx.call, (do.contiguous(), *ctx.saved_tensors))
        return None, None, None, *grads  # autograd ignores those that the call does not need


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, cu: Tensor | None, config: NSAConfig) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.length = Call(config, ("cmp",), cu=cu), k.shape[1]
        return compression.forward(k, v, ctx.call)

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, dk_cmp: Tensor, dv_cmp: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        compressed = dk_cmp.contiguous()[None], dv_cmp.contiguous()[None]
        return *compression.backward(compressed, ctx.length, dk_cmp.dtype, ctx.call), None, None


@custom_op("nsa_core::attend", mutates_args=())
def _attend_operator(
    q: Tensor, gates: Tensor, blocks: Tensor | None, cu: Tensor | None, flat: list[Tensor],
    branches: str, sizes: list[int], slots: str, offset: int, scale: float, shared: bool, compresses: bool, keeps: bool,
    of_q: bool, of_keys: bool, longest: int,
) -> list[Tensor]:  # fmt: skip
    """The output, then, if `keeps`, the tensors that the backward needs."""
    call = _call(branches, sizes, slots, offset, scale, shared, compresses, keeps, of_q, of_keys, longest)
    return replay.run(_forward, call, (blocks, cu, q, gates, *flat))


@_attend_operator.register_fake
def _(
    q: Tensor, gates: Tensor, blocks: Tensor | None, cu: Tensor | None, flat: list[Tensor], *written: Any
) -> list[Tensor]:
    out = q.new_empty(*q.shape[:3], flat[-1].shape[-1])
    return [out, *attention.kept(replace(_call(*written), cu=cu), q, flat)]


@custom_op("nsa_core::attend_backward", mutates_args=())
def _attend_backward_operator(
    do: Tensor, q: Tensor, gates: Tensor, cu: Tensor | None, flat: list[Tensor], saved: list[Tensor],
    branches: str, sizes: list[int], slots: str, offset: int, scale: float, shared: bool, compresses: bool, keeps: bool,
    of_q: bool, of_keys: bool, longest: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, gates and each of `flat`; empty ones for those that are not needed."""
    call = _call(branches, sizes, slots, offset, scale, shared, compresses, keeps, of_q, of_keys, longest)
    return replay.run(_backward, call, (do, cu, q, gates, *flat, *saved))


@_attend_backward_operator.register_fake
def _(
    do: Tensor, q: Tensor, gates: Tensor, cu: Tensor | None, flat: list[Tensor], saved: list[Tensor], *written: Any
) -> list[Tensor]:
    call = _call(*written)
    dq = torch.empty_like(q) if call.of_q else q.new_empty(0)
    return [dq, torch.empty_like(gates), *(torch.empty_like(x) if call.of_keys else x.new_empty(0) for x in flat)]


def _compress_forward(k: Tensor, v: Tensor, cu: Tensor | None, sizes: list[int]) -> tuple[Tensor, Tensor]:
    return compression.forward(k, v, Call(NSAConfig(*map(int, sizes)), ("cmp",), cu=cu))


def _compress_backward(
    dk_cmp: Tensor, dv_cmp: Tensor, cu: Tensor | None, length: int, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    call = Call(NSAConfig(*map(int, sizes)), ("cmp",), cu=cu)
    return compression.backward((dk_cmp[None], dv_cmp[None]), length, dk_cmp.dtype, call)


_compress_operator = custom_op("nsa_core::compress", _compress_forward, mutates_args=())
_compress_operator.register_fake(_compress_forward)  # launches leave fake tensors out
_compress_backward_operator = custom_op("nsa_core::compress_backward", _compress_backward, mutates_args=())
_compress_backward_operator.register_fake(_compress_backward)


@custom_op("nsa_core::select", mutates_args=())
def _select_operator(
    q: Tensor, k_cmp: Tensor, cu: Tensor | None, sizes: list[int], offset: int, scale: float, longest: int
) -> Tensor:
    call = Call(NSAConfig(*map(int, sizes)), ("cmp",), offset, scale, longest=longest, cu=cu)
    return scores.select(q, k_cmp, log_sum_exp(q, k_cmp, call), call)


@_select_operator.register_fake
def _(q: Tensor, k_cmp: Tensor, cu: Tensor | None, sizes: list[int], offset: int, scale: float, longest: int) -> Tensor:
    count = NSAConfig(*map(int, sizes)).slc_count
    return torch.empty(*q.shape[:2], k_cmp.shape[2], count, dtype=torch.int32, device=q.device)


def _call(branches: str, sizes: list[int], slots: str, *rest: Any) -> Call:
    """The call that `attend` has written as plain values, which an operator's schema can carry."""
    config = NSAConfig(*map(int, sizes), slots=cast(Slots, slots))
    return Call(config, cast(tuple[Branch, ...], tuple(branches.split(","))), *rest)


def _keep_attend(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, gates, _, cu, flat, *ctx.call = inputs
    saved = output[1:]
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)  # else autograd would make zeros for each of them
    ctx.pairs = len(flat)
    ctx.save_for_backward(cu, q, gates, *flat, *saved)


def _grad_attend(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    cu, q, gates, *rest = ctx.saved_tensors
    others = [None] * len(ctx.call)
    if grads[0] is None:
        return (None, None, None, None, [None] * ctx.pairs, *others)
    do, flat, saved = grads[0].contiguous(), rest[: ctx.pairs], rest[ctx.pairs :]
    dq, dgates, *dflat = _attend_backward_operator(do, q, gates, cu, flat, saved, *ctx.call)
    return dq, dgates, None, None, dflat, *others


def _keep_compress(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k, _, cu, ctx.sizes = inputs
    ctx.length = k.shape[1]
    ctx.save_for_backward(cu)


def _grad_compress(ctx: Any, dk_cmp: Tensor, dv_cmp: Tensor) -> tuple[Any, ...]:
    made = dk_cmp.contiguous(), dv_cmp.contiguous(), *ctx.saved_tensors
    return *_compress_backward_operator(*made, ctx.length, ctx.sizes), None, None


_attend_operator.register_autograd(_grad_attend, setup_context=_keep_attend)
_compress_operator.register_autograd(_grad_compress, setup_context=_keep_compress)
