"""Memory that an attention operator allocates, forward and backward, one file per implementation.

The Triton kernels' footprint is counted while their host code runs on meta tensors. The others are written down tensor
by tensor: every function names the code that it accounts for; tensors below a thousandth of the whole (positions,
offsets) are left out. Sizes in bytes; symbols as in the operators: B batch, S tokens, Hq and Hkv heads, D head dim,
Nc compressed tokens, P one branch's scores.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..backends import triton
from ..config import NSAConfig
from ..errors import InputError
from .chunked import Chunked
from .dense import Dense
from .kernels import Kernels
from .ledger import Ledger
from .masked import Masked
from .sizes import Sizes

IMPLEMENTATIONS = ("chunked", "naive", "reference", "triton", "dense")


class Footprint(Protocol):
    """One implementation's account of its memory."""

    @property
    def released(self) -> int:
        """Bytes of a layer's keys and values that the backward does not need, because the operator keeps copies."""
        ...

    def forward(self, ledger: Ledger, grad: bool) -> None:
        """Account for a forward: holds the output (as activation) and, with `grad`, the backward's tensors."""
        ...

    def backward(self, ledger: Ledger) -> None:
        """Account for a backward: releases its tensors except for the output, holds gradients of q, k and v."""
        ...


def unpredicted(implementation: str) -> str | None:
    """Reason why the memory of `implementation` cannot be predicted here, with the fix; None if it can."""
    if implementation not in IMPLEMENTATIONS:
        return f"use one of {', '.join(IMPLEMENTATIONS)}"
    if implementation == "triton":
        return triton.unavailable(torch.device("cuda"), torch.bfloat16)
    return None


def footprint(implementation: str, sizes: Sizes, config: NSAConfig, *, compresses: bool) -> Footprint:
    """Account of `implementation`.

    Args:
        compresses: the operator compresses one k and one v for all branches; else a layer gives it three of each, the
            compressed ones among them.

    Raises:
        InputError: `unpredicted` has a reason against it.
    """
    reason = unpredicted(implementation)
    if reason is not None:
        raise InputError("implementation", repr(implementation), reason)
    if implementation == "dense":
        return Dense(sizes)
    if implementation == "triton":
        return Kernels(sizes, config, compresses)
    if implementation == "chunked":
        return Chunked(sizes, config, compresses)
    return Masked(sizes, config, compresses, exhaustive=implementation == "reference")
