"""Writes journal records as rows. Replaying a journal, whole or in part, changes nothing.

A record only moves a run or an attempt forward, whatever its time says: clocks step back, and differ between hosts. A
run is ordered by its resumptions and, within one, pending, running, ended. An attempt is planned, starts and ends once;
before it starts, a later resumption may plan it anew. A point has the outcome of its newest attempt that has one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby, islice
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from jobs.schema.axes import AXES, check_coordinate, check_more
from jobs.schema.quantities import FEWEST_SAMPLES
from jobs.schema.states import PointState, RunState
from orchestrator.database_url import RunMissingError, StoreError
from orchestrator.store import records as rec
from orchestrator.store.models import Artifact, Attempt, Base, DeclaredQuantity, Environment, Event, Point, Run

# Tables of many rows: inserted past the ORM's models, which take longer than the database.
_METRICS, _QUANTITIES, _SERIES = (Base.metadata.tables[name] for name in ("metric", "quantity", "series"))
_UNSTARTED = (PointState.PENDING, PointState.SKIPPED, PointState.CANCELLED)
_UNENDED = (PointState.PENDING, PointState.RUNNING)


def apply(session: Session, records: Iterable[rec.Record]) -> None:
    """Write records in their order; those of one type that follow each other are written together.

    Raises StoreError if a record is inconsistent or its point unknown, RunMissingError if its run is.
    """
    for kind, same in groupby(records, type):
        most = 50 if kind is rec.SeriesRecord else 500  # at once: a piece of a series has up to 1,000 samples
        while batch := list(islice(same, most)):
            _WRITERS[kind](session, batch)
            session.flush()


def _runs(session: Session, records: Sequence[rec.RunRecord]) -> None:
    for record in records:
        run = session.get(Run, record.run_id, with_for_update=True)
        if run is None:
            run = Run(id=record.run_id, created_at=record.at)
            session.add(run)
        else:
            if not record.resumed:
                run.created_at = min(run.created_at, record.at)
            if not _moves(run, record):
                continue
        for name in type(record).model_fields.keys() - {"v", "type", "run_id", "at", "state", "quantities", "axes"}:
            setattr(run, name, getattr(record, name))
        run.axes = [asdict(axis) for axis in record.axes]
        run.state, run.reason, run.state_at, run.ended_at = record.state, None, record.at, None
        session.flush()
        session.execute(delete(DeclaredQuantity).where(DeclaredQuantity.run_id == run.id))
        if declared := [asdict(each) | {"run_id": run.id, "position": n} for n, each in enumerate(record.quantities)]:
            session.execute(insert(_QUANTITIES), declared)


def _run_ends(session: Session, records: Sequence[rec.RunEndRecord]) -> None:
    for record in records:
        run = _run(session, record.run_id, lock=True)
        if _moves(run, record):
            run.state, run.reason, run.resumed = record.state, record.reason, record.resumed
            run.state_at = run.ended_at = record.at


def _moves(run: Run, record: rec.RunRecord | rec.RunEndRecord) -> bool:
    """Whether a record's state of a run is later than the row's: by resumption, then stage, and only then time."""
    later, stage = record.state, {RunState.PENDING: 0, RunState.RUNNING: 1}
    return (record.resumed, stage.get(later, 2), record.at) > (run.resumed, stage.get(run.state, 2), run.state_at)


def _plans(session: Session, records: Sequence[rec.PointRecord]) -> None:
    points = _stored(session, records)
    commits = {run_id: _run(session, run_id).git_commit for run_id in {record.run_id for record in records}}
    for record in records:
        point = points.get(record.point_id)
        if point is None:
            point = points[record.point_id] = Point(id=record.point_id, run_id=record.run_id)
            session.add(point)
        number = record.attempt + 1
        attempt = point.attempts.get(number)
        if attempt is None:
            attempt = point.attempts[number] = Attempt(number=number)
        elif attempt.state not in _UNSTARTED or record.resumed <= attempt.resumed:
            continue
        attempt.state, attempt.reason, attempt.resumed = record.state, record.reason, record.resumed
        attempt.settled, attempt.ended_at = record.state.settles, record.at if record.state.ended else None
        attempt.key, attempt.git_commit = record.key, commits[record.run_id]
        attempt.route = {}
        if number == max(point.attempts):
            point.number, point.label, point.config = record.index, record.label, record.config
            point.estimate_bytes = record.estimate_bytes
            _set_axes(point, record)
        _choose_attempt(point)


def _set_axes(point: Point, record: rec.PointRecord) -> None:
    """Set the point's axes. A length or batch of 0 is refused: the views divide by the batch, and fits take logs."""
    more = dict(record.axes)
    try:
        for axis in AXES:
            value = more.pop(axis.attribute, more.pop(axis.name, None))
            check_coordinate(axis, value)
            setattr(point, axis.attribute, value)
        check_more(more)
    except ValueError as err:
        raise StoreError(f"point {record.point_id!r}: {err}") from None
    point.more_axes = more


