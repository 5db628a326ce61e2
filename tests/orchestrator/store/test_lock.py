"""A table of Postgres that another session has locked: a write ends, and does not wait as long as the other likes."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

from orchestrator.records import RunEndRecord
from orchestrator.states import RunState
from orchestrator.store import Store, StoreUnavailable, queries
from orchestrator.store.engine import BUSY_SECONDS

RUN = "20261120-120000-demo-abcd"


@pytest.mark.parametrize("new_database", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
def test_a_write_that_waits_for_a_lock_ends(store: Store, sweep, monkeypatch: pytest.MonkeyPatch):
    *records, end = sweep(RUN)
    assert isinstance(end, RunEndRecord)
    store.apply_many(records)
    with store.session(writes=True) as session:
        assert session.scalar(text("SHOW statement_timeout")) == f"{BUSY_SECONDS}s"
    monkeypatch.setattr("orchestrator.store.store._LIMIT", text("SET LOCAL statement_timeout = 300"))
    with store.engine.connect() as other:
        other.execute(text("SET idle_in_transaction_session_timeout = '5s'"))  # so that this test ends in any case
        other.commit()
        other.execute(text("LOCK TABLE run IN ACCESS EXCLUSIVE MODE"))
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            store.apply(end)
        assert time.monotonic() - begun < 4
        other.rollback()
    store.apply(end)
    run = queries.run(store, RUN)
    assert run is not None
    assert run["state"] == RunState.DONE
