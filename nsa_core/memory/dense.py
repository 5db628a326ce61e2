"""Memory of scaled_dot_product_attention (backends/dense.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .ledger import Ledger
from .sizes import Sizes


@dataclass(frozen=True)
class Dense:
    """Account of scaled_dot_product_attention's fused kernels: beside the output only lse is kept."""

    sizes: Sizes
    released = 0

    @property
    def _lse(self) -> int:
        return self.sizes.tokens * self.sizes.heads * 4

    def forward(self, ledger: Ledger, grad: bool) -> None:
        ledger.hold("activations", self.sizes.q + self._lse)
        if self.sizes.device.type == "cpu":
            rows, keys = self._cpu_tile()
            ledger.touch(torch.get_num_threads() * rows * (keys + 2 + self.sizes.dim) * 4)
        if not grad:
            ledger.release("activations", self._lse)

    def backward(self, ledger: Ledger) -> None:
        s = self.sizes
        ledger.hold("gradients", s.q + 2 * s.kv)
        if s.device.type == "cpu":
            rows, keys = self._cpu_tile()
            ledger.touch(torch.get_num_threads() * 2 * rows * keys * 4)
        else:  # the flash kernel sums dq in float32, and dk, dv of every query head before those of the group
            grouped = 2 * s.q if s.heads != s.kv_heads else 0
            ledger.touch(s.tokens * s.heads * s.dim * 4 + grouped + self._lse)
        ledger.release("activations", self._lse)

    def _cpu_tile(self) -> tuple[int, int]:
        """Rows and keys of a thread's tile in PyTorch's FlashAttentionKernel.cpp."""
        length = self.sizes.seq_len
        rows = 256 if length >= 768 else 64 if length >= 192 else 32
        return min(rows, length), min(512, length)
