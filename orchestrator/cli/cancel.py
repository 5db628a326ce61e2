"""Cancels a run from outside its driver."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jobs.schema.plain_text import in_a_line
from jobs.schema.states import PointState, RunState
from orchestrator.cli.submission import SubmissionError, stop
from orchestrator.errors import UserError
from orchestrator.settings import Settings
from orchestrator.store import Store, queries
from orchestrator.store.journal import NAME, Journal, JournalError, JournalHeld, held, owner, read
from orchestrator.store.lease import LeaseHeld
from orchestrator.store.records import OutcomeRecord, Record, RunEndRecord

_REASON = "cancelled by nsa cancel"


class CancelError(UserError):
    """The run cannot be cancelled from here. One line: field, value, fix."""


def cancel_run(settings: Settings, store: Store, run_id: str) -> str:
    """Stop the run's Ray job; if its driver is gone already, mark its unfinished points as cancelled.

    Returns:
        One line for the user: what was done.

    Raises:
        CancelError: the driver is alive but cannot be stopped as a Ray job.
    """
    run = queries.run(store, run_id)
    assert run is not None, "the caller looked the run up"
    if RunState(run["state"]).ended:
        return f"{run_id} has ended already: {run['state']}"
    job = run["submission_id"]
    try:
        if job and stop(settings, str(job)):
            return f"stopping {run_id} (job {job}); its remaining points end as cancelled"
    except SubmissionError as err:
        gone = f"its job could not be asked to stop ({err})"
    else:
        gone = "its job has ended" if job else "it was not run as a Ray job"
    left, note = _mark_cancelled(store, run)
    return f"{gone}; marked {left} unfinished points of {run_id} as cancelled{note}"


def _own_journal(run: dict[str, Any]) -> tuple[Path | None, str]:
    """The run's journal, if it is on this machine; else None, and what to tell of another file in its place.

    The path is the database's, so that of any imported journal: the file there may be anything.
    """
    path = Path(run["artifacts"] or "") / NAME
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None, ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as err:  # Path.is_file raises it, too
        return None, f" in the database alone: {in_a_line(path)} cannot be looked at ({err.strerror})"
    try:
        found = owner(path)
    except JournalError as err:
        return None, f" in the database alone: {in_a_line(err)}"
    if found == run["run_id"]:
        return path, ""
    of = f"is of the run {found!r}" if found else "has no record"
    return None, f" in the database alone: {in_a_line(path)} {of}, so it stays as it is"


def _mark_cancelled(store: Store, run: dict[str, Any]) -> tuple[int, str]:
    """Cancel the unfinished points in journal and store. Returns their number, and a note for the user."""
    run_id = run["run_id"]
    path, note = _own_journal(run)
    try:
        # Who gets the lease, and the lock of the journal where that is here, knows that no driver is alive.
        with store.lease(run_id), _locked(path) as journal:
            if journal is not None:
                store.apply_each(read(journal.path))  # the database may have missed some
            records = _unfinished(store, run_id)
            if journal is not None:
                journal.append(records)
            elif path is not None:
                note = f" in the database alone: {in_a_line(path)} cannot be written"
            store.apply_many(records)
    except (JournalHeld, LeaseHeld):
        host = run["host"] or "its host"
        raise CancelError(
            f"RUN: {run_id!r}: its driver is alive on {host}; interrupt it there with Ctrl-C, or stop its Ray job"
        ) from None
    return sum(isinstance(record, OutcomeRecord) for record in records), note


@contextmanager
def _locked(path: Path | None) -> Iterator[Journal | None]:
    """The journal at `path`, locked; None where it cannot be written. Raises JournalHeld."""
    with ExitStack() as stack:
        try:
            journal = stack.enter_context(Journal(path)) if path else None
        except JournalHeld:
            raise
        except JournalError as err:
            if path and held(path):
                raise JournalHeld(str(err)) from None
            journal = None
        yield journal


def _unfinished(store: Store, run_id: str) -> list[Record]:
    run = queries.run(store, run_id)
    assert run is not None, "the caller looked the run up"
    if RunState(run["state"]).ended:  # as its journal says
        return []
    outcomes = [
        OutcomeRecord(
            run_id=run_id,
            point_id=attempt["point_id"],
            attempt=attempt["number"],
            state=PointState.CANCELLED,
            reason=_REASON,
        )
        for attempt in queries.unended_attempts(store, run_id).to_dict("records")
    ]
    return [*outcomes, RunEndRecord(run_id=run_id, state=RunState.CANCELLED, reason=_REASON, resumed=run["resumed"])]
