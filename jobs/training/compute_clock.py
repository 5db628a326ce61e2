"""A rank's own compute time of a step: until its last gradients are ready, without waiting for other ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

import torch

_RECENT_S = 1.0


class ComputeClock:
    """Marks the begin of a step and the moment at which its last gradients are ready to be summed over ranks.

    CUDA: events on the current stream, so that nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun = self._ready = self._mark()
        self._complete = False

    def begin(self) -> None:
        """Mark the begin of a step."""
        self._begun, self._complete = self._mark(), False

    def gradients_ready(self) -> None:
        """Mark the end of the step's own computation."""
        self._ready, self._complete = self._mark(), True

    def lap(self) -> Callable[[], float | None]:
        """Function that returns the step's compute time [ms] once the device has done it; None if nothing marked it."""
        begun, ready, complete = self._begun, self._ready, self._complete

        def milliseconds() -> float | None:
            return _between(begun, ready) if complete else None

        return milliseconds

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class RecentMean:
    """Mean of the values of the last second, at least of the last one."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()

    def add(self, value: float) -> float:
        """Take in a value of now. Returns the mean."""
        clock = time.perf_counter()
        self._values.append((clock, value))
        while clock - self._values[0][0] > _RECENT_S:
            self._values.popleft()
        return fmean(value for _, value in self._values)


def _between(begun: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    """Milliseconds between two marks."""
    if isinstance(begun, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return begun.elapsed_time(ended)
    assert isinstance(begun, float)
    assert isinstance(ended, float)
    return 1000 * (ended - begun)
