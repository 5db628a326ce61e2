"""Records, the lines of a journal. The store holds the state that results from applying a run's records.

Applying a record is idempotent: replaying a journal, whole or in part, gives the same rows.
Records carry plain data only, so that a store can be filled without the code that measured. What comes from outside
(messages, names, environments) may be anything: a record holds it as text and numbers that journals and databases take.
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from jobs.schema.axes import Axis, check_axes
from jobs.schema.quantities import SHARED, Quantity, check_quantities
from jobs.schema.states import Origin, PointState, RunState
from jobs.schema.training_plan import mode_of

STORED_BYTES = 64 << 10  # bytes at the end of a text file that are kept in the journal and the database, too


def now() -> datetime:
    return datetime.now(UTC)


# Bounds of every database: SQLite would take more, and Postgres refuse it.
Name = Annotated[str, Field(max_length=200)]
PointId = Annotated[str, Field(max_length=240)]
Hash = Annotated[str, Field(max_length=64)]
Kind = Annotated[str, Field(max_length=40)]
Small = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[int, Field(ge=1, lt=1 << 31)]  # of an attempt
Large = Annotated[int, Field(ge=0, lt=1 << 63)]


def without_nul(text: str) -> str:
    """The text as Postgres takes it."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _storable(value: Any, *, nested: bool = False) -> Any:
    """The value, with lone surrogates in its texts, at any depth, written as escapes.

    Nested in an object or array it is JSON's: that has no number for a float that is not finite, so this is a text.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_storable(key): _storable(item, nested=True) for key, item in value.items()}
    if isinstance(value, list) or (nested and isinstance(value, tuple)):
        return [_storable(item, nested=True) for item in value]
    return str(value) if nested and isinstance(value, float) and not math.isfinite(value) else value


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="after")
    @classmethod
    def _of_storable_texts(cls, value: Any) -> Any:
        value = _storable(value)
        return without_nul(value) if isinstance(value, str) and "\0" in value else value  # a state stays one


class _Record(_Plain):
    v: Literal[1] = 1
    run_id: Name
    at: AwareDatetime = Field(default_factory=now)


class RunRecord(_Record):
    """Start of a run, or its resumption; `resumed` counts the latter."""

    type: Literal["run"] = "run"
    state: Literal[RunState.PENDING, RunState.RUNNING] = RunState.RUNNING  # pending: it waits for its cluster
    name: str
    kind: Kind
    spec: dict[str, Any]
    spec_hash: Hash
    origin: Origin = Origin.MEASURED
    source: str | None = None  # file or report of reported results
    git_commit: Hash | None = None
    git_branch: str | None = None
    git_dirty: bool | None = None
    code_hash: Hash | None = None  # hash of the sources of nsa_core and jobs
    submission_id: Name | None = None  # Ray's id, if run as a Ray job
    person: Name | None = None  # who submitted it
    host: str | None = None
    artifacts: str | None = None  # folder of the run's journal, on the host that wrote it
    artifact_store: str | None = None  # URL of the store of the points' files
    resumed: Small = 0
    quantities: tuple[Quantity, ...] = tuple(SHARED)  # as the kind declares them
    axes: tuple[Axis, ...] = ()  # axes that the kind adds to those of all kinds

    @field_validator("quantities", "axes", mode="after")
    @classmethod
    def _check_declarations(cls, declared: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        (check_axes if info.field_name == "axes" else check_quantities)(declared)
        return declared


class PointRecord(_Record):
    """A planned point: `pending`, or `skipped` with its reason."""

    type: Literal["point"] = "point"
    point_id: PointId  # "<run_id>/<index>"
    index: Small
    attempt: Small = 0  # attempts before this plan: above 0 in a resumed run
    key: Hash
    label: str
    config: dict[str, Any]
    axes: dict[str, Any]  # jobs.schema.axes.Axes.to_record
    estimate_bytes: Large | None = None
    state: PointState = PointState.PENDING
    reason: str | None = None
    answers: tuple[PointState, ...] = ()  # as jobs.schema.point.Point
    resumed: Small = 0  # of the beginning that plans it

    @model_validator(mode="after")
    def _with_its_mode(self) -> Self:
        """Journals of before 0.2.0 have the mode of a training in its configuration only."""
        if {"optimizer", "model", "steps"} <= self.config.keys() and "compile" not in self.axes:
            self.axes.update(mode_of(self.config))
        return self


class StartRecord(_Record):
    """Start of an attempt: the point was handed to a worker."""

    type: Literal["start"] = "start"
    point_id: PointId
    attempt: Number
    node: str | None = None


class MetricData(_Plain):
    """Stored form of jobs.schema.point.Metric."""

    name: Annotated[str, Field(max_length=80)]
    unit: Annotated[str, Field(max_length=20)]
    value: FiniteFloat
    samples: tuple[FiniteFloat, ...] = ()
    p10: float | None = None
    p90: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    method: str = ""


class ArtifactData(_Plain):
    """A file of a point. `content` holds the text (only its end if `truncated`), readable from any host."""

    name: Name
    path: str = Field(max_length=4096)  # relative to the artifact store
    size: Large  # bytes
    sha256: Hash
    content: str | None = None
    truncated: bool = False


class OutcomeRecord(_Record):
    """End of a point's attempt; only `ok` may carry metrics."""

    type: Literal["outcome"] = "outcome"
    point_id: PointId
    attempt: Number
    state: PointState
    reason: str | None = None
    started_at: AwareDatetime | None = None
    metrics: tuple[MetricData, ...] = ()
    route: dict[str, str] = {}
    environment: dict[str, Any] = {}
    final: bool = True  # False: the point is handed out again, and its outcome will be that of a later attempt

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if not self.state.ended:
            raise ValueError(f"state {self.state.value!r} is no end; send a start instead")
        if self.metrics and self.state is not PointState.OK:
            raise ValueError(f"ended {self.state.value!r} with numbers; only 'ok' may carry metrics")
        return self


