"""What an attention operator allocates, forward and backward, one file an implementation.

The Triton kernels' footprint is counted while their host code runs on tensors without memory. The others are written
down tensor by tensor: every function names the code that it accounts for; tensors below a thousandth of the whole
(positions, offsets) are left out. Sizes in bytes; symbols as in the operators: B batch, S tokens, Hq and Hkv heads,
D head dim, Nc compressed tokens, P one branch's scores.
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
    """One implementation's account."""

    @property
    def released(self) -> int:
        """Bytes of a layer's keys and values that the backward does not need, as the operator has made copies."""
        ...

    def forward(self, ledger: Ledger, grad: bool) -> None:
        """Run forward. Holds the output (as activation) and, with `grad`, what the backward needs."""
        ...

    def backward(self, ledger: Ledger) -> None:
        """Run backward. Releases what it needed, the output not included, and holds the gradients of q, k and v."""
        ...


def unpredicted(implementation: str) -> str | None:
    """Why the memory of `implementation` cannot be told here, and what to do; None if it can."""
    if implementation not in IMPLEMENTATIONS:
        return f"use one of {', '.join(IMPLEMENTATIONS)}"
    if implementation == "triton":
        return triton.unavailable(torch.device("cuda"), torch.bfloat16)
    return None


def footprint(implementation: str, sizes: Sizes, config: NSAConfig, *, compresses: bool) -> Footprint:
    """The account of `implementation`.

    Args:
        compresses: whether it compresses one k and one v for all branches, or is given three of each, compressed ones
            included, by a layer.

    Raises:
        InputError: nothing is known about it here.
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
