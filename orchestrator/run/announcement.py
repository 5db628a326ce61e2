"""A Ray job's run before its first point: shown as pending, and how it ended where it never began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from orchestrator import terminal
from orchestrator.database_url import StoreUnavailable
from orchestrator.records import EventRecord, Record, RunEndRecord, RunRecord
from orchestrator.states import RunState

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
    with suppress(StoreUnavailable):  # what waits can be measured all the same
        store.apply(run.model_copy(update={"state": RunState.PENDING}))
    try:
        yield
    except BaseException as err:
        never_began(store, run, err)
        raise


def never_began(store: Store, run: RunRecord, err: BaseException) -> None:
    """Store that an announced run failed before its first point, or was stopped."""
    failed = isinstance(err, Exception)
    reason = "\n".join(terminal.mistakes(err)) if failed else "stopped while it waited"
    state = RunState.FAILED if failed else RunState.CANCELLED
    with suppress(StoreUnavailable):
        store.apply_many(_end(run, state, reason))


def failed_at_once(store: Store, run: RunRecord, err: Exception) -> None:
    """Store a run that was never announced, because its job was refused. Raises StoreError, StoreUnavailable."""
    begun = run.model_copy(update={"state": RunState.PENDING})
    store.apply_many([begun, *_end(run, RunState.FAILED, "\n".join(terminal.mistakes(err)))])


def _end(run: RunRecord, state: RunState, reason: str) -> list[Record]:
    level = "error" if state is RunState.FAILED else "info"
    event = EventRecord(run_id=run.run_id, level=level, message=f"ended before its first point: {reason}")
    return [event, RunEndRecord(run_id=run.run_id, state=state, reason=reason, resumed=run.resumed)]
