"""A results database, open, and how journal records become its rows. Replaying a journal, whole or in part, changes
nothing.

A record only moves a run or an attempt forward, whatever its time says: clocks step back, and differ between hosts. A
run is ordered by its resumptions and, within one, pending, running, ended. An attempt is planned, starts and ends once;
before it starts, a later resumption may plan it anew. A point has the outcome of its newest attempt that has one.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, delete, func, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from jobs.schema.axes import AXES, check_coordinate, check_more
from jobs.schema.quantities import FEWEST_SAMPLES
from jobs.schema.states import PointState, RunState
from jobs.specs.user_files import is_missing
from orchestrator.database_url import SETTING, RunMissingError, StoreError
from orchestrator.store.engine import TIMEOUT_S, check_schema, errors, make_engine, parse, shown, upgrade
from orchestrator.store.models import Artifact, Attempt, Base, DeclaredQuantity, Environment, Event, Point, Run
from orchestrator.store.records import (
    ArtifactRecord,
    EventRecord,
    LabelRecord,
    OutcomeRecord,
    PointRecord,
    Progress,
    Record,
    RunEndRecord,
    RunRecord,
    SeriesRecord,
    StartRecord,
    without_nul,
)

LEASE_S = 60
"""Seconds that a lease on a run lasts."""
RENEW_S = 15.0
"""Seconds after which a driver renews its lease."""
# Tables of many rows: inserted past the ORM's models, which take longer than the database.
_METRICS, _QUANTITIES, _SERIES = (Base.metadata.tables[name] for name in ("metric", "quantity", "series"))
_UNSTARTED = (PointState.PENDING, PointState.SKIPPED, PointState.CANCELLED)
_UNENDED = (PointState.PENDING, PointState.RUNNING)
_LIMIT = text(f"SET LOCAL statement_timeout = '{TIMEOUT_S}s'")  # of a statement that writes


class LeaseHeld(StoreError):  # noqa: N818  (a temporary condition, not a mistake)
    """Another driver measures the run."""


@dataclass(frozen=True, eq=False)
class Store(AbstractContextManager["Store"]):
    """A results database on SQLite or Postgres, opened by `Store.open`; one process writes, any number read."""

    engine: Engine
    readonly: bool

    @classmethod
    def open(cls, url: str, *, create: bool = True, readonly: bool = False) -> Store:
        """Connect to `url` and check that its schema is current. Raises StoreError, StoreUnavailable.

        Creates and migrates a SQLite file if `create` (and not `readonly`); only `nsa db upgrade` migrates Postgres.
        """
        parsed = parse(url)
        if parsed.get_backend_name() == "sqlite":
            path = Path(parsed.database or "").absolute()
            if create and not readonly:
                upgrade(url)
            elif is_missing(path):
                raise StoreError(f"{SETTING}: {shown(parsed)!r}: no such file; run a job or `nsa db upgrade` first")
            elif not os.path.isfile(path):  # SQLite would wait for a pipe; False too for a name that is too long
                raise StoreError(f"{SETTING}: {shown(parsed)!r}: is no file that can be read; name another")
        engine = make_engine(parsed, readonly=readonly)
        try:
            with errors(parsed), engine.connect() as connection:
                check_schema(connection)
        except StoreError:
            engine.dispose()
            raise
        return cls(engine, readonly=readonly)

    @property
    def name(self) -> str:
        """The database's URL without its password, for messages."""
        return shown(self.engine.url)

    @contextmanager
    def session(self, *, writes: bool = False) -> Iterator[Session]:
        """A session in one transaction; `writes` allows changes. Raises StoreError, StoreUnavailable."""
        if writes and self.readonly:
            raise StoreError(f"{SETTING}: {self.name!r}: is open for reading only; open it for writing")
        with errors(self.engine.url):
            engine = self.engine.execution_options(writes=writes)
            with Session(engine, expire_on_commit=False) as session, session.begin():
                if writes and engine.dialect.name == "postgresql":
                    session.execute(_LIMIT)
                yield session

    def take_lease(self, run_id: str) -> None:
        """Take or renew the lease on a run for this process: one driver at a time measures it, whichever host that is
        on. A run that is not in the database yet has none. Raises LeaseHeld, StoreError, StoreUnavailable."""
        with self.session(writes=True) as session:
            run = session.get(Run, run_id, with_for_update=True)
            if run is None:
                return
            # By the server's clock, as those of the drivers' hosts differ.
            sqlite = self.engine.dialect.name == "sqlite"
            now = datetime.now(UTC) if sqlite else session.scalars(select(func.now())).one()
            owner, expires_at = run.lease_owner, run.lease_expires_at
            host, _, pid = (owner or "").rpartition("/")
            # A killed driver's run can be resumed at once, on its host.
            gone = host == socket.gethostname() and not psutil.pid_exists(int(pid))
            own = f"{socket.gethostname()}/{os.getpid()}"
            if owner and expires_at and owner != own and expires_at > now and not gone:
                raise LeaseHeld(
                    f"run: {run_id!r}: is being measured by process {pid} on {host}, whose lease in {self.name} ends "
                    f"at {expires_at:%H:%M:%S} UTC unless it is renewed; wait for its end, or stop it first: "
                    f"nsa cancel {run_id}"
                )
            run.lease_owner, run.lease_expires_at = own, now + timedelta(seconds=LEASE_S)

    def end_lease(self, run_id: str) -> None:
        """End this process's lease on a run. Raises StoreError, StoreUnavailable."""
        with self.session(writes=True) as session:
            own = Run.lease_owner == f"{socket.gethostname()}/{os.getpid()}"
            ended = update(Run).where(Run.id == run_id, own).values(lease_owner=None, lease_expires_at=None)
            session.execute(ended)

    def apply_many(self, records: Iterable[Record]) -> None:
        """Store journal records in one transaction: all of them or none. Raises StoreError, StoreUnavailable."""
        with self.session(writes=True) as session:
            apply(session, records)

    def beat(self, sign: Progress) -> None:
        """Store the progress of a running point, ignored in another state. Raises StoreError, StoreUnavailable."""
        of_run = select(Point.id).where(Point.id == sign.point_id, Point.run_id == sign.run_id)
        running = update(Attempt).where(Attempt.point_id.in_(of_run), Attempt.state == PointState.RUNNING)
        progress = {name: getattr(sign, name) for name in ("done", "total", "rate")}
        with self.session(writes=True) as session:
            session.execute(running.values(heartbeat_at=sign.at, phase=without_nul(sign.phase), **progress))

    def __exit__(self, *_: object) -> None:
        self.engine.dispose()


