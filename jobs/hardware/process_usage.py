"""Processor time and memory of a point's processes, read from outside while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import psutil

from jobs.schema.point import Reading
from jobs.schema.quantities import CPU_UTILIZATION, RESIDENT_MEMORY

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
        if not resident:  # they have ended, and nobody has reaped them yet
            return []
        clock = time.monotonic()
        share = 100 * max(0.0, seconds - self._seconds) / (clock - self._at) / self._cores
        self._at, self._seconds, self._number = clock, seconds, self._number + 1
        return [Reading(0, self._number, time.time(), {CPU_UTILIZATION: share, RESIDENT_MEMORY: resident / 2**20})]


class PointUsage:
    """Usage of a point's processes: of all together, as rank 0's, until its ranks are known; then of each rank's.

    Args:
        processes, cores: as of ProcessUsage.
    """

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]], cores: float) -> None:
        self._cores = cores
        self._number = 0
        self._meters = [ProcessUsage(processes, cores)]

    def follow(self, pids: Sequence[int]) -> None:
        """Read from now on the processes of these ranks and their descendants, each beside its part of the cores."""
        cores = max(1.0, self._cores // len(pids))
        self._meters = [ProcessUsage(descent(pid), cores) for pid in pids]

    def readings(self) -> list[Reading]:
        """As ProcessUsage.readings, of each rank."""
        self._number += 1
        found = [(rank, reading) for rank, meter in enumerate(self._meters) for reading in meter.readings()]
        return [replace(reading, rank=rank, number=self._number) for rank, reading in found]


def descent(pid: int) -> Callable[[], list[psutil.Process]]:
    """Function that gives a living process and its descendants; none once it is gone."""

    def tree() -> list[psutil.Process]:
        try:
            root = psutil.Process(pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    return tree


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
