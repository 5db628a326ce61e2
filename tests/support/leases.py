"""A lease on a run that another process has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import update

from orchestrator.store import Store
from orchestrator.store.models import Run


def lease_to_another(store: Store, run_id: str, seconds: float = 60) -> None:
    """Let process 77 on host bench2 have the lease for some time from now on."""
    until = datetime.now(UTC) + timedelta(seconds=seconds)
    with store.session(writes=True) as session:
        own = update(Run).where(Run.id == run_id)
        session.execute(own.values(lease_owner="bench2/77", lease_expires_at=until))
