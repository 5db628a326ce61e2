"""The operators' tensors: gathered, checked and split. An InputError names the argument, its value and the fix."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._decorators import constant
from .config import NSAConfig
from .errors import InputError

Triple = tuple[Tensor, Tensor, Tensor]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, with a batch axis or packed without one."""

    q: Tensor  # [B,S,Hq,Dk]
    keys: Triple  # [B,T,Hkv,Dk], one for each of cmp, slc, win
    values: Triple  # [B,T,Hkv,Dv], likewise
    k_cmp: Tensor | None = None  # compressed keys [B,Nc,Hkv,Dk] made by the caller; None: made by `compress`
    v_cmp: Tensor | None = None  # compressed values, likewise
    gates: Tensor | None = None  # [B,S,Hq,3]; None: ones
    blocks: Tensor | None = None  # selected blocks [B,S,Hkv,n] made by the caller; None: made by `select`

    @property
    def offset(self) -> int:
        """Position of q's first row."""
        return self.keys[0].shape[-3] - self.q.shape[-3]

    def under_autocast(self) -> Operands:
        """These tensors cast to autocast's dtype, except for the gates; themselves where autocast is off."""
        dtype = autocast_dtype(self.q)
        if dtype is None:
            return self
        cast = replace(self, gates=None, blocks=None).each(lambda x: x.to(dtype))
        return replace(cast, gates=self.gates, blocks=self.blocks)

    def check(self, config: NSAConfig, packed: bool) -> None:
        """Raise InputError for the first tensor whose shape, dtype or device does not fit."""
        check_sequence("q", self.q, packed)
        for key, value in zip(self.keys, self.values, strict=True):
            _check_pair(self.q, key, value, self.keys[0], packed)
            if value.shape[-1] != self.values[0].shape[-1]:
                raise InputError("v", _text(value), f"give one head dim for every branch: {_text(self.values[0])}")
        blocks, wanted = self.blocks, [*self.q.shape[:-2], self.keys[0].shape[-2], config.slc_count]
        if blocks is not None and (list(blocks.shape), blocks.dtype, blocks.device) != (
            wanted,
            torch.int32,
            self.q.device,
        ):
            raise InputError("blocks", _text(blocks), f"give {wanted}, int32, on {self.q.device}")
        gates, wanted = self.gates, [*self.q.shape[:-1], 3]
        if gates is not None and (
            list(gates.shape) != wanted or gates.dtype not in _DTYPES or gates.device != self.q.device
        ):
            raise InputError("gates", _text(gates), f"give {wanted}, floating point, on {self.q.device}")
        for name, x, source in (("k_cmp", self.k_cmp, self.keys[0]), ("v_cmp", self.v_cmp, self.values[0])):
            if x is None:
                continue
            if x.dim() != source.dim() or (*x.shape[:-3], *x.shape[-2:]) != (*source.shape[:-3], *source.shape[-2:]):
                fix = f"give the axes, batch, heads and head dim of what it compresses: {_text(source)}"
                raise InputError(name, _text(x), fix)
            if x.dtype != source.dtype or x.device != source.device:
                raise InputError(name, _text(x), f"convert to the dtype and device of the others: {_text(source)}")
            if not packed and x.shape[-3] != (tokens := config.cmp_tokens(source.shape[-3])):
                raise InputError(
                    name, _text(x), f"give {tokens} compressed tokens, as cmp_block and cmp_stride have it"
                )

    def each(
        self, change: Callable[[Tensor], Tensor], compressed: Callable[[Tensor], Tensor] | None = None
    ) -> Operands:
        """These tensors changed, k_cmp and v_cmp by `compressed` if given; shared ones stay shared."""
        by_branch: list[Triple] = []
        for cmp, slc, win in (self.keys, self.values):
            for_cmp = change(cmp)
            for_slc = for_cmp if slc is cmp else change(slc)
            by_branch.append((for_cmp, for_slc, for_cmp if win is cmp else for_slc if win is slc else change(win)))
        keys, values = by_branch
        k_cmp, v_cmp = (None if x is None else (compressed or change)(x) for x in (self.k_cmp, self.v_cmp))
        gates, blocks = (None if x is None else change(x) for x in (self.gates, self.blocks))
        return Operands(change(self.q), keys, values, k_cmp, v_cmp, gates, blocks)

    def nothing(self) -> Tensor:
        """Attention of no query, as q [..,0,..] with the head dim of v: without elements; its gradients are zeros."""
        given = (self.q, *self.keys, *self.values, self.k_cmp, self.v_cmp, self.gates)
        zero = 0 * torch.stack([x.sum() for x in given if x is not None]).sum()
        return self.q.new_zeros(*self.q.shape[:-1], self.values[0].shape[-1]) + zero


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Dtype of x in a product under autocast; None where autocast is off, and for float64, which it leaves alone."""
    kind = _autocast_kind(x.device.type)
    if kind is None or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context without autocast, for the operators, which choose the dtypes of their products themselves."""
    kind = _autocast_kind(x.device.type)
    return nullcontext() if kind is None else torch.autocast(kind, enabled=False)


