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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
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
from orchestrator.store import records as rec
from orchestrator.store.engine import TIMEOUT_S, check_schema, errors, make_engine, parse, shown, upgrade
from orchestrator.store.models import Artifact, Attempt, Base, DeclaredQuantity, Environment, Event, Point, Run

LEASE_S = 60  # seconds that a lease on a run lasts
RENEW_S = 15.0  # seconds after which a driver renews its lease
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

    def apply_many(self, records: Iterable[rec.Record]) -> None:
        """Store journal records in one transaction: all of them or none. Raises StoreError, StoreUnavailable."""
        with self.session(writes=True) as session:
            apply(session, records)

    def beat(self, sign: rec.Progress) -> None:
        """Store the progress of a running point, ignored in another state. Raises StoreError, StoreUnavailable."""
        of_run = select(Point.id).where(Point.id == sign.point_id, Point.run_id == sign.run_id)
        running = update(Attempt).where(Attempt.point_id.in_(of_run), Attempt.state == PointState.RUNNING)
        progress = {name: getattr(sign, name) for name in ("done", "total", "rate")}
        with self.session(writes=True) as session:
            session.execute(running.values(heartbeat_at=sign.at, phase=rec.without_nul(sign.phase), **progress))

    def __exit__(self, *_: object) -> None:
        self.engine.dispose()


def apply(session: Session, records: Iterable[rec.Record]) -> None:
    """Write records in their order; points are read, and rows of many written, for 500 at a time.

    Raises StoreError if a record is inconsistent or its point unknown, RunMissingError if its run is.
    """
    remaining = iter(records)
    while batch := list(islice(remaining, 500)):
        # Locked: two writers of a run would both go by what the other is about to change.
        named = {record.run_id for record in batch}
        runs: dict[str, Any] = {run_id: session.get(Run, run_id, with_for_update=True) for run_id in sorted(named)}
        ids = {getattr(record, "point_id", None) for record in batch} - {None}
        stored = session.scalars(select(Point).where(Point.id.in_(ids)))
        points: dict[str | None, Any] = {point.id: point for point in stored}
        ended = [record for record in batch if isinstance(record, rec.OutcomeRecord)]
        environments = {_digest(each.environment): each.environment for each in ended if each.environment}
        rows = []
        for key, content in environments.items():
            gpu = content.get("gpu")
            name = gpu.get("name") if isinstance(gpu, dict) else gpu
            rows.append({"id": key, "gpu": None if name is None else rec.without_nul(str(name)), "content": content})
        _insert_new(session, Environment, rows)
        metrics, files, events, series = [], [], [], []
        for record in batch:
            point_id = getattr(record, "point_id", None)
            run, point = runs[record.run_id], points.get(point_id)
            whole = "import the whole journal with `nsa import`"
            if not run and not isinstance(record, rec.RunRecord):
                raise RunMissingError(f"run: {record.run_id!r} is not in the database; {whole}")
            if not point and point_id and not isinstance(record, rec.PointRecord):
                raise StoreError(f"point: {point_id!r} is not in the database; {whole}")
            if point and point.run_id != record.run_id:
                of = f"the point {point_id!r} is of the run {point.run_id!r}"
                raise StoreError(f"run_id: {record.run_id!r}: {of}; nothing is stored")
            match record:
                case rec.RunRecord():
                    runs[record.run_id] = _begin(session, run, record)
                case rec.RunEndRecord() if _moves(run, record):
                    run.state, run.reason, run.resumed = record.state, record.reason, record.resumed
                    run.state_at = run.ended_at = record.at
                case rec.LabelRecord() if run.labelled_at is None or record.at > run.labelled_at:
                    run.tags, run.notes, run.labelled_at = " ".join(sorted({*record.tags})), record.notes, record.at
                case rec.PointRecord():
                    if not point:
                        point = points[point_id] = Point(id=point_id, run_id=run.id)
                        session.add(point)
                    plan_attempt(point, record, run.git_commit)
                case rec.StartRecord():
                    start_attempt(points[point_id], record)
                case rec.OutcomeRecord() if end_attempt(points[point_id], record):
                    for metric in record.metrics:
                        # Journals of 0.1.0 have intervals of any three samples; those of a slope have no samples.
                        few = 0 < len(metric.samples) < FEWEST_SAMPLES
                        row = metric.model_dump() | ({"ci_low": None, "ci_high": None} if few else {})
                        row |= {"point_id": point_id, "attempt": record.attempt, "samples": list(metric.samples)}
                        metrics.append(row)
                case rec.ArtifactRecord():
                    files.append(record.artifact.model_dump() | {"point_id": point_id, "attempt": record.attempt})
                case rec.SeriesRecord():
                    series.append(record)
                case rec.EventRecord():
                    names = ("run_id", "point_id", "at", "level", "message")
                    row = {name: getattr(record, name) for name in names}
                    events.append(row | {"id": _digest(record.model_dump(mode="json"))})
                case _:  # what it reports is older than what is stored
                    pass
        session.flush()
        if metrics:
            session.execute(insert(_METRICS), metrics)
        _insert_new(session, Artifact, files)
        _insert_new(session, Event, events)
        _store_samples(session, series)


