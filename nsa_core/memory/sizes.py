"""The tensors of one call, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import NSAConfig


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call's tensors; its properties are bytes, except for `tokens`."""

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
        """Bytes of an element of softmax and sums."""
        return max(4, self.element)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def q(self) -> int:
        """Queries, or the output, [B,S,Hq,D]."""
        return self.tokens * self.heads * self.dim * self.element

    @property
    def kv(self) -> int:
        """Keys or values of one branch, [B,S,Hkv,D]."""
        return self.tokens * self.kv_heads * self.dim * self.element

    @property
    def gates(self) -> int:
        """Gates [B,S,Hq,3]."""
        return self.tokens * self.heads * 3 * self.element

    def compressed(self, config: NSAConfig) -> int:
        """Compressed keys or values [B,Nc,Hkv,D]."""
        return self.batch * config.cmp_tokens(self.seq_len) * self.kv_heads * self.dim * self.element

    def blocks(self, config: NSAConfig) -> int:
        """Selected blocks, int32 [B,S,Hkv,n]."""
        return self.tokens * self.kv_heads * config.slc_count * 4
