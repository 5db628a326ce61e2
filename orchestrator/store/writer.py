"""Writes journal records as rows. Replaying a journal, whole or in part, changes nothing.

A record only moves a run or a point forward: its attempt, the number of the run's resumption, its stage and only then
its time are compared with the stored ones, as clocks step back and differ between hosts. A point that is measured
again keeps its outcome until it has a new one; meanwhile its records move its remeasurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby, islice
from typing import Any, cast

from sqlalchemy import Table, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from jobs.schema.quantities import SHARED, Quantity
from jobs.schema.states import PointState, RunState
from orchestrator.database_url import RunMissingError, StoreError
from orchestrator.store import rows
from orchestrator.store.models import (
    Artifact,
    DeclaredQuantity,
    Environment,
    Event,
    Metric,
    Point,
    Remeasurement,
    Run,
    Series,
    Verdict,
)
from orchestrator.store.records import (
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

# Tables of many rows: inserted past the ORM's models, which take longer than the database.
_METRICS, _QUANTITIES, _SERIES = (cast(Table, model.__table__) for model in (Metric, DeclaredQuantity, Series))

# Stages of an attempt, in order: started, ended, and planned again afterwards.
_STARTED, _ENDED, _PLANNED = range(3)
_STORED_CHARACTERS = 2 * STORED_BYTES  # of a text's kept end, in which a NUL is written as two
_MOST = (1 << 63) - 1
_BATCH = 500  # points, or events
_PIECES = 50  # records of a live series, with up to 1,000 samples each
_RUN_STAGES = {RunState.PENDING: 0, RunState.RUNNING: 1}
_RUN_ENDED = 2
_STAGES = {PointState.RUNNING: _STARTED, PointState.PENDING: _PLANNED, PointState.SKIPPED: _PLANNED}


def apply(session: Session, record: Record) -> None:
    """Write one record.

    Raises:
        StoreError: it is inconsistent (metrics of a failed point), or its point is unknown.
        RunMissingError: its run is unknown.
    """
    match record:
        case RunRecord():
            _run(session, record)
        case PointRecord():
            _points(session, [record])
        case StartRecord():
            _start(session, record)
        case OutcomeRecord():
            _outcome(session, record)
        case ArtifactRecord():
            _existing(session, record)
            _artifact(session, record.point_id, record.attempt, record.artifact)
        case SeriesRecord():
            _series(session, [record])
        case EventRecord():
            _events(session, [record])
        case RunEndRecord():
            _run_end(session, record)
    session.flush()


def apply_all(session: Session, records: Iterable[Record]) -> None:
    """Write records in their order; points, events or samples that follow each other at once. Raises as `apply`."""
    for kind, some in groupby(records, type):
        if kind is EventRecord:
            while events := [record for record in islice(some, _BATCH) if isinstance(record, EventRecord)]:
                _events(session, events)
        elif kind is SeriesRecord:
            while pieces := [record for record in islice(some, _PIECES) if isinstance(record, SeriesRecord)]:
                _series(session, pieces)
        elif kind is PointRecord:
            while points := [record for record in islice(some, _BATCH) if isinstance(record, PointRecord)]:
                _points(session, points)
                session.flush()
        else:
            for record in some:
                apply(session, record)


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
    told = {"heartbeat_at": at, "phase": rows.clean(phase), "done": _bounded(done), "total": _bounded(total)}
    of_run = select(Point.id).where(Point.id == point_id, Point.run_id == run_id)
    for table, column in ((Point, Point.id), (Remeasurement, Remeasurement.point_id)):
        running = update(table).where(column.in_(of_run), table.state == PointState.RUNNING)
        session.execute(running.values(**told, rate=rate))


def add_verdicts(session: Session, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Add verdicts, one mapping of columns a rule."""
    session.execute(insert(Verdict), [dict(columns) for columns in verdicts])


def insert_new(session: Session, table: type[Event] | type[Environment], new: list[dict[str, Any]]) -> None:
    """Insert the rows whose ids do not exist, even if another writer inserts them concurrently."""
    stored = set(session.scalars(select(table.id).where(table.id.in_([values["id"] for values in new]))))
    if missing := [values for values in new if values["id"] not in stored]:
        # With RETURNING, SQLAlchemy sends many rows in a statement; psycopg's executemany sends a statement a row.
        session.execute(_dialect(session).insert(table).on_conflict_do_nothing().returning(table.id), missing)


