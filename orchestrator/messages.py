"""Messages between a run's driver and the supervisors of its points: plain, picklable data.

The driver sends `Assignment`s under `Conditions`; a supervisor answers with `Update`s: a point's outcome first, then a
record for each of its files, or an event where a file could not be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from jobs.schema.point import Device, Point
from jobs.schema.states import PointState
from jobs.specs.kinds import kind_module
from jobs.specs.spec import Deadlines, JobSpec
from orchestrator.store.records import ArtifactRecord, EventRecord, OutcomeRecord, SeriesRecord, StartRecord


@dataclass(frozen=True)
class Assignment:
    """A point to be measured, the attempt number, from 1, and the point's key."""

    run_id: str
    point_id: str
    attempt: int
    point: Point
    key: str = ""

    @property
    def ids(self) -> dict[str, Any]:
        """Fields of the point's records."""
        return {"run_id": self.run_id, "point_id": self.point_id}

    def warning(self, message: str) -> EventRecord:
        """The record of something that does not end the point."""
        return EventRecord(**self.ids, level="warning", message=message)


GRACE_S = 30.0
"""Seconds that a point which keeps checkpoints has to save one before it is killed."""


@dataclass(frozen=True)
class Conditions:
    """Conditions shared by all points of a run.

    Attributes:
        device: the device of the points.
        memory_bytes: limit of a point's memory beyond its start, enforced in the child; None: no limit.
        threads: CPU threads of a child.
        warm: whether one child serves many points, until one is not ok or the next needs another environment.
        settings: names of environment variables whose effective values are read back in each point's child.
        card: name of the GPU that the points are planned for; a point that gets another is not measured.
        store: URL of the artifact store; None: no file is kept.
        grace_s: seconds that a point has to end by itself when the run is cancelled; 0: it is killed at once.
    """

    device: Device
    deadlines: Deadlines
    memory_bytes: int | None = None
    threads: int = 1
    warm: bool = False
    settings: tuple[str, ...] = ()
    card: str | None = None
    store: str | None = None
    grace_s: float = 0.0


@dataclass(frozen=True)
class Requirements:
    """Requirements of a spec's points, to be checked where they will run.

    Attributes:
        device: "auto", "cpu" or "cuda".
        kind: the job kind.
        envs: the environments of the points.
        pythons: paths of their interpreters; None: this process's own.
        paths: files and folders that they read, by the spec's field; relative ones below the working directory.
        gpus: GPUs of a point; None: one on a CUDA device.
        versioned: whether the kind has versions of its own to look for.
    """

    device: Literal["auto", "cpu", "cuda"]
    kind: str
    envs: Sequence[Mapping[str, str]]
    pythons: Sequence[str | None]
    paths: Mapping[str, str]
    gpus: float | None
    versioned: bool = False

    @classmethod
    def of(cls, spec: JobSpec) -> Requirements:
        paths = {field: str(path) for field, path in spec.paths().items()}
        versioned = hasattr(kind_module(spec.kind), "versions")
        return cls(spec.device, spec.kind, spec.env, spec.python, paths, spec.resources.num_gpus, versioned)


@dataclass(frozen=True)
class Progress:
    """Progress of a running point: `done` of `total` steps of a phase; `total` is 0 if unknown.

    `rate` is in steps a second, over the last minute of the phase or its later half, what interrupted it included; None
    where it is unknown. A checkpoint has the steps and the rate of the training that it interrupts.
    """

    run_id: str
    point_id: str
    at: datetime
    phase: str
    done: int
    total: int
    rate: float | None = None


@dataclass(frozen=True)
class Series:
    """New samples of a running point's series, a record a series."""

    records: tuple[SeriesRecord, ...]


@dataclass(frozen=True)
class BatchEnded:
    """A batch of points will send no more updates.

    Attributes:
        state: None if its supervisor finished, else the state of its unfinished point: LOST, OOM, CANCELLED.
        reason: why the supervisor did not finish.
    """

    state: PointState | None = None
    reason: str | None = None


Update = StartRecord | Progress | Series | OutcomeRecord | ArtifactRecord | EventRecord
