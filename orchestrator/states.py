"""The states of a run and of a point (a point's life: docs/architecture.md)."""

from __future__ import annotations

from enum import StrEnum


class PointState(StrEnum):
    """Where a point stands. Only `OK` carries numbers."""

    PENDING = "pending"
    RUNNING = "running"
    OK = "ok"
    OOM = "oom"  # out of device or host memory
    TIMEOUT = "timeout"  # still making progress when the point's deadline passed
    HANG = "hang"  # no progress within the heartbeat deadline
    CRASH = "crash"  # the process died: a signal, or an exit without a result
    ERROR = "error"  # it raised, or its result disagreed with the oracle
    SKIPPED = "skipped"  # never started: predicted not to fit
    LOST = "lost"  # the node or the orchestrator's own worker went away
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (PointState.PENDING, PointState.RUNNING)

    @property
    def failed(self) -> bool:
        return self in FAILED


FAILED = frozenset(
    {PointState.OOM, PointState.TIMEOUT, PointState.HANG, PointState.CRASH, PointState.ERROR, PointState.LOST}
)


class RunState(StrEnum):
    """Where a run stands: `DONE` when every point ended, whatever their states."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"  # the run itself could not go on; its points say what was measured


class Origin(StrEnum):
    """Who took a run's numbers: this project, or somebody whose figures were imported."""

    MEASURED = "measured"
    REPORTED = "reported"


class Result(StrEnum):
    """A rule's or a target's verdict. Unmeasured is never a pass."""

    GO = "GO"
    NO_GO = "NO-GO"
    UNKNOWN = "UNKNOWN"
