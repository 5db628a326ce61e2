"""One command of a process, from outside: its events, its deadlines, and which state its end means."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, field

import psutil

from jobs.process.child import Child
from jobs.process.messages import Beat, Failure, File, Measured, Message
from jobs.process.post_mortem import describe_exit, oom_kills
from jobs.schema.point import STARTING, WAITING
from jobs.schema.states import PointState

POLL_S = 0.2
_LOW_MEMORY = 0.02  # share of the host's memory: below it, a SIGKILL not sent by us is one for want of memory


@dataclass(frozen=True)
class Ended:
    """End of a command. After a HANG or TIMEOUT the process still runs, to be examined and killed."""

    state: PointState
    reason: str | None = None  # why it is not ok, in one line
    result: Measured | None = None  # None unless it is ok
    files: tuple[File, ...] = ()  # of the result, or of what explains a failure


@dataclass
class DeadlineWatch:
    """Follows a command from when it is sent."""

    child: Child
    startup_s: float = math.inf  # until the first sign of progress
    heartbeat_s: float = math.inf  # between two signs
    whole_s: float = math.inf  # for the whole command
    phase: str = ""  # of the last progress
    _start: float = field(default_factory=time.monotonic)
    _last_beat: float | None = None
    _kills: int = field(default_factory=lambda: oom_kills())
    _low_memory: bool = False

    def step(self) -> tuple[list[Message], Ended | None]:
        """New events, and the end once there is one; waits POLL_S at most."""
        alive = self.child.alive()  # asked before reading: events of a process that dies now are still read
        events = self.child.inbox.receive(POLL_S if alive else 0)
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
        code = self.child.kill()
        if code == -signal.SIGKILL and (self._low_memory or oom_kills() > self._kills):  # not sent by us
            return [], Ended(PointState.OOM, f"{describe_exit(code)} by the kernel, which was out of memory")
        return [], Ended(PointState.CRASH, describe_exit(code))

    def _overdue(self) -> Ended | None:
        now = time.monotonic()
        silent = now - (self._start if self._last_beat is None else self._last_beat)
        starts = self._last_beat is None or self.phase == STARTING or self.phase.startswith(WAITING)
        last = "before its first progress" if self._last_beat is None else f"(last in phase {self.phase!r})"
        if starts and silent > self.startup_s:
            return Ended(PointState.HANG, f"no progress within the {self.startup_s:g} s for start-up")
        if not starts and silent > self.heartbeat_s:
            return Ended(PointState.HANG, f"no progress for {self.heartbeat_s:g} s {last}")
        if now - self._start > self.whole_s:
            return Ended(PointState.TIMEOUT, f"not done after {self.whole_s:g} s {last}")
        return None
