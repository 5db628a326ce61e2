"""Messages between a run's driver and the supervisors of its points: plain, picklable data.

The driver sends `Assignment`s under `Conditions`; a supervisor answers with `Update`s: a point's outcome first, then a
record for each of its files, or an event where a file could not be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from jobs.point import Device, Point
from jobs.spec import Deadlines
from orchestrator.records import ArtifactRecord, EventRecord, OutcomeRecord, StartRecord


@dataclass(frozen=True)
class Assignment:
    """A point to be measured, and the attempt number, from 1."""

    run_id: str
    point_id: str
    attempt: int
    point: Point


@dataclass(frozen=True)
class Conditions:
    """Conditions shared by all points of a run.

    Attributes:
        device: the device of the points.
        memory_bytes: limit of a point's memory beyond its start, enforced in the child; None: no limit.
        threads: CPU threads of a child.
        warm: whether one child serves many points, until one is not ok.
        store: URL of the artifact store; None: no file is kept.
    """

    device: Device
    deadlines: Deadlines
    memory_bytes: int | None = None
    threads: int = 1
    warm: bool = False
    store: str | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a running point: `done` of `total` steps of a phase; `total` is 0 if unknown."""

    run_id: str
    point_id: str
    at: datetime
    phase: str
    done: int
    total: int


Update = StartRecord | Progress | OutcomeRecord | ArtifactRecord | EventRecord
