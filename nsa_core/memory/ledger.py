"""A ledger of live bytes: tensors are held and released in the order of the code, and the peak is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Part = Literal["gradients", "activations", "workspace"]


class Ledger:
    """Bytes by part, now and at the peak so far."""

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
        """Count `size` bytes as freed."""
        self.now[part] -= round(size)

    def touch(self, size: float) -> None:
        """Hold and release `size` bytes of workspace."""
        self.hold("workspace", size)
        self.release("workspace", size)
