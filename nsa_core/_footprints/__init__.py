"""What an attention operator allocates, forward and backward, one file an implementation.

Every function names the code that it accounts for, tensor by tensor. Tensors below a thousandth of the whole
(positions, offsets) are left out. Sizes in bytes; symbols as in the operators: B batch, S tokens, Hq and Hkv heads,
D head dim, Nc compressed tokens, P one branch's scores.
"""

from __future__ import annotations

from typing import Protocol

from ..config import NSAConfig
from ..errors import InputError
from .chunked import Chunked
from .dense import Dense
from .ledger import Ledger
from .masked import Masked
from .sizes import Sizes

ACCOUNTS = ("chunked", "naive", "reference", "dense")  # what `footprint` knows


class Footprint(Protocol):
    """One implementation's account."""

    def forward(self, ledger: Ledger, grad: bool) -> None:
        """Run forward. Holds the output (as activation) and, with `grad`, what the backward needs."""
        ...

    def backward(self, ledger: Ledger) -> None:
        """Run backward. Releases what it needed, the output not included, and holds the gradients of q, k and v."""
        ...


def footprint(implementation: str, sizes: Sizes, config: NSAConfig, *, compresses: bool) -> Footprint:
    """The account of `implementation`.

    Args:
        compresses: whether it compresses one k and one v for all branches, or is given three of each, compressed ones
            included, by a layer.

    Raises:
        InputError: nothing is known about it.
    """
    if implementation == "dense":
        return Dense(sizes)
    if implementation == "chunked":
        return Chunked(sizes, config, compresses)
    if implementation in ("naive", "reference"):
        return Masked(sizes, config, compresses, exhaustive=implementation == "reference")
    raise InputError("implementation", repr(implementation), f"use one of {', '.join(ACCOUNTS)}")