def _run(session: Session, record: RunRecord) -> None:
    run = session.get(Run, record.run_id, with_for_update=True)
    if run is not None:
        if not record.resumed:
            run.created_at = min(run.created_at, record.at)
        if not _later(run, record.resumed, record.state, record.at):
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
    values = [{"run_id": run_id, "position": place, **asdict(quantity)} for place, quantity in enumerate(declared)]
    if values:
        session.execute(insert(_QUANTITIES), values)


def _run_end(session: Session, record: RunEndRecord) -> None:
    run = session.get(Run, record.run_id, with_for_update=True)
    if run is None:
        raise _missing(record.run_id)
    if record.resumed is None:
        later = record.at >= run.state_at
    else:
        later = _later(run, record.resumed, record.state, record.at)
    if later:
        run.state, run.reason = record.state, rows.clean(record.reason)
        run.state_at = run.ended_at = record.at
        run.resumed = max(run.resumed, record.resumed or 0)


def _later(run: Run, resumed: int, state: RunState, at: datetime) -> bool:
    """Whether a record's state of a run is later than the row's, comparing resumption, then stage, then time."""
    stage, stored = (_RUN_STAGES.get(each, _RUN_ENDED) for each in (state, run.state))
    return (resumed, stage, at) > (run.resumed, stored, run.state_at)


def _points(session: Session, records: Sequence[PointRecord]) -> None:
    """Plan points. Stored ones are locked in a journal's order: else two writers might wait for each other."""
    named = select(Point).where(Point.id.in_({record.point_id for record in records}))
    locked = named.order_by(Point.run_id, Point.number).with_for_update()
    stored = {point.id: point for point in session.scalars(locked)}
    for run_id in {record.run_id for record in records if record.point_id not in stored}:
        if session.get(Run, run_id) is None:
            raise _missing(run_id)
    for record in records:
        stored[record.point_id] = _point(session, record, stored.get(record.point_id))


def _point(session: Session, record: PointRecord, point: Point | None) -> Point:
    if point is None:
        point = Point(id=record.point_id, run_id=record.run_id)
        rows.reach(point, record)
        rows.plan(point, record)
        session.add(point)
        return point
    _of_run(point, record.run_id)
    again = session.get(Remeasurement, point.id)
    if not _newer(again or point, record.attempt, _PLANNED, record.at, record.resumed or 0):
        if point.resumed == (record.resumed or 0):  # the plan that it follows
            rows.plan(point, record)
        return point
    if point.state.settles and record.state is PointState.PENDING:
        again = again or Remeasurement(point_id=point.id)
        rows.plan_again(again, record)
        session.add(again)
        return point
    _forget(session, point, again)
    rows.reach(point, record)
    rows.plan(point, record)
    return point


def _start(session: Session, record: StartRecord) -> None:
    point = _existing(session, record)
    again = session.get(Remeasurement, point.id)
    if not _newer(again or point, record.attempt, _STARTED, record.at):
        return
    if again is None and point.state is PointState.OK:  # no other point has metrics
        _forget(session, point, again)
    rows.start(again or point, record)


def _forget(session: Session, point: Point, again: Remeasurement | None) -> None:
    """Remove the metrics of a point's earlier attempts, and the one after them."""
    session.execute(delete(Metric).where(Metric.point_id == point.id))
    if again is not None:
        session.delete(again)
        session.flush()  # else the next record would find it


def _outcome(session: Session, record: OutcomeRecord) -> None:
    rows.refuse_untrue(record)
    point = _existing(session, record)
    again = session.get(Remeasurement, point.id)
    newer = _newer(again or point, record.attempt, _ENDED, record.at, record.resumed)
    _artifacts(session, record)
    if not newer:
        return
    if again is not None and not record.settles:
        rows.end_without_outcome(again, record)
        return
    _forget(session, point, again)
    if again is not None:
        rows.take_over(point, again)
    if record.environment:
        insert_new(session, Environment, [rows.environment(record.environment)])
    rows.end(point, record)
    session.flush()
    if record.metrics:
        session.execute(insert(_METRICS), rows.metrics(record))


def _events(session: Session, records: Sequence[EventRecord]) -> None:
    for run_id, point_id in {(record.run_id, record.point_id) for record in records}:
        if session.get(Run, run_id) is None:
            raise _missing(run_id)
        if point_id is not None:
            if (point := session.get(Point, point_id)) is None:
                raise _unknown(point_id)
            _of_run(point, run_id)
    insert_new(session, Event, [rows.event(record) for record in records])


