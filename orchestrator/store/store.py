"""An open results database."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.orm import Session

from jobs.schema.states import PointState
from jobs.specs.user_files import is_missing
from orchestrator.database_url import SETTING, StoreError
from orchestrator.store import schema, writer
from orchestrator.store.engine import TIMEOUT_S, errors, make_engine, parse, shown
from orchestrator.store.models import Attempt, Point, Run
from orchestrator.store.records import Record, without_nul

LEASE_S = 60
"""Seconds that a lease on a run lasts."""
RENEW_S = 15.0
"""Seconds after which a driver renews its lease."""
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
                schema.upgrade(url)
            elif is_missing(path):
                raise StoreError(f"{SETTING}: {shown(parsed)!r}: no such file; run a job or `nsa db upgrade` first")
            elif not os.path.isfile(path):  # SQLite would wait for a pipe; False too for a name that is too long
                raise StoreError(f"{SETTING}: {shown(parsed)!r}: is no file that can be read; name another")
        engine = make_engine(parsed, readonly=readonly)
        try:
            with errors(parsed), engine.connect() as connection:
                schema.check(connection)
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
            writer.apply(session, records)

    def beat(
        self,
        run_id: str,
        point_id: str,
        at: datetime,
        phase: str,
        done: int | None = None,
        total: int | None = None,
        rate: float | None = None,
    ) -> None:
        """Store the progress of a running point, ignored in another state. Raises StoreError, StoreUnavailable."""
        of_run = select(Point.id).where(Point.id == point_id, Point.run_id == run_id)
        running = update(Attempt).where(Attempt.point_id.in_(of_run), Attempt.state == PointState.RUNNING)
        progress = {"heartbeat_at": at, "phase": without_nul(phase), "done": done, "total": total, "rate": rate}
        with self.session(writes=True) as session:
            session.execute(running.values(**progress))

    def close(self) -> None:
        self.engine.dispose()

    def __exit__(self, *_: object) -> None:
        self.close()