def _begin(session: Session, run: Run | None, record: rec.RunRecord) -> Run:
    """Store the beginning of a run, or a later one."""
    if run is None:
        run = Run(id=record.run_id, created_at=record.at)
        session.add(run)
    else:
        if not record.resumed:
            run.created_at = min(run.created_at, record.at)
        if not _moves(run, record):
            return run
    for name in type(record).model_fields.keys() - {"v", "type", "run_id", "at", "state", "quantities", "axes"}:
        setattr(run, name, getattr(record, name))
    run.axes = [asdict(axis) for axis in record.axes]
    run.state, run.reason, run.state_at, run.ended_at = record.state, None, record.at, None
    session.flush()
    session.execute(delete(DeclaredQuantity).where(DeclaredQuantity.run_id == run.id))
    if declared := [asdict(each) | {"run_id": run.id, "position": n} for n, each in enumerate(record.quantities)]:
        session.execute(insert(_QUANTITIES), declared)
    return run


def _moves(run: Run, record: rec.RunRecord | rec.RunEndRecord) -> bool:
    """Whether a record's state of a run is later than the row's: by resumption, then stage, and only then time."""
    later, stage = record.state, {RunState.PENDING: 0, RunState.RUNNING: 1}
    return (record.resumed, stage.get(later, 2), record.at) > (run.resumed, stage.get(run.state, 2), run.state_at)


def plan_attempt(point: Point, record: rec.PointRecord, commit: str | None) -> None:
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


def start_attempt(point: Point, record: rec.StartRecord) -> None:
    """Start an attempt at a point, if it waits for that."""
    attempt = _attempt(point, record.attempt)
    if attempt.state is PointState.PENDING:
        attempt.state, attempt.node = PointState.RUNNING, record.node
        attempt.started_at = attempt.heartbeat_at = record.at
        _choose_attempt(point)


def end_attempt(point: Point, record: rec.OutcomeRecord) -> bool:
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


def _store_samples(session: Session, records: Sequence[rec.SeriesRecord]) -> None:
    """Store samples; of one step the latest, as a training that goes on from a checkpoint does steps again."""
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


def _insert_new(session: Session, table: type[Artifact | Environment | Event], rows: list[dict[str, Any]]) -> None:
    """Insert the rows that do not exist, even if another writer inserts them concurrently."""
    if rows:
        session.execute(_dialect(session).insert(table).on_conflict_do_nothing(), rows)


def _dialect(session: Session) -> Any:
    """The dialect's module, for statements that both databases have but SQL has not."""
    return postgresql if session.get_bind().dialect.name == "postgresql" else sqlite


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]
