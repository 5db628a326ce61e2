"""The records of a run as the database has them: a journal from which the same rows can be stored again.

Replayed into an empty database they give the run's rows, except for verdicts (computed from the rest) and the progress
of a running point (`phase`, `done`, `total`), which no journal holds either.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice

from pydantic import TypeAdapter
from sqlalchemy import select
from sqlalchemy.orm import Session

from jobs.schema.axes import AXES, Axis
from jobs.schema.quantities import Quantity
from jobs.schema.states import PointState, RunState
from orchestrator.store.models import (
    Artifact,
    Attempt,
    DeclaredQuantity,
    Environment,
    Event,
    Metric,
    Point,
    Run,
    Series,
)
from orchestrator.store.records import (
    ArtifactData,
    ArtifactRecord,
    EventRecord,
    MetricData,
    OutcomeRecord,
    PointRecord,
    Record,
    RunEndRecord,
    RunRecord,
    SeriesRecord,
    StartRecord,
)
from orchestrator.store.store import Store

_AXES = TypeAdapter(tuple[Axis, ...])
_QUANTITIES = TypeAdapter(tuple[Quantity, ...])
_PIECE = 1000  # samples of a record
_COPIED = RunRecord.model_fields.keys() - {"v", "type", "run_id", "at", "state", "resumed", "quantities", "axes"}


def records(store: Store, run_id: str) -> list[Record]:
    """The records of a run in an order that can be replayed; none if the run is unknown.

    Raises:
        StoreError, StoreUnavailable: the database cannot be read.
    """
    with store.session() as session:
        run = session.get(Run, run_id)
        return [] if run is None else [*_runs(session, run), *_points(session, run), *_rest(session, run)]


def _runs(session: Session, run: Run) -> list[RunRecord]:
    """The beginning of a run; of a resumed one also the latest resumption, at the latest time that it can have had."""
    query = select(DeclaredQuantity).where(DeclaredQuantity.run_id == run.id).order_by(DeclaredQuantity.position)
    declared = _QUANTITIES.validate_python(
        [{name: getattr(row, name) for name in Quantity.__dataclass_fields__} for row in session.scalars(query)]
    )
    first = RunRecord(
        run_id=run.id,
        at=run.created_at,
        quantities=declared,
        axes=_AXES.validate_python(run.axes or ()),
        **{name: getattr(run, name) for name in _COPIED},
    )
    going = run.state if run.state is RunState.PENDING else RunState.RUNNING
    if run.resumed:
        latest = first.model_copy(update={"at": run.state_at, "state": going, "resumed": run.resumed})
        return [first, latest]
    first = first.model_copy(update={"state": going})
    if run.state_at > run.created_at and not run.state.ended:
        return [first, first.model_copy(update={"at": run.state_at})]
    return [first]


def _points(session: Session, run: Run) -> Iterator[Record]:
    for point in session.scalars(select(Point).where(Point.run_id == run.id).order_by(Point.number)):
        for number, attempt in sorted(point.attempts.items()):
            if number == 1 or attempt.resumed > point.attempts[number - 1].resumed:
                yield _planned(run, point, attempt)
            yield from _attempt(session, run, attempt)
        files = select(Artifact).where(Artifact.point_id == point.id).order_by(Artifact.id)
        for row in session.scalars(files):
            file = ArtifactData(**{name: getattr(row, name) for name in ArtifactData.model_fields})
            yield ArtifactRecord(run_id=run.id, at=run.state_at, point_id=point.id, attempt=row.attempt, artifact=file)
        yield from _series(session, point)


def _series(session: Session, point: Point) -> Iterator[SeriesRecord]:
    """The series of all attempts at a point, in pieces."""
    order = (Series.attempt, Series.name, Series.rank, Series.unit)
    query = select(*order, Series.step, Series.at, Series.value).where(Series.point_id == point.id)
    rows = session.execute(query.order_by(*order, Series.step))
    for (attempt, name, rank, unit), samples in groupby(rows, lambda row: (row.attempt, row.name, row.rank, row.unit)):
        while piece := list(islice(samples, _PIECE)):
            yield SeriesRecord(
                run_id=point.run_id,
                at=piece[-1].at,
                point_id=point.id,
                attempt=attempt,
                rank=rank,
                name=name,
                unit=unit,
                steps=tuple(row.step for row in piece),
                times=tuple(round(row.at.timestamp(), 3) for row in piece),
                values=tuple(row.value for row in piece),
            )


def _planned(run: Run, point: Point, attempt: Attempt) -> PointRecord:
    skipped = _skipped(attempt)
    return PointRecord(
        run_id=run.id,
        at=attempt.ended_at if skipped and attempt.ended_at else run.created_at,
        point_id=point.id,
        index=point.number,
        attempt=attempt.number - 1,
        key=attempt.key,
        label=point.label,
        config=point.config,
        axes={**{axis.attribute: getattr(point, axis.attribute) for axis in AXES}, **(point.more_axes or {})},
        estimate_bytes=point.estimate_bytes,
        state=PointState.SKIPPED if skipped else PointState.PENDING,
        reason=attempt.reason if skipped else None,
        resumed=attempt.resumed,
    )


def _attempt(session: Session, run: Run, attempt: Attempt) -> Iterator[Record]:
    """An attempt's start and its outcome, as far as it came."""
    about = {"run_id": run.id, "point_id": attempt.point_id, "attempt": attempt.number}
    if attempt.heartbeat_at is not None:  # set by a start only; without a later sign of progress it is the start's time
        unheard = attempt.phase is None or attempt.started_at is None
        started = attempt.heartbeat_at if unheard else attempt.started_at
        yield StartRecord.model_validate({**about, "at": started, "node": attempt.node})
    if not attempt.state.ended or _skipped(attempt):
        return
    same = (Metric.point_id == attempt.point_id, Metric.attempt == attempt.number)
    metrics = session.scalars(select(Metric).where(*same).order_by(Metric.id))
    environment = session.get(Environment, attempt.environment_id) if attempt.environment_id else None
    yield OutcomeRecord.model_validate(
        {
            **about,
            "at": attempt.ended_at,
            "state": attempt.state,
            "reason": attempt.reason,
            "started_at": attempt.started_at,
            "metrics": [{name: getattr(row, name) for name in MetricData.model_fields} for row in metrics],
            "route": attempt.route,
            "environment": environment.content if environment else {},
            "final": attempt.settled or not attempt.state.settles,
        }
    )


def _skipped(attempt: Attempt) -> bool:
    """Whether it was skipped when it was planned, and not by an outcome."""
    return attempt.state is PointState.SKIPPED and attempt.environment_id is None and attempt.started_at is None


def _rest(session: Session, run: Run) -> Iterator[Record]:
    """The events of a run, by time, and its end."""
    for row in session.scalars(select(Event).where(Event.run_id == run.id).order_by(Event.at, Event.id)):
        values = {name: getattr(row, name) for name in ("run_id", "at", "point_id", "level", "message")}
        yield EventRecord.model_validate(values)
    if run.state.ended:
        yield RunEndRecord(run_id=run.id, at=run.state_at, state=run.state, reason=run.reason, resumed=run.resumed)
