"""Processor time and memory of a point's processes, read from outside while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import psutil

from jobs.schema.point import Reading
from jobs.schema.quantities import CPU_UTILIZATION, RESIDENT_MEMORY

_LEAST_S = 0.2  # the kernel counts processor time in steps of 10 ms


class ProcessUsage:
    """Usage of process trees between one reading and the next: of the point's, as rank 0, or of each of its ranks'.

    Args:
        pids: process id of the root of each tree, by rank.
        cores: processor cores of each, 100 % of which is all of them busy.
    """

    def __init__(self, pids: Sequence[int], cores: float) -> None:
        self._cores = cores
        self._number = 0
        self._before = {pid: (time.monotonic(), _usage(pid)[0]) for pid in pids}

    def follow(self, pids: Sequence[int]) -> None:
        """Read from now on the trees of these processes, which share the cores."""
        self._cores = max(1.0, self._cores // len(pids))
        self._before = {pid: (time.monotonic(), _usage(pid)[0]) for pid in pids}

    def readings(self) -> list[Reading]:
        """Utilisation since the last reading, and the present resident memory, of each tree that is still there."""
        self._number += 1
        found = []
        for rank, (pid, (since, before)) in enumerate(self._before.items()):
            clock = time.monotonic()
            if clock - since < _LEAST_S:
                continue
            seconds, resident = _usage(pid)
            if not resident:  # they have ended, even if nobody has reaped them yet
                continue
            self._before[pid] = clock, seconds
            share = 100 * max(0.0, seconds - before) / (clock - since) / self._cores
            values = {CPU_UTILIZATION: share, RESIDENT_MEMORY: resident / 2**20}
            found.append(Reading(rank, self._number, time.time(), values))
        return found


def _usage(pid: int) -> tuple[float, int]:
    """Processor seconds of a process, its descendants and their ended children; resident bytes of the living ones."""
    seconds, resident = 0.0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                seconds += times.user + times.system
                seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
                resident += process.memory_info().rss
    return seconds, resident
