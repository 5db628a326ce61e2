"""A Ray job's run before its first point: shown as pending, and how it ended where it never began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from jobs.schema.states import RunState
from orchestrator import terminal
from orchestrator.database_url import StoreError, StoreUnavailable
from orchestrator.run.database_call import SLOW_S, STOP_S, TIMEOUT_S, call_database, never
from orchestrator.store.records import EventRecord, Record, RunEndRecord, RunRecord

if TYPE_CHECKING:
    from orchestrator.store import Store


@contextmanager
def announced(store: Store | None, run: RunRecord) -> Iterator[None]:
    """A context in which a run waits for its cluster: pending in the store, and failed or cancelled if it is left so.

    Args:
        store: None: the run is not shown.
    """
    if store is None:
        yield
        return
    try:
        call_database(store.name, partial(store.apply, _pending(run)), SLOW_S)
    except StoreUnavailable as err:  # what waits can be measured all the same
        terminal.warn(f"warning: {err}; meanwhile the run goes on without being shown there")
    try:
        yield
    except BaseException as err:
        never_began(store, run, err)
        raise


def never_began(store: Store, run: RunRecord, err: BaseException, stopped: Callable[[], str | None] = never) -> None:
    """Store that an announced run failed before its first point, or was stopped.

    Where the database does not take it, that is told: `err` matters more.
    """
    failed = isinstance(err, Exception)
    reason = "\n".join(terminal.mistakes(err)) if failed else "stopped while it waited"
    state = RunState.FAILED if failed else RunState.CANCELLED
    records = [_pending(run), *_end(run, state, reason)]  # it may not have got the first one
    try:
        call_database(store.name, partial(store.apply_many, records), TIMEOUT_S if failed else STOP_S, stopped)
    except StoreError as away:
        terminal.warn(f"warning: {away}; if the run stays pending there: nsa cancel {run.run_id}")


def failed_at_once(store: Store, run: RunRecord, err: Exception) -> None:
    """Store a run that was never announced, because its job was refused. Raises StoreError, StoreUnavailable."""
    store.apply_many([_pending(run), *_end(run, RunState.FAILED, "\n".join(terminal.mistakes(err)))])


def _pending(run: RunRecord) -> RunRecord:
    return run.model_copy(update={"state": RunState.PENDING})


def _end(run: RunRecord, state: RunState, reason: str) -> list[Record]:
    level = "error" if state is RunState.FAILED else "info"
    event = EventRecord(run_id=run.run_id, level=level, message=f"ended before its first point: {reason}")
    return [event, RunEndRecord(run_id=run.run_id, state=state, reason=reason, resumed=run.resumed)]
