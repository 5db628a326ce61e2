"""Backward passes that have no derivative of their own, and refuse one.

PyTorch's `once_differentiable` refuses only where the incoming gradient has a derivative: a penalty on the gradients of
a sum would be dropped without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]


def undifferentiable(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """Decorator of an autograd function's `backward`, whose gradients raise RuntimeError if they are differentiated."""

    @functools.wraps(backward)
    def run(ctx: Any, *douts: Tensor) -> Grads:
        with torch.no_grad():
            grads = backward(ctx, *douts)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return grads
        marked = iter(_Refusing.apply(torch.zeros((), requires_grad=True), *(x for x in grads if x is not None)))
        return tuple(None if x is None else next(marked) for x in grads)

    return run


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError('these gradients have no second derivative; use backend="naive", of a loss its logits')