def apply(session: Session, records: Iterable[Record]) -> None:
    """Write records: in their order from plan to plan, by type between, so that points are read once for many records.

    Raises StoreError if a record is inconsistent or its point unknown, RunMissingError if its run is.
    """
    plans, before = 0, RunRecord

    def plan(record: Record) -> int:
        nonlocal plans, before
        plans += isinstance(record, RunRecord) or (
            isinstance(record, PointRecord) and before not in (RunRecord, PointRecord)
        )
        before = type(record)
        return plans

    for _, same in groupby(records, plan):
        while batch := list(islice(same, 500)):
            for kind, write in _WRITERS.items():
                if ones := [record for record in batch if type(record) is kind]:
                    write(session, ones)
                    session.flush()


def _runs(session: Session, records: Sequence[RunRecord]) -> None:
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


def _run_ends(session: Session, records: Sequence[RunEndRecord]) -> None:
    for record in records:
        run = _run(session, record.run_id, lock=True)
        if _moves(run, record):
            run.state, run.reason, run.resumed = record.state, record.reason, record.resumed
            run.state_at = run.ended_at = record.at


def _labels(session: Session, records: Sequence[LabelRecord]) -> None:
    for record in records:
        run = _run(session, record.run_id, lock=True)
        if run.labelled_at is None or record.at > run.labelled_at:
            run.tags, run.notes, run.labelled_at = " ".join(sorted({*record.tags})), record.notes, record.at


def _moves(run: Run, record: RunRecord | RunEndRecord) -> bool:
    """Whether a record's state of a run is later than the row's: by resumption, then stage, and only then time."""
    later, stage = record.state, {RunState.PENDING: 0, RunState.RUNNING: 1}
    return (record.resumed, stage.get(later, 2), record.at) > (run.resumed, stage.get(run.state, 2), run.state_at)


def _plans(session: Session, records: Sequence[PointRecord]) -> None:
    points = _stored(session, records)
    commits = {run_id: _run(session, run_id).git_commit for run_id in {record.run_id for record in records}}
    for record in records:
        point = points.get(record.point_id)
        if point is None:
            point = points[record.point_id] = Point(id=record.point_id, run_id=record.run_id)
            session.add(point)
        plan_attempt(point, record, commits[record.run_id])


