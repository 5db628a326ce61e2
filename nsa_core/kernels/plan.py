"""What the stages are told of a call: branches, sizes, and where queries and keys lie."""

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
class Plan:
    """What does not depend on the tensors' values.

    Attributes:
        config: sizes and counts.
        branches: those computed, in the order of the keys and values and of the gates' columns: cmp, slc, win.
        offset: position of q's first row.
        scale: of q·k.
        shared: slc and win, the last two, have one pair of keys and values, and the window holds the local blocks.
        compresses: cmp has the same pair, too, from which its own is made on the way.
        keeps: a backward may follow, for which each branch's output is kept.
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
        """Pairs of keys and values that are given."""
        return len(self.branches) - self.shared - self.compresses

    def causal_rows(self, rows: int) -> int:
        """Of `rows` rows of q those that select every block up to their own."""
        return min(max(0, self.config.slc_count * self.config.slc_block - self.offset), rows)

    def chooses(self, rows: int) -> bool:
        """Whether any of `rows` rows of q has blocks to choose by score."""
        return "slc" in self.branches and self.config.free_blocks > 0 and self.causal_rows(rows) < rows

    def parts(self, flat: Sequence[Tensor]) -> list[Part]:
        """The branches' keys and values, from those of each pair in turn, compressed ones for cmp."""
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        pairs += pairs[-1:] * self.shared
        return [Part(branch, k, v) for branch, (k, v) in zip(self.branches, pairs, strict=True)]