def _starts(session: Session, records: Sequence[rec.StartRecord]) -> None:
    points = _existing(session, records)
    for record in records:
        point = points[record.point_id]
        attempt = _attempt(point, record.attempt)
        if attempt.state is PointState.PENDING:
            attempt.state, attempt.node = PointState.RUNNING, record.node
            attempt.started_at = attempt.heartbeat_at = record.at
            _choose_attempt(point)


def _outcomes(session: Session, records: Sequence[rec.OutcomeRecord]) -> None:
    points = _existing(session, records)
    environments: dict[str, dict[str, Any]] = {}
    for content in (record.environment for record in records if record.environment):
        gpu = content.get("gpu")
        gpu = gpu.get("name") if isinstance(gpu, dict) else gpu
        gpu = None if gpu is None else rec.without_nul(str(gpu))
        environments[_digest(content)] = {"id": _digest(content), "gpu": gpu, "content": content}
    _insert_new(session, Environment, list(environments.values()))
    metrics = []
    for record in records:
        point = points[record.point_id]
        attempt = _attempt(point, record.attempt)
        if attempt.state not in _UNENDED:
            continue
        attempt.state, attempt.reason = record.state, record.reason
        attempt.settled = record.final and record.state.settles
        attempt.started_at, attempt.ended_at = record.started_at or attempt.started_at, record.at
        attempt.route = dict(record.route)
        attempt.environment_id = _digest(record.environment) if record.environment else None
        _choose_attempt(point)
        of = {"point_id": record.point_id, "attempt": record.attempt}
        for metric in record.metrics:
            # Journals of 0.1.0 have intervals of any three samples; those of a slope have no samples.
            more = {"ci_low": None, "ci_high": None} if 0 < len(metric.samples) < FEWEST_SAMPLES else {}
            metrics.append({**metric.model_dump(), "samples": list(metric.samples), **of, **more})
    session.flush()
    if metrics:  # with RETURNING, as in `_insert_new`
        session.execute(insert(_METRICS).returning(_METRICS.c.id), metrics)


def _attempt(point: Point, number: int) -> Attempt:
    """The attempt at a point. A retry within a run has no plan of its own, but that of the attempt before it."""
    if number not in point.attempts:
        before = point.attempts[max(point.attempts)]
        same = {"key": before.key, "resumed": before.resumed, "git_commit": before.git_commit}
        point.attempts[number] = Attempt(number=number, state=PointState.PENDING, settled=False, route={}, **same)
    return point.attempts[number]


def _choose_attempt(point: Point) -> None:
    """Let the newest attempt with an outcome count; without any, the newest."""
    settled = [number for number, attempt in point.attempts.items() if attempt.settled]
    point.attempt = max(settled or point.attempts)


def _artifacts(session: Session, records: Sequence[rec.ArtifactRecord]) -> None:
    _existing(session, records)
    files = [{**one.artifact.model_dump(), "point_id": one.point_id, "attempt": one.attempt} for one in records]
    _insert_new(session, Artifact, files)


