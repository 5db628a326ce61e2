"""Opens a run to be resumed: what its journal says counts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.schema.states import Origin
from orchestrator.errors import UserError
from orchestrator.run import plan
from orchestrator.run.plan import History
from orchestrator.store import Store, journal, queries
from orchestrator.store.journal import Journal, JournalError
from orchestrator.store.records import RunRecord

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def begun(run_id: str, artifacts: Path) -> RunRecord:
    """The latest beginning of a run, from its journal in a folder of runs.

    Raises UserError: it has no journal there, or was not measured here; JournalError: the journal is damaged.
    """
    path = artifacts / run_id / journal.NAME
    if not _RUN_ID.fullmatch(run_id) or not os.path.isfile(path):  # Path.is_file raises for a long name
        latest = sorted(entry.parent.name for entry in artifacts.glob(f"*/{journal.NAME}"))[-3:]
        known = f"the latest there are {', '.join(latest)}" if latest else "there is none yet"
        raise UserError(
            f"--resume: {run_id!r}: no journal of this run in {artifacts}; {known}; if the database has the run, "
            f"restore its journal first: nsa export {run_id} --journal"
        )
    history = _history(path)
    if history.run.origin is not Origin.MEASURED:
        raise UserError(f"--resume: {run_id!r}: was reported by others, not measured; name a run that was")
    if not history.run.spec:
        raise UserError(f"--resume: {run_id!r}: its order was refused, it has nothing to go on with; submit a new run")
    return history.run


@contextmanager
def opened(run_id: str, folder: Path) -> Iterator[tuple[Journal, History]]:
    """The journal in a run's folder, locked, and the history that it has.

    Raises UserError: it ends before the run began; JournalError: it is damaged, another run's, or being written.
    """
    path = folder / journal.NAME
    with Journal(path) as book:
        history = _history(path)
        if history.run.run_id != run_id:
            raise JournalError(
                f"journal: {str(path)!r}: is of the run {history.run.run_id!r}; put it into a folder of that name"
            )
        yield book, history


def _history(path: Path) -> History:
    history = plan.history(journal.read(path))
    if history is None:
        raise UserError(f"--resume: {path.parent.name!r}: its journal ends before the run began; start a new run")
    return history


def check_complete(store: Store, history: History) -> None:
    """Raise UserError if the database has more of a run than its journal: new results would have the numbers of old."""
    run_id = history.run.run_id
    run, attempts = queries.run(store, run_id), queries.attempts(store, run_id)
    resumed = run["resumed"] if run else 0
    known = {point_id: point.attempt for point_id, point in history.points.items()}
    begun = attempts.loc[attempts["started_at"].notna()]
    begun = zip(begun["point_id"], begun["number"], strict=True)
    lacking = len({point_id for point_id, number in begun if number > known.get(point_id, 0)})
    if resumed > history.run.resumed or lacking:
        store.end_lease(run_id)
        raise UserError(
            f"--resume: {run_id!r}: its journal is older than what {store.name} has of the run ({resumed} resumptions, "
            f"the journal {history.run.resumed}; newer attempts at {lacking} points); bring the newest journal here, "
            f"or move this one away and write it again from the database: nsa export {run_id} --journal"
        )
