"""`Call`: branches, sizes and flags of one attention call, which its stages share; `Part`: one branch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..config import NSAConfig
from ..routes import Branch


@dataclass(frozen=True)
class Part:
    """One branch's keys [B,N,HKV,D] and values [B,N,HKV,DV]."""

    branch: Branch
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Call:
    """Settings of one attention call, without its tensors.

    Attributes:
        config: sizes and counts.
        branches: the branches computed, in the order cmp, slc, win; keys, values and gate columns have the same order.
        offset: position of q's first row.
        scale: factor of q·k before the softmax.
        shared: whether slc and win, the last two branches, have the same keys and values, and the window covers the
            local blocks.
        compresses: whether cmp has the same keys and values too; they are then compressed within the call.
        keeps: whether every branch's output is kept for a backward.
    """

    config: NSAConfig
    branches: tuple[Branch, ...]
    offset: int
    scale: float
    shared: bool = False
    compresses: bool = False
    keeps: bool = True

    @property
    def pairs(self) -> int:
        """Number of (keys, values) pairs given to the call."""
        return len(self.branches) - self.shared - self.compresses

    def causal_rows(self, rows: int) -> int:
        """Number of leading rows, of `rows` rows of q, that select every block up to their own."""
        return min(max(0, self.config.slc_count * self.config.slc_block - self.offset), rows)

    def chooses(self, rows: int) -> bool:
        """Whether any of `rows` rows of q has blocks to choose by score."""
        return "slc" in self.branches and self.config.free_blocks > 0 and self.causal_rows(rows) < rows

    def parts(self, flat: Sequence[Tensor]) -> list[Part]:
        """Keys and values of each branch.

        Args:
            flat: keys and values of each pair in turn, compressed ones for cmp.
        """
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        pairs += pairs[-1:] * self.shared
        return [Part(branch, k, v) for branch, (k, v) in zip(self.branches, pairs, strict=True)]