class ArtifactRecord(_Record):
    """A file of an attempt, kept after its outcome: a file that cannot be kept costs only itself."""

    type: Literal["artifact"] = "artifact"
    point_id: PointId
    attempt: Small
    artifact: ArtifactData


class SeriesRecord(_Record):
    """Samples of one series of an attempt, in the order taken; a series comes in many such pieces. Times are seconds
    since 1970 UTC."""

    type: Literal["series"] = "series"
    point_id: PointId
    attempt: Small
    rank: Small
    name: str = Field(min_length=1, max_length=80)
    unit: str = Field(min_length=1, max_length=20)
    steps: tuple[Large, ...]
    times: tuple[Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)], ...]
    values: tuple[FiniteFloat, ...]

    @model_validator(mode="after")
    def _as_long(self) -> Self:
        if not len(self.steps) == len(self.times) == len(self.values):
            lengths = f"{len(self.steps)}, {len(self.times)} and {len(self.values)}"
            raise ValueError(f"steps, times and values have {lengths} entries; give as many of each")
        return self


class EventRecord(_Record):
    """An event besides state changes: a retry, a warning, an unreachable database."""

    type: Literal["event"] = "event"
    point_id: PointId | None = None
    level: Literal["info", "warning", "error"] = "info"
    message: str


class LabelRecord(_Record):
    """Tags and notes of a run, in place of earlier ones."""

    type: Literal["label"] = "label"
    tags: tuple[Annotated[str, Field(pattern=r"^\S{1,40}$")], ...] = ()
    notes: str | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a running point, which the database shows and no journal holds; a checkpoint has the steps and the
    rate of the training that it interrupts."""

    run_id: str
    point_id: str
    at: datetime
    phase: str
    done: int  # steps of the phase, of `total`; that is 0 if unknown
    total: int
    rate: float | None = None  # steps a second over the last minute, interruptions included; None: unknown


class RunEndRecord(_Record):
    """End of a run; `resumed` is that of the beginning that it ends."""

    type: Literal["run_end"] = "run_end"
    state: RunState
    reason: str | None = None
    resumed: Small = 0

    @field_validator("state", mode="after")
    @classmethod
    def _is_an_end(cls, state: RunState) -> RunState:
        if not state.ended:
            raise ValueError(f"'{state}' is no end; a run ends done, cancelled or failed")
        return state


Record = Annotated[
    RunRecord
    | LabelRecord
    | PointRecord
    | StartRecord
    | SeriesRecord
    | OutcomeRecord
    | ArtifactRecord
    | EventRecord
    | RunEndRecord,
    Field(discriminator="type"),
]
RECORD: TypeAdapter[Record] = TypeAdapter(Record)
