"""Kernels as custom operators of torch.library: what is traced (torch.compile, fake tensors) meets one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.library import CustomOpDef, custom_op

from . import launch as _launch

P, R = ParamSpec("P"), TypeVar("R")


def operator(name: str) -> Callable[[Callable[P, R]], CustomOpDef]:
    """A custom operator without side effects. Its fake implementation makes the same tensors, never written."""

    def register(function: Callable[P, R]) -> CustomOpDef:
        operator = custom_op(f"nsa_core::{name}", function, mutates_args=())

        @operator.register_fake
        def fake(*args: P.args, **kwargs: P.kwargs) -> R:
            with _launch.omit():
                return function(*args, **kwargs)

        return operator

    return register
