"""An account of what lives when: tensors are held and released in the order of the code, the highest moment is kept."""

from __future__ import annotations

from collections import Counter
from typing import Literal

Part = Literal["gradients", "activations", "workspace"]


class Ledger:
    """Bytes by part, now and at the highest moment so far."""

    def __init__(self) -> None:
        self.now: Counter[Part] = Counter()
        self.peak: Counter[Part] = Counter()

    def hold(self, part: Part, size: float) -> None:
        """`size` bytes more live from now on."""
        self.now[part] += round(size)
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def release(self, part: Part, size: float) -> None:
        """`size` bytes are given back."""
        self.now[part] -= round(size)

    def touch(self, size: float) -> None:
        """`size` bytes of workspace come and go."""
        self.hold("workspace", size)
        self.release("workspace", size)
