"""The tensors of one call, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import NSAConfig


@dataclass(frozen=True)
class Sizes:
    """The tensors of one call."""

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def element(self) -> int:
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of what softmax and sums run in."""
        return max(4, self.element)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def q(self) -> int:
        """[B,S,Hq,D]: queries, and the output."""
        return self.tokens * self.heads * self.dim * self.element

    @property
    def kv(self) -> int:
        """[B,S,Hkv,D]: keys or values of one branch."""
        return self.tokens * self.kv_heads * self.dim * self.element

    @property
    def gates(self) -> int:
        """[B,S,Hq,3]."""
        return self.tokens * self.heads * 3 * self.element

    def compressed(self, config: NSAConfig) -> int:
        """[B,Nc,Hkv,D]."""
        return self.batch * config.cmp_tokens(self.seq_len) * self.kv_heads * self.dim * self.element

    def blocks(self, config: NSAConfig) -> int:
        """int32 [B,S,Hkv,n]: the selection."""
        return self.tokens * self.kv_heads * config.slc_count * 4