def _series(session: Session, records: Sequence[rec.SeriesRecord]) -> None:
    """Store the samples; of one step the latest, as a training that goes on from a checkpoint does steps again."""
    _existing(session, records)
    samples = []
    for record in records:
        same = {name: getattr(record, name) for name in ("point_id", "attempt", "rank", "name", "unit")}
        for step, seconds, value in zip(record.steps, record.times, record.values, strict=True):
            samples.append({**same, "step": step, "at": datetime.fromtimestamp(seconds, UTC), "value": value})
    if samples:
        insertion = _dialect(session).insert(_SERIES)
        new = insertion.excluded
        session.execute(
            insertion.on_conflict_do_update(
                index_elements=_SERIES.primary_key, set_={"at": new.at, "value": new.value}, where=new.at > _SERIES.c.at
            ),
            samples,
        )


def _events(session: Session, records: Sequence[rec.EventRecord]) -> None:
    for run_id in {record.run_id for record in records}:
        _run(session, run_id)
    _existing(session, [record for record in records if record.point_id is not None])
    names = ("run_id", "point_id", "at", "level", "message")
    events = {_digest(one.model_dump(mode="json")): {name: getattr(one, name) for name in names} for one in records}
    _insert_new(session, Event, [{"id": key, **columns} for key, columns in events.items()])


def _insert_new(session: Session, table: type[Artifact | Environment | Event], rows: list[dict[str, Any]]) -> None:
    """Insert the rows that do not exist, even if another writer inserts them concurrently."""
    if rows:
        # With RETURNING, SQLAlchemy sends many rows in a statement; psycopg's executemany sends a statement a row.
        session.execute(_dialect(session).insert(table).on_conflict_do_nothing().returning(table.id), rows)


_OfPoint = (
    rec.PointRecord | rec.StartRecord | rec.OutcomeRecord | rec.ArtifactRecord | rec.SeriesRecord | rec.EventRecord
)


def _stored(session: Session, records: Sequence[_OfPoint]) -> dict[str, Point]:
    """The points of records that are stored, by id, locked in a journal's order: else two writers might wait for each
    other. Raises StoreError if one is another run's."""
    named = select(Point).where(Point.id.in_({record.point_id for record in records}))
    locked = named.order_by(Point.run_id, Point.number).with_for_update()
    points = {point.id: point for point in session.scalars(locked)}
    for record in records:
        point = points.get(record.point_id or "")
        if point is not None and point.run_id != record.run_id:
            raise StoreError(
                f"run_id: {record.run_id!r}: the point {point.id!r} is of the run {point.run_id!r}; nothing is stored"
            )
    return points


def _existing(session: Session, records: Sequence[_OfPoint]) -> dict[str, Point]:
    """The points of records, locked. Raises StoreError if one is unknown or another run's, RunMissingError."""
    points = _stored(session, records)
    for record in records:
        if record.point_id not in points:
            _run(session, record.run_id)
            raise StoreError(
                f"point: {record.point_id!r} is not in the database; import the whole journal with `nsa import`"
            )
    return points


def _run(session: Session, run_id: str, *, lock: bool = False) -> Run:
    """A run that is stored. Raises RunMissingError."""
    run = session.get(Run, run_id, with_for_update=lock)
    if run is None:
        raise RunMissingError(f"run: {run_id!r} is not in the database; import the whole journal with `nsa import`")
    return run


def _dialect(session: Session) -> Any:
    """The dialect's module, for statements that both databases have but SQL has not."""
    return postgresql if session.get_bind().dialect.name == "postgresql" else sqlite


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


_WRITERS: dict[type, Callable[[Session, list[Any]], None]] = {
    rec.RunRecord: _runs,
    rec.PointRecord: _plans,
    rec.StartRecord: _starts,
    rec.OutcomeRecord: _outcomes,
    rec.ArtifactRecord: _artifacts,
    rec.SeriesRecord: _series,
    rec.EventRecord: _events,
    rec.RunEndRecord: _run_ends,
}