def _artifacts(session: Session, record: OutcomeRecord) -> None:
    """Store the files that an outcome of version 0.1.0 carries; their paths begin in the run's folder."""
    for file in record.artifacts:
        below = file.model_copy(update={"path": f"{record.run_id}/{file.path}"})
        _artifact(session, record.point_id, record.attempt, below)


def _artifact(session: Session, point_id: str, attempt: int, file: ArtifactData) -> None:
    """Store a file of an attempt unless it is stored; files of other attempts stay."""
    file = file.model_copy(update={"name": rows.clean(file.name)})
    same = (Artifact.point_id == point_id, Artifact.attempt == attempt, Artifact.name == file.name)
    if session.scalar(select(Artifact.id).where(*same)) is not None:
        return
    values: dict[str, Any] = {**file.model_dump(), "point_id": point_id, "attempt": attempt}
    values |= {column: rows.clean(getattr(file, column)) for column in ("path", "sha256", "content")}
    if (content := values["content"] or "")[:-_STORED_CHARACTERS]:  # of an imported journal
        values |= {"content": content[-_STORED_CHARACTERS:], "truncated": True}
    session.execute(insert(Artifact), [values])


def _series(session: Session, records: Sequence[SeriesRecord]) -> None:
    """Store the samples; of one step the latest, as a training that goes on from a checkpoint does steps again."""
    for record in {(record.run_id, record.point_id): record for record in records}.values():
        _existing(session, record)
    if samples := [sample for record in records for sample in _samples(record)]:
        insertion = _dialect(session).insert(_SERIES)
        told = insertion.excluded
        session.execute(
            insertion.on_conflict_do_update(
                index_elements=_SERIES.primary_key,
                set_={"at": told.at, "value": told.value},
                where=told.at > _SERIES.c.at,
            ),
            samples,
        )


def _samples(record: SeriesRecord) -> Iterator[dict[str, Any]]:
    same = {"point_id": record.point_id, "attempt": record.attempt, "rank": record.rank}
    same |= {"name": rows.clean(record.name), "unit": rows.clean(record.unit)}
    for step, seconds, value in zip(record.steps, record.times, record.values, strict=True):
        yield {**same, "step": step, "at": datetime.fromtimestamp(seconds, UTC), "value": value}


def _newer(row: Point | Remeasurement, attempt: int, stage: int, at: datetime, resumed: int | None = None) -> bool:
    """Whether a record is newer than the row; `resumed`: of the beginning that it is of, None where it does not say."""
    stored = _STAGES.get(row.state, _ENDED)
    number = row.resumed if resumed is None else resumed
    return _place(attempt, stage, number, at) > _place(row.attempt, stored, row.resumed, row.state_at)


def _place(attempt: int, stage: int, resumed: int, at: datetime) -> tuple[int, int, int, datetime]:
    """The place in a point's life: by attempt, then by stage, plans by resumption, and only then by time.

    Before the first attempt each resumption has a plan, and may have an end (cancelled) after it.
    """
    if not attempt:
        return attempt, resumed, int(stage == _ENDED), at
    return attempt, stage, resumed if stage == _PLANNED else 0, at


def _existing(session: Session, record: StartRecord | OutcomeRecord | ArtifactRecord | SeriesRecord) -> Point:
    """The point of a record, locked. Raises StoreError if it is unknown, or another run's, RunMissingError."""
    point = session.get(Point, record.point_id, with_for_update=True)
    if point is None and session.get(Run, record.run_id) is None:
        raise _missing(record.run_id)
    if point is None:
        raise _unknown(record.point_id)
    _of_run(point, record.run_id)
    return point


def _of_run(point: Point, run_id: str) -> None:
    if point.run_id != run_id:
        raise StoreError(
            f"run_id: {run_id!r}: the point {point.id!r} is of the run {point.run_id!r}; nothing is stored"
        )


def _missing(run_id: str) -> RunMissingError:
    return RunMissingError(f"run: {run_id!r} is not in the database; import the whole journal with `nsa import`")


def _unknown(point_id: str) -> StoreError:
    return StoreError(f"point: {point_id!r} is not in the database; import the whole journal with `nsa import`")


def _dialect(session: Session) -> Any:
    """The dialect's module, for statements that both databases have but SQL has not."""
    return postgresql if session.get_bind().dialect.name == "postgresql" else sqlite


def _bounded(count: int | None) -> int | None:
    """The count, within what a column holds."""
    return None if count is None else max(-_MOST, min(count, _MOST))
