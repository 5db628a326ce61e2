"""Writers of Postgres beside each other: a locked table ends a write in time; an older record undoes no newer one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from processes import wait_for
from sqlalchemy import text

from jobs.schema.states import RunState
from orchestrator.store import Store, StoreUnavailable, queries, writer
from orchestrator.store.engine import TIMEOUT_S
from orchestrator.store.records import RunEndRecord, RunRecord

RUN = "20261120-120000-demo-abcd"


pytestmark = [pytest.mark.postgres, pytest.mark.parametrize("new_database", ["postgres"], indirect=True)]
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


def test_a_write_that_waits_for_a_lock_ends(store: Store, sweep, monkeypatch: pytest.MonkeyPatch):
    *records, end = sweep(RUN)
    assert isinstance(end, RunEndRecord)
    store.apply_many(records)
    with store.session(writes=True) as session:
        assert session.scalar(text("SHOW statement_timeout")) == f"{TIMEOUT_S}s"
    monkeypatch.setattr("orchestrator.store.store._LIMIT", text("SET LOCAL statement_timeout = 300"))
    with store.engine.connect() as other:
        other.execute(text("SET idle_in_transaction_session_timeout = '60s'"))  # so that this test ends in any case
        other.commit()
        other.execute(text("LOCK TABLE run IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            store.apply(end)
        other.rollback()
    store.apply(end)
    run = queries.run(store, RUN)
    assert run is not None
    assert run["state"] == RunState.DONE


def test_an_end_from_before_a_resumption_that_is_being_stored_does_not_undo_it(store: Store, sweep):
    """As where a journal is imported while its run goes on."""
    run, *_, end = sweep(RUN)
    assert isinstance(run, RunRecord)
    assert isinstance(end, RunEndRecord)
    store.apply(run)
    resumed = run.model_copy(update={"at": end.at + timedelta(hours=1), "resumed": 1})
    own = store.engine.execution_options(isolation_level="AUTOCOMMIT")  # a transaction sees one moment's activity
    with ThreadPoolExecutor() as beside, own.connect() as look:
        with store.session(writes=True) as session:
            writer.apply(session, [resumed])
            late = beside.submit(store.apply, end)
            wait_for(lambda: look.scalar(text(WAITING)) == 1, 20)
        late.result()
    found = queries.run(store, RUN)
    assert found is not None
    assert found["state"] == RunState.RUNNING
