"""Records a run: each record is in the journal before anything else happens with it; the projector stores it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from orchestrator.database_url import SETTING
from orchestrator.messages import Progress
from orchestrator.store.journal import Journal
from orchestrator.store.projector import Projector
from orchestrator.store.records import EventRecord, Record

if TYPE_CHECKING:
    from orchestrator.store import Store

TIMEOUT_S = 30.0
"""Seconds without an answer of the database after which the end of a run waits for it no longer."""
STOP_S = 0.8
"""The same for a run that was stopped: Ray kills a stopped job after three seconds."""
SLOW_S = 1.5
"""Seconds without an answer after which the user is told."""


class Recorder:
    """Journal and database of one run.

    Args:
        store: None where results will be imported from the journal later.

    Attributes:
        tell: shows a line to the user.
    """

    def __init__(self, run_id: str, journal: Journal, store: Store | None, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._run_id = run_id
        self._journal = journal
        self._projector = None if store is None else Projector(run_id, store, journal)
        self._refused = False  # whether the user was told so
        self._away_since: float | None = None
        self._gave_up = False
        if self._projector is not None:
            self._projector.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._projector is not None:
            self._projector.stop(0.0 if self._gave_up else STOP_S)

    @property
    def stored(self) -> bool:
        """Whether all records are in the database."""
        return self._projector is not None and self._projector.offset == self._journal.end

    def write(self, records: Sequence[Record]) -> None:
        """Append records to the journal: they are on disk when this returns, and in the database soon.

        Raises JournalFull.
        """
        self._journal.append(records)
        if self._projector is not None:
            self._projector.wake()
            self.look()

    def progress(self, sign: Progress) -> None:
        """Show a running point's progress in the database, unless that is away."""
        if self._projector is not None:
            self._projector.beat(sign.point_id, sign.at, sign.phase, sign.done, sign.total, sign.rate)

    def look(self) -> None:
        """Say what has changed about the database; to be called several times a second. Raises JournalFull."""
        projector = self._projector
        if projector is None:
            return
        while not projector.replacements.empty():
            record = projector.replacements.get()
            self.tell(f"warning: {record.message if isinstance(record, EventRecord) else record.reason}")
            self.write([record])
        silent_s = projector.silent_s
        if projector.refused is not None:
            if not self._refused:
                self._refused = True
                self._note("error", f"the database no longer follows this run: {projector.refused}")
        elif projector.away is not None:
            self._went_away(projector.away, 0.0)
        elif silent_s > SLOW_S:
            self._went_away(f"{SETTING}: {projector.database!r}: has not answered for {silent_s:.1f} s", silent_s)
        elif self._away_since is not None and projector.answered_at > self._away_since:
            away, self._away_since = time.monotonic() - self._away_since, None
            self._note("warning", f"the database was away for {away:.0f} s; the missed records are being stored")

    def close(self, patience_s: float = TIMEOUT_S, stopped: Callable[[], str | None] = lambda: None) -> list[str]:
        """Wait until all records are stored; give up when none was for `patience_s` seconds.

        Args:
            stopped: a reason to give up when none was for STOP_S seconds.

        Returns:
            A line for the user about records that the database lacks, with the fix.
        """
        projector, begun = self._projector, time.monotonic()
        while projector is not None:
            self.look()
            settled = self.stored and self._away_since is None and projector.replacements.empty()
            waited_s = time.monotonic() - max(begun, projector.answered_at)
            if settled or self._refused or waited_s >= (min(patience_s, STOP_S) if stopped() else patience_s):
                break
            time.sleep(0.02)
        self._gave_up = not self.stored
        if self.stored:
            return []
        missing = self._journal.count(projector.offset if projector else 0)
        return [f"records not in the database: {missing}; store them with: nsa import {self._journal.path}"]

    def _went_away(self, reason: str, since_s: float) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic() - since_s
            self.tell(f"warning: {reason}; results go to the journal and are stored when it is back")

    def _note(self, level: Literal["warning", "error"], message: str) -> None:
        self.tell(f"{level}: {message}")
        self.write([EventRecord(run_id=self._run_id, level=level, message=message)])