def plan_attempt(point: Point, record: PointRecord, commit: str | None) -> None:
    """Plan an attempt at a point: a new one, or anew by a later resumption while it has not begun."""
    number = record.attempt + 1
    attempt = point.attempts.get(number)
    if attempt is None:
        attempt = point.attempts[number] = Attempt(number=number)
    elif attempt.state not in _UNSTARTED or record.resumed <= attempt.resumed:
        return
    attempt.state, attempt.reason, attempt.resumed = record.state, record.reason, record.resumed
    attempt.settled, attempt.ended_at = record.state.settles, record.at if record.state.ended else None
    attempt.key, attempt.git_commit, attempt.route = record.key, commit, {}
    if number == max(point.attempts):
        point.number, point.label, point.config = record.index, record.label, record.config
        point.estimate_bytes, point.answers = record.estimate_bytes, " ".join(record.answers) or None
        _set_axes(point, record)
    _choose_attempt(point)


def _set_axes(point: Point, record: PointRecord) -> None:
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


def _starts(session: Session, records: Sequence[StartRecord]) -> None:
    points = _existing(session, records)
    for record in records:
        start_attempt(points[record.point_id], record)


def start_attempt(point: Point, record: StartRecord) -> None:
    """Start an attempt at a point, if it waits for that."""
    attempt = _attempt(point, record.attempt)
    if attempt.state is PointState.PENDING:
        attempt.state, attempt.node = PointState.RUNNING, record.node
        attempt.started_at = attempt.heartbeat_at = record.at
        _choose_attempt(point)


def _outcomes(session: Session, records: Sequence[OutcomeRecord]) -> None:
    points = _existing(session, records)
    environments: dict[str, dict[str, Any]] = {}
    for content in (record.environment for record in records if record.environment):
        gpu = content.get("gpu")
        gpu = gpu.get("name") if isinstance(gpu, dict) else gpu
        gpu = None if gpu is None else without_nul(str(gpu))
        environments[_digest(content)] = {"id": _digest(content), "gpu": gpu, "content": content}
    _insert_new(session, Environment, list(environments.values()))
    metrics = []
    for record in records:
        if not end_attempt(points[record.point_id], record):
            continue
        of = {"point_id": record.point_id, "attempt": record.attempt}
        for metric in record.metrics:
            # Journals of 0.1.0 have intervals of any three samples; those of a slope have no samples.
            more = {"ci_low": None, "ci_high": None} if 0 < len(metric.samples) < FEWEST_SAMPLES else {}
            metrics.append({**metric.model_dump(), "samples": list(metric.samples), **of, **more})
    session.flush()
    if metrics:  # with RETURNING, as in `_insert_new`
        session.execute(insert(_METRICS).returning(_METRICS.c.id), metrics)


def end_attempt(point: Point, record: OutcomeRecord) -> bool:
    """End an attempt at a point. Returns whether it had not ended before."""
    attempt = _attempt(point, record.attempt)
    if attempt.state not in _UNENDED:
        return False
    attempt.state, attempt.reason = record.state, record.reason
    attempt.settled = record.final and record.state.settles
    attempt.started_at, attempt.ended_at = record.started_at or attempt.started_at, record.at
    attempt.route = dict(record.route)
    attempt.environment_id = _digest(record.environment) if record.environment else None
    _choose_attempt(point)
    return True


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


def _artifacts(session: Session, records: Sequence[ArtifactRecord]) -> None:
    _existing(session, records)
    files = [{**one.artifact.model_dump(), "point_id": one.point_id, "attempt": one.attempt} for one in records]
    _insert_new(session, Artifact, files)


def _series(session: Session, records: Sequence[SeriesRecord]) -> None:
    """Store the samples; of one step the latest, as a training that goes on from a checkpoint does steps again."""
    _existing(session, records)
    new = (insertion := _dialect(session).insert(_SERIES)).excluded
    upsert = insertion.on_conflict_do_update(
        index_elements=_SERIES.primary_key, set_={"at": new.at, "value": new.value}, where=new.at > _SERIES.c.at
    )
    samples = (
        {**same, "step": step, "at": datetime.fromtimestamp(seconds, UTC), "value": value}
        for record in records
        for same in [{name: getattr(record, name) for name in ("point_id", "attempt", "rank", "name", "unit")}]
        for step, seconds, value in zip(record.steps, record.times, record.values, strict=True)
    )
    while batch := list(islice(samples, 20_000)):  # a record has up to 1,000
        session.execute(upsert, batch)


def _events(session: Session, records: Sequence[EventRecord]) -> None:
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


_OfPoint = PointRecord | StartRecord | OutcomeRecord | ArtifactRecord | SeriesRecord | EventRecord


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
    RunRecord: _runs,
    LabelRecord: _labels,
    PointRecord: _plans,
    StartRecord: _starts,
    OutcomeRecord: _outcomes,
    ArtifactRecord: _artifacts,
    SeriesRecord: _series,
    EventRecord: _events,
    RunEndRecord: _run_ends,
}
