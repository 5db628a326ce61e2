"""Keeps a run's records: first in the journal, then in the store. Neither is waited for while it is away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from orchestrator.database_url import SETTING
from orchestrator.messages import Progress
from orchestrator.run.backlog import Backlog
from orchestrator.run.database_call import SLOW_S, STOP_S, never
from orchestrator.run.storing import Storing
from orchestrator.store.journal import Journal, JournalFull
from orchestrator.store.records import EventRecord, Record, keepable

if TYPE_CHECKING:
    from orchestrator.store import Store


class Recorder:
    """Journal and store of one run.

    Args:
        store: None where results will be imported from the journal later.
        tell: shows a line to the user.
    """

    def __init__(self, run_id: str, journal: Journal, store: Store | None, tell: Callable[[str], None]) -> None:
        self._run_id = run_id
        self._tell = tell
        self._backlog = Backlog(journal)
        self._store = store
        self._storing = None if store is None else Storing(store, self._backlog)
        if self._storing is not None:
            self._storing.start()
        self._refused = False  # whether the user was told so
        self._away_since: float | None = None
        self._full_since: float | None = None
        self._full = ""  # why the journal's disk took no more the last time

    @property
    def stored(self) -> bool:
        """Whether all records are in the store."""
        return self._storing is not None and self._storing.refused is None and not self._backlog.waiting

    @property
    def kept(self) -> bool:
        """Whether each record is in the journal or in the store."""
        return not self._backlog.only_here and not self._backlog.left_out

    def begin(self, records: Sequence[Record]) -> None:
        """Keep the beginning of a run. Raises JournalFull if its journal cannot be written: nothing is stored then."""
        try:
            self._backlog.append(records)
        except JournalFull:
            if self._storing is not None:
                self._storing.finish()
            raise
        self._wake()

    def write(self, records: Sequence[Record]) -> None:
        """Keep records: they are on disk when this returns, unless it is full, and in the store soon.

        A record that no journal could give back is replaced by one that says so.
        """
        try:
            self._backlog.append([keepable(record) for record in records])
        except JournalFull as err:
            self._became_full(err)
        self._wake()
        self.look()

    def progress(self, sign: Progress) -> None:
        """Show a running point's progress in the store, unless that is away."""
        if self._storing is not None:
            self._storing.progress(sign)

    def look(self) -> None:
        """Say what has changed about journal and store; to be called several times a second."""
        if self._full_since is not None:
            self._look_at_journal(self._full_since)
        if self._storing is not None:
            self._look_at_store(self._storing)

    def close(self, patience_s: float, stopped: Callable[[], str | None] = never) -> None:
        """Wait until all records are stored, and journalled; give up when none was for `patience_s` seconds.

        Args:
            stopped: a reason to give up when none was for STOP_S seconds.
        """
        last, storing = time.monotonic(), self._storing
        if storing is not None:
            storing.hurry()
        while True:
            self.look()
            if storing is not None:
                last = max(last, storing.answered_at)
            if self._settled() or time.monotonic() - last >= (min(patience_s, STOP_S) if stopped() else patience_s):
                break
            time.sleep(0.02)
        if storing is not None and self.stored:
            storing.finish()

    def missing(self) -> list[str]:
        """Lines for the user about records that journal or store lack after `close`, with the fix."""
        lines, path = [], self._backlog.journal.path
        again = f"python -m jobs --resume {self._run_id}"
        if not self.kept:
            count = self._backlog.only_here + self._backlog.left_out
            lines.append(
                f"error: records neither in the journal nor in the database: {count}, which are lost: {self._full}; "
                f"then measure again what they were of: {again}"
            )
        elif count := self._backlog.not_journalled:
            lines.append(
                f"warning: records that the journal lacks: {count} ({self._full}); the database has them, and "
                f"completes it when the run is resumed: {again}"
            )
        if not self.stored and (count := self._backlog.waiting - self._backlog.only_here):
            lines.append(f"records not in the database: {count}; store them with: nsa import {path}")
        return lines

    def _settled(self) -> bool:
        """Whether nothing is left to wait for."""
        if self._backlog.not_journalled:
            return False
        if self._storing is None or self._refused:
            return True
        return self.stored and self._away_since is None and self._storing.instead.empty()

    def _wake(self) -> None:
        if self._storing is not None:
            self._storing.wake()

    def _became_full(self, err: JournalFull) -> None:
        self._full = str(err)
        if self._full_since is None:
            self._full_since = time.monotonic()
            where = "in memory" if self._store is None else "in memory and in the database"
            self._note("warning", f"{err}; until then results are kept {where}")

    def _look_at_journal(self, since: float) -> None:
        try:
            self._backlog.append([])
        except JournalFull as err:
            self._full = str(err)
        if not self._backlog.not_journalled:
            self._full_since = None
            self._note(
                "warning", f"the journal could not be written for {time.monotonic() - since:.0f} s; it is whole now"
            )

    def _look_at_store(self, storing: Storing) -> None:
        while not storing.instead.empty():
            record = storing.instead.get()
            self._tell(f"warning: {record.message if isinstance(record, EventRecord) else record.reason}")
            self.write([record])
        silent_s = storing.silent_s
        if storing.refused is not None:
            self._gave_up(storing.refused)
        elif storing.away is not None:
            self._went_away(storing.away, 0.0)
        elif silent_s > SLOW_S:
            self._went_away(f"{SETTING}: {storing.database!r}: has not answered for {silent_s:.1f} s", silent_s)
        elif self._away_since is not None and storing.answered_at > self._away_since:
            away, self._away_since = time.monotonic() - self._away_since, None
            self._note("warning", f"the database was away for {away:.0f} s; the missed records are being stored")

    def _gave_up(self, reason: str) -> None:
        if not self._refused:
            self._refused = True
            self._note("error", f"the database no longer follows this run: {reason}")

    def _went_away(self, reason: str, since_s: float) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic() - since_s
            self._tell(f"warning: {reason}; results go to the journal and are stored when it is back")

    def _note(self, level: Literal["warning", "error"], message: str) -> None:
        self._tell(f"{level}: {message}")
        self.write([EventRecord(run_id=self._run_id, level=level, message=message)])
