"""Decorators that tell PyTorch's compiler and autograd about functions."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
Grads = tuple[Tensor | None, ...]
_REFUSAL = b'these gradients have no second derivative; use backend="naive", of a loss its logits'


def constant(function: F) -> F:
    """Mark a function: a compiler that traces a call runs it instead, and keeps its result as a constant.

    The mark is that of torch.compiler.assume_constant_result, which would import torch._dynamo: that takes longer than
    all of PyTorch.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def undifferentiable(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """Decorator of an autograd function's `backward`, whose gradients raise RuntimeError if they are differentiated.

    PyTorch's `once_differentiable` refuses only where the incoming gradient has a derivative: a penalty on the
    gradients of a sum would be dropped without a word.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *douts: Tensor) -> Grads:
        with torch.no_grad():
            grads = backward(ctx, *douts)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return grads
        refusing = torch._C._functions.DelayedError(_REFUSAL, len(grads))  # pyright: ignore[reportAttributeAccessIssue]
        return refusing(*(None if x is None else x.detach().requires_grad_() for x in grads))

    return run
