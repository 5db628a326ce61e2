"""The tensors of one call in bytes, and a ledger of those that are live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from ..config import NSAConfig

Part = Literal["gradients", "activations", "workspace"]


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


class Ledger:
    """Bytes by part, now and at the peak so far: tensors are held and released in the order of the code."""

    def __init__(self) -> None:
        self.now: Counter[Part] = Counter()
        self.peak: Counter[Part] = Counter()
        self._kept: int | None = None  # activations beyond which all are temporary; None: none is

    @contextmanager
    def temporary(self, really: bool) -> Iterator[None]:
        """Count activations that are held within as workspace of the peak: none outlives the forward pass.

        Args:
            really: False: do nothing.
        """
        if not really or self._kept is not None:
            yield
            return
        self._kept = self.now["activations"]
        yield
        self._kept = None

    def hold(self, part: Part, size: float) -> None:
        """Count `size` more bytes as live."""
        self.now[part] += round(size)
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()
            if self._kept is not None:
                passing = self.now["activations"] - self._kept
                self.peak.update(workspace=passing, activations=-passing)

    def release(self, part: Part, size: float) -> None:
        self.now[part] -= round(size)

    def touch(self, size: float) -> None:
        self.hold("workspace", size)
        self.release("workspace", size)
