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

GRACE_S = 30.0
"""Seconds that a point which keeps checkpoints has to save one before it is killed."""


@dataclass(frozen=True)
class Assignment:
    """A point to be measured."""

    run_id: str
    point_id: str
    attempt: int  # its number, from 1
    point: Point
    key: str = ""

    @property
    def ids(self) -> dict[str, Any]:
        """Fields of the point's records."""
        return {"run_id": self.run_id, "point_id": self.point_id}

    def warning(self, message: str) -> EventRecord:
        """The record of something that does not end the point."""
        return EventRecord(**self.ids, level="warning", message=message)


@dataclass(frozen=True)
class Conditions:
    """Conditions shared by all points of a run."""

    device: Device  # of the points
    deadlines: Deadlines
    memory_bytes: int | None = None  # limit of a point's memory beyond its start; None: no limit
    threads: int = 1  # of a child's CPU
    warm: bool = False  # one child serves many points, until one is not ok or the next needs another environment
    settings: tuple[str, ...] = ()  # environment variables whose effective values are read back in each child
    card: str | None = None  # name of the GPU that the points are planned for; another one's are not measured
    store: str | None = None  # URL of the artifact store; None: no file is kept
    grace_s: float = 0.0  # that a point has to end by itself when the run is cancelled; 0: it is killed at once


@dataclass(frozen=True)
class Requirements:
    """Requirements of a spec's points, to be checked where they will run."""

    device: Literal["auto", "cpu", "cuda"]
    kind: str
    envs: Sequence[Mapping[str, str]]  # the environments of the points
    pythons: Sequence[str | None]  # paths of their interpreters; None: this process's own
    paths: Mapping[str, str]  # files and folders that they read, by the spec's field; relative to the working directory
    gpus: float | None  # of a point; None: one on a CUDA device
    versioned: bool = False  # whether the kind has versions of its own to look for

    @classmethod
    def of(cls, spec: JobSpec) -> Requirements:
        paths = {field: str(path) for field, path in spec.paths().items()}
        versioned = hasattr(kind_module(spec.kind), "versions")
        return cls(spec.device, spec.kind, spec.env, spec.python, paths, spec.resources.num_gpus, versioned)


@dataclass(frozen=True)
class Progress:
    """Progress of a running point; a checkpoint has the steps and the rate of the training that it interrupts."""

    run_id: str
    point_id: str
    at: datetime
    phase: str
    done: int  # steps of the phase, of `total`; that is 0 if unknown
    total: int
    rate: float | None = None  # steps a second over the last minute, interruptions included; None: unknown


@dataclass(frozen=True)
class Series:
    """New samples of a running point's series, one record each."""

    records: tuple[SeriesRecord, ...]


@dataclass(frozen=True)
class BatchEnded:
    """A batch of points will send no more updates."""

    state: PointState | None = None  # None if its supervisor finished, else that of its unfinished point
    reason: str | None = None  # why the supervisor did not finish


Update = StartRecord | Progress | Series | OutcomeRecord | ArtifactRecord | EventRecord
