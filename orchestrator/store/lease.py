"""The lease on a run, in the run's row: one driver at a time measures it, whichever host that is on."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime, timedelta

import psutil
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from orchestrator.database_url import StoreError
from orchestrator.store.engine import shown
from orchestrator.store.models import Run

LEASE_S = 60
"""Seconds that a lease lasts."""
RENEW_S = 15.0
"""Seconds after which a driver renews its lease."""


class LeaseHeld(StoreError):  # noqa: N818  (a temporary condition, not a mistake)
    """Another driver measures the run."""


def take(session: Session, run_id: str) -> None:
    """Take or renew the lease on a run; one that is not in the database yet has none. Raises LeaseHeld."""
    run = session.get(Run, run_id, with_for_update=True)
    if run is None:
        return
    now, owner, expires_at = _now(session), run.lease_owner, run.lease_expires_at
    host, _, pid = (owner or "").rpartition("/")
    # A killed driver's run can be resumed at once, on its host.
    gone = host == socket.gethostname() and not psutil.pid_exists(int(pid))
    if owner and expires_at and owner != _own_name() and expires_at > now and not gone:
        raise LeaseHeld(
            f"run: {run_id!r}: is being measured by process {pid} on {host}, whose lease in "
            f"{shown(session.get_bind().engine.url)} ends at {expires_at:%H:%M:%S} UTC unless it is renewed; wait for "
            f"its end, or stop it first: nsa cancel {run_id}"
        )
    run.lease_owner, run.lease_expires_at = _own_name(), now + timedelta(seconds=LEASE_S)


def end(session: Session, run_id: str) -> None:
    """End this process's lease on a run."""
    own = update(Run).where(Run.id == run_id, Run.lease_owner == _own_name())
    session.execute(own.values(lease_owner=None, lease_expires_at=None))


def _own_name() -> str:
    return f"{socket.gethostname()}/{os.getpid()}"


def _now(session: Session) -> datetime:
    """The time by the server's clock, as those of the drivers' hosts differ."""
    if session.get_bind().dialect.name == "sqlite":
        return datetime.now(UTC)
    return session.scalars(select(func.now())).one()
