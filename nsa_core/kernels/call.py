"""`Call`: branches, sizes and flags of one attention call, which its stages share; `Part`: one branch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..config import NSAConfig
from ..routes import Branch
from .runtime.tiles import larger, smaller


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
        of_q, of_keys: whether a backward computes gradients of q, and of keys and values.
        longest: of packed sequences, a length that none exceeds; 0: each of the batch is one sequence.
        cu: bounds of packed sequences, int32 [sequences + 1], of tensors whose batch is 1. Their compressed keys are as
            in `compress`.
    """

    config: NSAConfig
    branches: tuple[Branch, ...]
    offset: int = 0
    scale: float = 1.0
    shared: bool = False
    compresses: bool = False
    keeps: bool = True
    of_q: bool = True
    of_keys: bool = True
    longest: int = 0
    cu: Tensor | None = field(default=None, compare=False)

    @property
    def pairs(self) -> int:
        """Number of (keys, values) pairs given to the call."""
        return len(self.branches) - self.shared - self.compresses

    def causal_rows(self, rows: int) -> int:
        """Number of leading rows, of `rows` rows of q, that select every block up to their own."""
        return smaller(larger(0, self.config.slc_count * self.config.slc_block - self.offset), rows)

    def skipped(self, rows: int) -> int:
        """Number of leading rows that have no slots; of packed sequences, all rows have."""
        return 0 if self.packed else self.causal_rows(rows)

    @property
    def packed(self) -> bool:
        return self.cu is not None

    def tiles(self, total: int, size: int, more: int) -> int:
        """Tiles of `size` tokens of packed sequences of `total` tokens, as in ranges.sequence_of."""
        assert self.cu is not None
        return total // size + more * (self.cu.shape[0] - 1)

    def bounds(self, absent: Tensor) -> dict[str, Any]:
        """Kernel arguments: the bounds of packed sequences, or a placeholder."""
        return dict(CU=absent, sequences=0) if self.cu is None else dict(CU=self.cu, sequences=self.cu.shape[0] - 1)

    def chooses(self, rows: int) -> bool:
        """Whether any of `rows` rows of q has blocks to choose by score."""
        rows = min(rows, self.longest) if self.packed else rows
        return "slc" in self.branches and self.config.free_blocks > 0 and self.causal_rows(rows) < rows

    def parts(self, flat: Sequence[Tensor]) -> list[Part]:
        """Keys and values of each branch.

        Args:
            flat: keys and values of each pair in turn, compressed ones for cmp.
        """
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        pairs += pairs[-1:] * self.shared
        return [Part(branch, k, v) for branch, (k, v) in zip(self.branches, pairs, strict=True)]
