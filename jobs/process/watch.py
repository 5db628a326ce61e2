"""One command of a process, from outside: its events, its deadlines, and which state its end means."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass

import psutil

from jobs.process.child import Child
from jobs.process.messages import Beat, Failure, File, Measured, Message
from jobs.process.post_mortem import describe_exit, oom_kills
from jobs.schema.point import STARTING, WAITING
from jobs.schema.states import PointState

POLL_S = 0.2
_LOW_MEMORY = 0.02  # share of the host's memory: below it, a SIGKILL not sent by us is attributed to the kernel


@dataclass(frozen=True)
class Ended:
    """End of a command."""

    state: PointState
    reason: str | None = None  # why it is not ok, in one line
    result: Measured | None = None  # None unless it is ok
    files: tuple[File, ...] = ()  # of the result, or of what explains a failure

    @property
    def expired(self) -> bool:
        """Whether a deadline passed: the process still runs, to be examined and killed."""
        return self.state in (PointState.HANG, PointState.TIMEOUT)


class DeadlineWatch:
    """Follows a command from when it is sent.

    Args:
        startup_s: until the first sign of progress.
        heartbeat_s: between two signs.
        whole_s: for the whole command.
    """

    def __init__(
        self, child: Child, startup_s: float = math.inf, heartbeat_s: float = math.inf, whole_s: float = math.inf
    ) -> None:
        self.phase = ""  # of the last progress
        self._child = child
        self._startup_s, self._heartbeat_s, self._whole_s = startup_s, heartbeat_s, whole_s
        self._start = time.monotonic()
        self._last_beat: float | None = None
        self._kills = oom_kills()
        self._low_memory = False

    def step(self) -> tuple[list[Message], Ended | None]:
        """New events, and the end once there is one; waits POLL_S at most."""
        alive = self._child.alive()  # asked before reading: events of a process that dies now are still read
        events = self._child.events(POLL_S if alive else 0)
        for number, event in enumerate(events):
            match event:
                case Beat(phase=phase):
                    now = time.monotonic()
                    if self._last_beat is not None and phase == self.phase and phase.startswith(WAITING):
                        self._start += now - self._last_beat  # the point's deadline does not run
                    self._last_beat, self.phase = now, phase
                case Measured(files=files):
                    return events[:number], Ended(PointState.OK, None, event, files)
                case Failure(state, reason, files):
                    return events[:number], Ended(state, reason, None, files)
        if alive:
            memory = psutil.virtual_memory()
            self._low_memory = memory.available < _LOW_MEMORY * memory.total
            return events, self._overdue()
        if events:  # there may be more
            return events, None
        code = self._child.kill()
        if code == -signal.SIGKILL and (self._low_memory or oom_kills() > self._kills):
            return [], Ended(PointState.OOM, f"{describe_exit(code)} by the kernel, which was out of memory")
        return [], Ended(PointState.CRASH, describe_exit(code))

    def _overdue(self) -> Ended | None:
        now = time.monotonic()
        silent = now - (self._start if self._last_beat is None else self._last_beat)
        starts = self._last_beat is None or self.phase == STARTING or self.phase.startswith(WAITING)
        last = "before its first progress" if self._last_beat is None else f"(last in phase {self.phase!r})"
        if starts and silent > self._startup_s:
            return Ended(PointState.HANG, f"no progress within the {self._startup_s:g} s for start-up")
        if not starts and silent > self._heartbeat_s:
            return Ended(PointState.HANG, f"no progress for {self._heartbeat_s:g} s {last}")
        if now - self._start > self._whole_s:
            return Ended(PointState.TIMEOUT, f"not done after {self._whole_s:g} s {last}")
        return None