@constant  # PyTorch 2.11 cannot trace is_autocast_available
def _autocast_kind(device: str) -> str | None:
    """Kind of device whose autocast holds on `device`, for tensors without memory that of the CPU; None without one."""
    kind = "cpu" if device == "meta" else device
    return kind if torch.amp.is_autocast_available(kind) else None


def per_branch(name: str, x: Tensor | tuple[Tensor, Tensor, Tensor]) -> Triple:
    """One tensor for each of cmp, slc, win."""
    if isinstance(x, Tensor):
        return x, x, x
    if not isinstance(x, tuple | list) or len(x) != 3 or not all(isinstance(part, Tensor) for part in x):
        raise InputError(name, type(x).__name__, "give one tensor, or a tuple of three: cmp, slc, win")
    return x[0], x[1], x[2]


def check_sequence(name: str, x: Tensor, packed: bool) -> None:
    """Raise InputError unless x is a [B,S,H,D], or [total,H,D] when packed, in one of _DTYPES; B or S may be 0."""
    layout = "[total, heads, dim] with cu_seqlens" if packed else "[batch, tokens, heads, dim] without cu_seqlens"
    if x.dim() != (3 if packed else 4) or 0 in x.shape[-2:]:
        raise InputError(name, _text(x), f"give a tensor with heads and a head dim, {layout}")
    if x.dtype not in _DTYPES:
        raise InputError(name, _text(x), "give bfloat16, float16, float32 or float64")


def _text(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _check_pair(q: Tensor, k: Tensor, v: Tensor, first: Tensor, packed: bool) -> None:
    """Raise InputError unless k and v fit q and `first`, the keys of the first branch."""
    for name, x in (("k", k), ("v", v)):
        if x.dim() != q.dim() or x.shape[:-3] != q.shape[:-3] or 0 in x.shape[-2:]:
            raise InputError(name, _text(x), f"give the axes and the batch of q: {_text(q)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise InputError(name, _text(x), f"convert to q's dtype and device: {_text(q)}")
    if k.shape[:-1] != v.shape[:-1]:
        raise InputError("v", _text(v), f"give as many tokens and heads as k: {_text(k)}")
    if k.shape[-1] != q.shape[-1]:
        raise InputError("k", _text(k), f"give the head dim of q: {q.shape[-1]}")
    if q.shape[-2] % k.shape[-2]:
        raise InputError("k", _text(k), f"give a number of kv heads that divides the {q.shape[-2]} query heads")
    rows, tokens = q.shape[-3], k.shape[-3]
    if tokens < rows or (packed and tokens != rows):
        raise InputError("k", _text(k), f"give {'exactly' if packed else 'at least'} the {rows} tokens of q")
    if k.shape[:-1] != first.shape[:-1]:
        raise InputError("k", _text(k), f"give as many tokens and heads for every branch: {_text(first)}")
