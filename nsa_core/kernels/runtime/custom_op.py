"""Kernels as custom operators of torch.library: a tracer (torch.compile, fake tensors) sees each as one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.library import CustomOpDef, custom_op

from .launch import omit

P, R = ParamSpec("P"), TypeVar("R")


def operator(name: str, fake: Callable[P, R] | None = None) -> Callable[[Callable[P, R]], CustomOpDef]:
    """Decorator that registers nsa_core::`name`, an operator without side effects.

    Args:
        fake: returns the same tensors, unwritten; None: the function itself with launches omitted.
    """

    def register(function: Callable[P, R]) -> CustomOpDef:
        operator = custom_op(f"nsa_core::{name}", function, mutates_args=())

        def unlaunched(*args: P.args, **kwargs: P.kwargs) -> R:
            with omit():
                return function(*args, **kwargs)

        operator.register_fake(fake or unlaunched)
        return operator

    return register
