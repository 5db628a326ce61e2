"""Processor time and memory of a point's processes, read from outside while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import psutil

from jobs.point import Reading
from jobs.quantities import CPU_UTILIZATION, RESIDENT_MEMORY

_LEAST_S = 0.2  # the kernel counts processor time in steps of 10 ms


class ProcessUsage:
    """Usage of a process tree between one reading and the next.

    Args:
        processes: gives the living processes of the tree.
        cores: processor cores of the point, 100 % of which is all of them busy.
    """

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]], cores: float) -> None:
        self._processes = processes
        self._cores = cores
        self._number = 0
        self._seconds, _ = _usage(processes())
        self._at = time.monotonic()  # once the processes are found, which takes its time where there are many

    def readings(self) -> list[Reading]:
        """Utilisation since the last reading, and the present resident memory; none once the processes are gone."""
        if time.monotonic() - self._at < _LEAST_S or not (tree := self._processes()):
            return []
        seconds, resident = _usage(tree)
        clock = time.monotonic()
        share = 100 * max(0.0, seconds - self._seconds) / (clock - self._at) / self._cores
        self._at, self._seconds, self._number = clock, seconds, self._number + 1
        return [Reading(0, self._number, time.time(), {CPU_UTILIZATION: share, RESIDENT_MEMORY: resident / 2**20})]


def _usage(tree: Sequence[psutil.Process]) -> tuple[float, int]:
    """Processor seconds of the processes and their ended children, and resident bytes of the living ones."""
    seconds, resident = 0.0, 0
    for process in tree:
        with contextlib.suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            seconds += times.user + times.system
            seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            resident += process.memory_info().rss
    return seconds, resident
