"""The journal's lines. A run is the sequence of its records; the store holds what they add up to.

Every record is applied idempotently: replaying a journal, whole or in part, gives the same rows.
Records carry plain data only, so that a store can be filled without the code that measured.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from jobs.axes import Axis
from jobs.quantities import Quantity
from orchestrator.states import Origin, PointState, RunState


def now() -> datetime:
    return datetime.now(UTC)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    v: Literal[1] = 1
    run_id: str
    at: datetime = Field(default_factory=now)


class RunRecord(_Record):
    """A run begins (or is taken up again: `resumed` counts)."""

    type: Literal["run"] = "run"
    name: str
    kind: str
    spec: dict[str, Any]
    spec_hash: str
    origin: Origin = Origin.MEASURED
    source: str | None = None  # for reported results: the file or report they come from
    git_commit: str | None = None
    git_dirty: bool | None = None
    code_hash: str | None = None  # of the sources of nsa_core and jobs
    submission_id: str | None = None  # Ray's, when run as a Ray job
    host: str | None = None
    artifacts: str | None = None  # folder of the run's journal and artifacts, on the host that wrote it
    resumed: int = 0
    quantities: tuple[Quantity, ...] | None = None  # as the kind declares them; None: written before kinds did
    axes: tuple[Axis, ...] = ()  # that the kind declares beside those of all kinds


class PointRecord(_Record):
    """A point that the run will measure; `pending`, or `skipped` with its reason."""

    type: Literal["point"] = "point"
    point_id: str  # "<run_id>/<index>"
    index: int
    attempt: int = 0  # that came before this plan: more than 0 where a run is taken up again
    key: str
    label: str
    config: dict[str, Any]
    axes: dict[str, Any]  # jobs.axes.Axes.to_record
    estimate_bytes: int | None = None
    state: PointState = PointState.PENDING
    reason: str | None = None


class StartRecord(_Record):
    """A point was handed to a worker."""

    type: Literal["start"] = "start"
    point_id: str
    attempt: int
    node: str | None = None


class MetricData(BaseModel):
    """jobs.point.Metric, as stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    unit: str
    value: float
    samples: tuple[float, ...] = ()
    p10: float | None = None
    p90: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    method: str = ""


class ArtifactData(BaseModel):
    """A file of a point. `content` holds the text (its end, where `truncated`), so that it can be read anywhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    path: str  # relative to the run's artifacts folder
    size: int
    sha256: str
    content: str | None = None
    truncated: bool = False


class OutcomeRecord(_Record):
    """A point's attempt ended. Metrics only with `ok`."""

    type: Literal["outcome"] = "outcome"
    point_id: str
    attempt: int
    state: PointState
    reason: str | None = None
    started_at: datetime | None = None
    metrics: tuple[MetricData, ...] = ()
    route: dict[str, str] = {}
    environment: dict[str, Any] = {}
    artifacts: tuple[ArtifactData, ...] = ()


class EventRecord(_Record):
    """Something worth telling that is no state: a retry, a warning, a database that was away."""

    type: Literal["event"] = "event"
    point_id: str | None = None
    level: Literal["info", "warning", "error"] = "info"
    message: str


class RunEndRecord(_Record):
    """The run ended."""

    type: Literal["run_end"] = "run_end"
    state: RunState
    reason: str | None = None


Record = Annotated[
    RunRecord | PointRecord | StartRecord | OutcomeRecord | EventRecord | RunEndRecord, Field(discriminator="type")
]
RECORD: TypeAdapter[Record] = TypeAdapter(Record)
