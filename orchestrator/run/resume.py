"""Opens a run to be resumed: its journal and the database, each brought up to date with the other.

The database is the truth. What only the journal has (it was on disk first) is stored; what only the database has (the
journal's disk is gone, or the run went on elsewhere) is journalled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.schema.states import Origin, PointState
from orchestrator.database_url import StoreError, StoreUnavailable, hide_password
from orchestrator.run import plan
from orchestrator.run.database_call import call_database
from orchestrator.run.plan import History, PlanError
from orchestrator.settings import Settings
from orchestrator.store import journal
from orchestrator.store.journal import Journal, JournalError
from orchestrator.store.records import PointRecord, Record, RunRecord

if TYPE_CHECKING:
    from orchestrator.store import Store

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def begun(run_id: str, settings: Settings) -> RunRecord:
    """The latest beginning of a run, from its journal, else from the database; neither is changed.

    Raises:
        PlanError: there is no such run in either, or it was not measured here. JournalError: the journal is damaged.
        StoreError: the journal is missing and the database cannot be used.
    """
    path = settings.artifacts_dir / run_id / journal.NAME
    if not _RUN_ID.fullmatch(run_id):
        raise _unknown(run_id, settings, [])
    kept = plan.history(journal.read(path)) if os.path.isfile(path) else None  # Path.is_file raises for a long name
    if kept is not None:
        return kept.run
    stored, latest = _stored(run_id, settings)
    if stored is None and os.path.isfile(path):
        raise PlanError(f"--resume: {run_id!r}: its journal ends before the run began; start a new run")
    if stored is None:
        raise _unknown(run_id, settings, latest)
    if stored.origin is not Origin.MEASURED:
        raise PlanError(f"--resume: {run_id!r}: was reported by others, not measured; name a run that was")
    if not stored.spec:
        raise PlanError(f"--resume: {run_id!r}: its order was refused, it has nothing to go on with; submit a new run")
    return stored


@contextmanager
def opened(
    run_id: str, folder: Path, store: Store | None, tell: Callable[[str], None]
) -> Iterator[tuple[Journal, History]]:
    """The journal of a run, locked, and the run's history; the journal and the store now agree on it.

    Args:
        folder: the run's folder, with or without a journal.
        store: None where SQLAlchemy is not installed: the journal alone counts.
        tell: shows a line to the user.

    Raises:
        PlanError: the run has no record in either.
        JournalError: the journal is damaged, another run's, or being written by another process.
        StoreError, StoreUnavailable: the database refuses the journal's records, or cannot be used.
    """
    path = folder / journal.NAME
    missing = not os.path.isfile(path)  # Path.is_file raises below a folder that may not be entered
    with Journal(path) as book:
        kept = list(journal.read(path))
        if other := next((record.run_id for record in kept if record.run_id != run_id), None):
            raise JournalError(f"journal: {str(path)!r}: is of the run {other!r}; put it into a folder of that name")
        found = plan.history(kept)
        if store is not None:
            known = call_database(store.name, partial(_exchange, store, run_id, path, kept, tell))
            stored = plan.history(known)
            if stored is not None and (found is None or _differ(found, stored)):
                book.append(known)
                tell(_mended(path, store, stored, missing=missing))
            found = stored
        if found is None:
            raise PlanError(f"--resume: {run_id!r}: its journal ends before the run began; start a new run")
        yield book, found


def _exchange(store: Store, run_id: str, path: Path, kept: list[Record], tell: Callable[[str], None]) -> list[Record]:
    """Store a journal's records, but for those that the database refuses. Returns all that it then has of the run."""
    from orchestrator.store import history, importer

    try:
        if kept:
            importer.store_journal(store, path, kept)
    except StoreUnavailable:
        raise
    except StoreError:
        if not _complete(kept, history.records(store, run_id)):
            raise
        # The driver went on without a record that was refused: so does its resume.
        for record, reason in store.apply_each(kept):
            tell(f"warning: {path}: a record of {getattr(record, 'point_id', run_id)} is not stored: {reason}")
    return history.records(store, run_id)


def _complete(kept: list[Record], known: list[Record]) -> bool:
    """Whether a journal and a database together have the beginning of each point that the journal names."""
    begun = {
        getattr(record, "point_id", None) for record in (*kept, *known) if isinstance(record, RunRecord | PointRecord)
    }
    named = {getattr(record, "point_id", None) for record in kept}
    return None in begun and named <= begun


def _differ(kept: History, stored: History) -> bool:
    """Whether the database knows more of a run than its journal, all of which it has."""
    return (kept.points, kept.run.resumed) != (stored.points, stored.run.resumed)


def _mended(path: Path, store: Store, run: History, *, missing: bool) -> str:
    ended = sum(point.state.ended and point.state is not PointState.LOST for point in run.points.values())
    has = f"{len(run.points)} points, {ended} ended"
    if missing:
        return f"journal: {path} is gone; rebuilt from {store.name} ({has})"
    return f"journal: {path} lacked records that {store.name} has; completed from there ({has})"


def _stored(run_id: str, settings: Settings) -> tuple[RunRecord | None, list[str]]:
    """The beginning of a run in the database; without one, the ids of the latest runs there."""
    if settings.no_database_yet:
        return None, []
    try:
        from orchestrator.store import Store, history, queries
    except ModuleNotFoundError as err:
        if err.name != "sqlalchemy":
            raise
        return None, []

    def read() -> tuple[RunRecord | None, list[str]]:
        with Store.open(settings.database, create=False, readonly=True) as store:
            found = history.begun(store, run_id)
            return found, [] if found else list(queries.run_ids(store, origin=Origin.MEASURED, limit=3))

    try:
        return call_database(hide_password(settings.database), read)
    except StoreUnavailable as err:
        raise StoreUnavailable(
            f"--resume: {run_id!r}: has no journal in {settings.artifacts_dir}, and the database cannot be asked: {err}"
        ) from None


def _unknown(run_id: str, settings: Settings, latest: list[str]) -> PlanError:
    here = settings.artifacts_dir
    known = sorted({*latest, *(entry.parent.name for entry in here.glob(f"*/{journal.NAME}"))})[-3:]
    runs = f"the latest are {', '.join(known)}" if known else "there is none yet"
    places = f"no such run in {here} nor in {hide_password(settings.database)}"
    return PlanError(f"--resume: {run_id!r}: {places}; {runs}; give one of them")
