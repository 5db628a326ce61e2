"""States of runs and points; docs/architecture.md describes a point's life."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class PointState(StrEnum):
    """A point's state. Only `OK` carries numbers."""

    PENDING = "pending"
    RUNNING = "running"
    OK = "ok"
    OOM = "oom"  # out of device or host memory
    TIMEOUT = "timeout"  # still making progress when the point's deadline passed
    HANG = "hang"  # no progress within the heartbeat deadline
    CRASH = "crash"  # the process died: a signal, or an exit without a result
    ERROR = "error"  # it raised, or its result disagreed with the oracle
    SKIPPED = "skipped"  # never started: predicted not to fit, or a peer that is not there
    LOST = "lost"  # the node or the orchestrator's own worker went away
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (PointState.PENDING, PointState.RUNNING)

    @property
    def settles(self) -> bool:
        """Whether it is an outcome, which counts until a later attempt has one; lost and cancelled are none."""
        return self.ended and self not in (PointState.LOST, PointState.CANCELLED)


FAILED = frozenset(
    {PointState.OOM, PointState.TIMEOUT, PointState.HANG, PointState.CRASH, PointState.ERROR, PointState.LOST}
)


def reason_in_words(point: Mapping[str, Any]) -> str:
    """Why a point has its state (`queries.points`), and where it failed: "exited with code 1; on GPU 3 of node1"."""
    return "; ".join(filter(None, (point["reason"], point["failed_on"])))


def again_in_words(point: Mapping[str, Any]) -> str:
    """State and reason of a later attempt at a point (`queries.points`) that keeps its outcome; "" without one."""
    state, reason = point["again"], point["again_reason"]
    if not state:
        return ""
    if not PointState(state).ended:
        return f"measured again: {state}"
    return f"not measured again: {state}" + (f" ({reason})" if reason else "")


def phase_in_words(point: Mapping[str, Any]) -> str:
    """Phase and steps of the attempt at a point that runs (`queries.points`): "measure 3/10"; "" if none does."""
    phase, total = point["phase"], point["total"]
    if not point["running"] or not isinstance(phase, str):
        return ""
    return f"{phase} {point['done']:.0f}/{total:.0f}" if total and total == total else phase


class RunState(StrEnum):
    """A run's state: `DONE` when every point has ended, in any state."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"  # the run itself could not go on; points that had ended keep their states

    @property
    def ended(self) -> bool:
        return self not in (RunState.PENDING, RunState.RUNNING)


def run_in_words(run: Mapping[str, Any]) -> str:
    """The state of a run (`queries.runs`), with the points that failed: "done, 3 of 12 failed"."""
    state, failed = str(run["state"]), int(run["failed"])
    return f"{state}, {failed} of {int(run['points'])} failed" if state == RunState.DONE and failed else state


class Origin(StrEnum):
    """The origin of a run's numbers: measured by this project, or imported as reported by others."""

    MEASURED = "measured"
    REPORTED = "reported"


class Result(StrEnum):
    """A rule's or a target's verdict. Unmeasured is never a pass."""

    GO = "GO"
    NO_GO = "NO-GO"
    UNKNOWN = "UNKNOWN"
