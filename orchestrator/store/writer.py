"""Writes journal records as rows. Replaying a journal, whole or in part, changes nothing.

A record only moves a run or a point forward: its attempt and time are compared with the stored ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from jobs.axes import AXES, check_coordinate, check_more
from jobs.quantities import SHARED, Quantity
from orchestrator.database_url import StoreError
from orchestrator.records import (
    STORED_BYTES,
    ArtifactData,
    ArtifactRecord,
    EventRecord,
    OutcomeRecord,
    PointRecord,
    Record,
    RunEndRecord,
    RunRecord,
    SeriesRecord,
    StartRecord,
)
from orchestrator.states import PointState, RunState
from orchestrator.store.models import (
    Artifact,
    DeclaredQuantity,
    Environment,
    Event,
    Metric,
    Point,
    Run,
    Series,
    Verdict,
)

# Stages of an attempt, in order: started, ended, and planned again afterwards.
_STARTED, _ENDED, _PLANNED = range(3)
_STORED_CHARACTERS = 2 * STORED_BYTES  # of a text's kept end, in which a NUL is written as two
_MOST = (1 << 63) - 1
_STAGES = {PointState.RUNNING: _STARTED, PointState.PENDING: _PLANNED, PointState.SKIPPED: _PLANNED}


def apply(session: Session, record: Record) -> None:
    """Write one record. Raises StoreError if it is inconsistent (metrics of a failed point) or its run is unknown."""
    match record:
        case RunRecord():
            _run(session, record)
        case PointRecord():
            _point(session, record)
        case StartRecord():
            _start(session, record)
        case OutcomeRecord():
            _outcome(session, record)
        case ArtifactRecord():
            _existing(session, record)
            _artifact(session, record.point_id, record.attempt, record.artifact)
        case SeriesRecord():
            _series(session, record)
        case EventRecord():
            _event(session, record)
        case RunEndRecord():
            _run_end(session, record)
    session.flush()


def beat(
    session: Session,
    run_id: str,
    point_id: str,
    at: datetime,
    phase: str,
    done: int | None,
    total: int | None,
    rate: float | None,
) -> None:
    """Store a running point's progress; ignored for a point in another state."""
    session.execute(
        update(Point)
        .where(Point.id == point_id, Point.run_id == run_id, Point.state == PointState.RUNNING)
        .values(heartbeat_at=at, phase=_clean(phase), done=_bounded(done), total=_bounded(total), rate=rate)
    )


