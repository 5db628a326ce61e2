"""A ledger of live bytes: tensors are held and released in the order of the code, and the peak is kept."""

from __future__ import annotations

from collections import Counter
from typing import Literal

Part = Literal["gradients", "activations", "workspace"]


class Ledger:
    """Bytes by part, now and at the peak so far."""

    def __init__(self) -> None:
        self.now: Counter[Part] = Counter()
        self.peak: Counter[Part] = Counter()

    def hold(self, part: Part, size: float) -> None:
        """Count `size` more bytes as live."""
        self.now[part] += round(size)
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def release(self, part: Part, size: float) -> None:
        """Count `size` bytes as freed."""
        self.now[part] -= round(size)

    def touch(self, size: float) -> None:
        """Hold and release `size` bytes of workspace."""
        self.hold("workspace", size)
        self.release("workspace", size)
