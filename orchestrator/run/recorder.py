"""Keeps a run's records: first in the journal, then in the store, which may be away for a while."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestrator.database_url import StoreError, StoreUnavailable
from orchestrator.journal import Journal
from orchestrator.messages import Progress
from orchestrator.records import EventRecord, Record

if TYPE_CHECKING:
    from orchestrator.store import Store

_RETRY_S = 5.0
_LAST_TRY_S = 30.0


class Recorder:
    """Journal and store of one run.

    Args:
        store: None where results will be imported from the journal later.
        tell: shows a line to the user.
    """

    def __init__(self, run_id: str, journal: Journal, store: Store | None, tell: Callable[[str], None]) -> None:
        self._run_id = run_id
        self._journal = journal
        self._store = store
        self._tell = tell
        self._waiting: list[Record] = []  # journalled, not stored yet
        self._away_since: float | None = None
        self._retry_at = 0.0

    @property
    def stored(self) -> bool:
        """Whether all journalled records are in the store."""
        return self._store is not None and not self._waiting

    def write(self, records: Sequence[Record]) -> None:
        """Keep records: they are on disk when this returns, and in the store unless it is away."""
        self._journal.append(records)
        self._waiting += records
        if self._away_since is None or time.monotonic() >= self._retry_at:
            self._catch_up()

    def progress(self, sign: Progress) -> None:
        """Show a running point's progress in the store. Dropped while the store is away: only the present matters."""
        if self._store is not None and self._away_since is None:
            try:
                self._store.beat(sign.run_id, sign.point_id, sign.at, sign.phase, sign.done, sign.total, sign.rate)
            except StoreUnavailable as err:
                self._went_away(err)

    def close(self, patience_s: float = _LAST_TRY_S) -> None:
        """Store the waiting records; give up after `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while self._waiting and self._store is not None and time.monotonic() < deadline:
            self._catch_up()
            if self._waiting:
                time.sleep(min(1.0, patience_s / 10))

    def _catch_up(self) -> None:
        if self._store is None:
            return
        try:
            self._store.apply_many(self._waiting)
        except StoreUnavailable as err:
            self._went_away(err)
        except StoreError as err:  # permanent: these records stay in the journal
            self._store = None
            self._note("error", f"the database no longer follows this run: {err}")
        else:
            self._waiting = []
            self._came_back()

    def _went_away(self, err: StoreUnavailable) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            self._tell(f"warning: {err}; results go to the journal and are stored when it is back")
        self._retry_at = time.monotonic() + _RETRY_S

    def _came_back(self) -> None:
        if self._away_since is not None:
            away, self._away_since = time.monotonic() - self._away_since, None
            self._note("warning", f"the database was away for {away:.0f} s; the missed records are stored now")

    def _note(self, level: str, message: str) -> None:
        self._tell(f"{level}: {message}")
        with contextlib.suppress(StoreUnavailable):
            self.write([EventRecord.model_validate({"run_id": self._run_id, "level": level, "message": message})])