def add_verdicts(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add verdicts, one mapping of columns a rule."""
    session.execute(insert(Verdict), [dict(row) for row in rows])


def _run(session: Session, record: RunRecord) -> None:
    run = session.get(Run, record.run_id)
    if run is not None:
        run.created_at = min(run.created_at, record.at)
        begins = run.state is RunState.PENDING and record.state is RunState.RUNNING
        if record.at < run.state_at or (record.at == run.state_at and not begins):
            return
    else:
        run = Run(id=record.run_id, created_at=record.at)
        session.add(run)
    for name in type(record).model_fields.keys() - {"v", "type", "run_id", "at", "state", "quantities", "axes"}:
        setattr(run, name, getattr(record, name))
    run.axes = [asdict(axis) for axis in record.axes]
    run.state, run.reason, run.state_at, run.ended_at = record.state, None, record.at, None
    session.flush()
    _quantities(session, record.run_id, SHARED if record.quantities is None else record.quantities)


def _quantities(session: Session, run_id: str, declared: Sequence[Quantity]) -> None:
    session.execute(delete(DeclaredQuantity).where(DeclaredQuantity.run_id == run_id))
    rows = [{"run_id": run_id, "position": place, **asdict(quantity)} for place, quantity in enumerate(declared)]
    if rows:
        session.execute(insert(DeclaredQuantity), rows)


def _run_end(session: Session, record: RunEndRecord) -> None:
    run = session.get(Run, record.run_id)
    if run is None:
        raise _unknown("run", record.run_id)
    if record.at >= run.state_at:
        run.state, run.reason, run.state_at, run.ended_at = record.state, _clean(record.reason), record.at, record.at


def _point(session: Session, record: PointRecord) -> None:
    point = session.get(Point, record.point_id)
    new = point is None
    if point is None:
        if session.get(Run, record.run_id) is None:
            raise _unknown("run", record.run_id)
        point = Point(id=record.point_id, run_id=record.run_id)
        session.add(point)
    _of_run(point, record.run_id)
    if new or _newer(point, record.attempt, _PLANNED, record.at):
        _begin(session, point, record.attempt, record.state, record.at)
        point.reason, point.ended_at = _clean(record.reason), record.at if record.state.ended else None
    point.number, point.key, point.label = record.index, record.key, record.label
    point.config, point.estimate_bytes = record.config, record.estimate_bytes
    _axes(point, record)


def _axes(point: Point, record: PointRecord) -> None:
    """Set the point's axes. A length or batch of 0 is refused: the views divide by the batch, and fits take logs."""
    rest = dict(record.axes)
    for axis in AXES:
        value = rest.pop(axis.attribute, rest.pop(axis.name, None))
        try:
            check_coordinate(axis, value)
        except ValueError as err:
            raise StoreError(f"point {record.point_id!r}: {err}") from None
        setattr(point, axis.attribute, value)
    try:
        check_more(rest)
    except ValueError as err:
        raise StoreError(f"point {record.point_id!r}: {err}") from None
    point.more_axes = rest


def _start(session: Session, record: StartRecord) -> None:
    point = _existing(session, record)
    if not _newer(point, record.attempt, _STARTED, record.at):
        return
    _begin(session, point, record.attempt, PointState.RUNNING, record.at)
    point.node, point.started_at, point.heartbeat_at = record.node, record.at, record.at


def _begin(session: Session, point: Point, attempt: int, state: PointState, at: datetime) -> None:
    """Set a point's state and clear the metrics, route and progress of earlier attempts."""
    with session.no_autoflush:  # a new point still lacks required columns
        session.execute(delete(Metric).where(Metric.point_id == point.id))
    point.state, point.reason, point.state_at, point.attempt = state, None, at, attempt
    point.started_at = point.ended_at = point.heartbeat_at = None
    point.node = point.phase = point.done = point.total = point.rate = None
    point.route, point.environment_id = {}, None


def _outcome(session: Session, record: OutcomeRecord) -> None:
    _refuse_untrue(record)
    point = _existing(session, record)
    newer = _newer(point, record.attempt, _ENDED, record.at)
    _artifacts(session, record)
    if not newer:
        return
    session.execute(delete(Metric).where(Metric.point_id == point.id))
    point.state, point.reason, point.state_at = record.state, _clean(record.reason), record.at
    point.attempt, point.ended_at = record.attempt, record.at
    point.started_at = record.started_at or point.started_at
    point.route, point.environment_id = dict(record.route), _environment(session, record.environment)
    session.flush()
    if record.metrics:
        rows = [
            {**metric.model_dump(), "samples": list(metric.samples), "point_id": point.id} for metric in record.metrics
        ]
        session.execute(insert(Metric), rows)


def _event(session: Session, record: EventRecord) -> None:
    if session.get(Run, record.run_id) is None:
        raise _unknown("run", record.run_id)
    if record.point_id is not None:
        if (point := session.get(Point, record.point_id)) is None:
            raise _unknown("point", record.point_id)
        _of_run(point, record.run_id)
    record = record.model_copy(
        update={"message": _clean(record.message)}
    )  # as stored: its id can be found from the row
    values = {name: getattr(record, name) for name in ("run_id", "point_id", "at", "level", "message")}
    _insert_new(session, Event, {"id": _digest(record.model_dump(mode="json")), **values})


def _artifacts(session: Session, record: OutcomeRecord) -> None:
    """Store the files that an outcome of version 0.1.0 carries; their paths begin in the run's folder."""
    for file in record.artifacts:
        below = file.model_copy(update={"path": f"{record.run_id}/{file.path}"})
        _artifact(session, record.point_id, record.attempt, below)


def _artifact(session: Session, point_id: str, attempt: int, file: ArtifactData) -> None:
    """Store a file of an attempt unless it is stored; files of other attempts stay."""
    file = file.model_copy(update={"name": _clean(file.name)})
    same = (Artifact.point_id == point_id, Artifact.attempt == attempt, Artifact.name == file.name)
    if session.scalar(select(Artifact.id).where(*same)) is not None:
        return
    values: dict[str, Any] = {**file.model_dump(), "point_id": point_id, "attempt": attempt}
    values |= {column: _clean(getattr(file, column)) for column in ("path", "sha256", "content")}
    if (content := values["content"] or "")[:-_STORED_CHARACTERS]:  # of an imported journal
        values |= {"content": content[-_STORED_CHARACTERS:], "truncated": True}
    session.execute(insert(Artifact), [values])


def _series(session: Session, record: SeriesRecord) -> None:
    """Store the samples that are not stored."""
    _existing(session, record)
    same = {"point_id": record.point_id, "attempt": record.attempt, "rank": record.rank}
    same |= {"name": _clean(record.name), "unit": _clean(record.unit)}
    rows = [
        {**same, "step": step, "at": datetime.fromtimestamp(seconds, UTC), "value": value}
        for step, seconds, value in zip(record.steps, record.times, record.values, strict=True)
    ]
    if rows:
        session.execute(_dialect(session).insert(Series).on_conflict_do_nothing(), rows)


def _environment(session: Session, content: dict[str, Any]) -> str | None:
    if not content:
        return None
    name = _digest(content)
    gpu = content.get("gpu")
    gpu = gpu.get("name") if isinstance(gpu, dict) else gpu
    gpu = None if gpu is None else _clean(str(gpu))
    _insert_new(session, Environment, {"id": name, "gpu": gpu, "content": content})
    return name


def _newer(point: Point, attempt: int, stage: int, at: datetime) -> bool:
    """Whether a record is newer than the row, comparing attempt, then stage, then time.

    Before the first attempt there are no stages, so only the time counts (skipped, cancelled, planned again).
    """
    stored = _STAGES.get(point.state, _ENDED) if point.attempt else 0
    return (attempt, stage if attempt else 0, at) > (point.attempt, stored, point.state_at)


def _refuse_untrue(record: OutcomeRecord) -> None:
    if record.metrics and record.state is not PointState.OK:
        raise StoreError(
            f"metrics: point {record.point_id!r} ended {record.state.value!r} with numbers; only 'ok' may carry metrics"
        )
    if not record.state.ended:
        raise StoreError(f"state: {record.state.value!r} of point {record.point_id!r} is no end; send a start instead")
    for metric in record.metrics:
        if not all(math.isfinite(number) for number in (metric.value, *metric.samples)):
            raise StoreError(
                f"metrics: {metric.name!r} of point {record.point_id!r} is not finite; end the point 'error' instead"
            )


def _existing(session: Session, record: StartRecord | OutcomeRecord | ArtifactRecord | SeriesRecord) -> Point:
    """The point of a record, locked. Raises StoreError if it is unknown, or another run's."""
    point = session.get(Point, record.point_id, with_for_update=True)
    if point is None:
        raise _unknown("point", record.point_id)
    _of_run(point, record.run_id)
    return point


def _of_run(point: Point, run_id: str) -> None:
    if point.run_id != run_id:
        raise StoreError(
            f"run_id: {run_id!r}: the point {point.id!r} is of the run {point.run_id!r}; nothing is stored"
        )


def _unknown(what: str, name: str) -> StoreError:
    return StoreError(f"{what}: {name!r} is not in the database; import the whole journal with `nsa import`")


def _insert_new(session: Session, table: type[Event] | type[Environment], values: dict[str, Any]) -> None:
    """Insert a row unless its id exists, even if another writer inserts it concurrently."""
    if session.scalar(select(table.id).where(table.id == values["id"])) is None:
        session.execute(_dialect(session).insert(table).values(values).on_conflict_do_nothing())


def _dialect(session: Session) -> Any:
    """The dialect's module, for statements that both databases have but SQL has not."""
    return postgresql if session.get_bind().dialect.name == "postgresql" else sqlite


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _bounded(count: int | None) -> int | None:
    """The count, within what a column holds."""
    return None if count is None else max(-_MOST, min(count, _MOST))


def _clean(text: str | None) -> str | None:
    """The text without characters that a database rejects: captured output may hold NUL bytes and lone surrogates."""
    if text is None:
        return None
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
