"""Marks of functions for torch.compile, set without importing its compiler, which takes longer than all of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Mark a function: a compiler that traces a call runs it instead, and keeps its result as a constant.

    The mark is that of torch.compiler.assume_constant_result, which would import torch._dynamo.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
