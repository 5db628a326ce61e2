"""Kernels as custom operators of torch.library: a tracer (torch.compile, fake tensors) sees each as one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.library import CustomOpDef, custom_op


def operator(name: str, fake: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator that registers nsa_core::`name`, an operator without side effects.

    Args:
        fake: returns the same tensors, unwritten; None: the function itself, whose launches omit fake tensors.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        made = custom_op(f"nsa_core::{name}", function, mutates_args=())
        made.register_fake(fake or function)
        return made

    return register
