"""Records a run: each record is in the journal before anything else happens with it, and in the database soon.

A thread brings the journal into the database, from its beginning on: what is stored already changes nothing, so that a
resumed run brings in what the database has missed. Measuring never waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from orchestrator.database_url import SETTING, RunMissingError, StoreError, StoreUnavailable
from orchestrator.messages import Progress
from orchestrator.store import Store
from orchestrator.store.journal import Journal, JournalError
from orchestrator.store.records import EventRecord, Record
from orchestrator.store.store import RENEW_S

TIMEOUT_S = 30.0
"""Seconds without an answer of the database after which the end of a run waits for it no longer."""
STOP_S = 0.8
"""The same for a run that was stopped: Ray kills a stopped job after three seconds."""

_SLOW_S = 1.5  # without an answer, after which the user hears of it
_BATCH = 50  # records of a transaction: few, so that a database which works answers within a second
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 10.0


class Recorder(AbstractContextManager["Recorder"]):
    """Journal and database of one run; `tell` shows a line to the user."""

    def __init__(self, run_id: str, journal: Journal, store: Store, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._run_id, self._journal, self._store = run_id, journal, store
        self._wake, self._closing = threading.Event(), threading.Event()
        self._away_since: float | None = None  # as the user knows
        self._refusal_noted = False
        # Written by the thread:
        self._offset = 0  # byte of the journal up to which its records are stored
        self._beats: dict[str, Progress] = {}  # point id -> its latest: only the present matters
        self._away: str | None = None  # why the database cannot be used now
        self._refused: str | None = None  # why it accepts nothing of this run any more
        self._asked_at: float | None = None  # when the question was put that it has not answered
        self._answered_at = time.monotonic()
        self._renewed_at = float("-inf")
        self._thread = threading.Thread(target=self._follow, name="database", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Store the rest, and end the lease and the thread; one that the database keeps waiting is abandoned."""
        self._closing.set()
        self._wake.set()
        self._thread.join(STOP_S)

    @property
    def stored(self) -> bool:
        """Whether all records are in the database."""
        return self._offset == self._journal.end

    def write(self, records: Sequence[Record]) -> None:
        """Append records to the journal: they are on disk when this returns, and in the database soon.

        Raises JournalFull.
        """
        self._journal.append(records)
        self._wake.set()
        self.look()

    def progress(self, sign: Progress) -> None:
        """Show a running point's progress in the database, unless that is away."""
        if self._away is None:
            self._beats[sign.point_id] = sign
            self._wake.set()

    def look(self) -> None:
        """Say what has changed about the database; to be called several times a second. Raises JournalFull."""
        if self._refused is not None:
            if not self._refusal_noted:
                self._refusal_noted = True
                self._note("error", f"the database no longer follows this run: {self._refused}")
            return
        away, asked = self._away, self._asked_at
        if away is None and asked is not None and (silent_s := time.monotonic() - asked) > _SLOW_S:
            away = f"{SETTING}: {self._store.name!r}: has not answered for {silent_s:.1f} s"
        if away is not None and self._away_since is None:
            self._away_since = time.monotonic()
            self.tell(f"warning: {away}; results go to the journal and are stored when it is back")
        elif away is None and self._away_since is not None and self._answered_at > self._away_since:
            seconds, self._away_since = time.monotonic() - self._away_since, None
            self._note("warning", f"the database was away for {seconds:.0f} s; the missed records are being stored")

    def close(self, patience_s: float = TIMEOUT_S, stopped: Callable[[], str | None] = lambda: None) -> list[str]:
        """Wait until all records are stored; give up when none was for `patience_s` seconds, once `stopped` for STOP_S.

        Returns a line for the user about records that the database lacks, with the fix.
        """
        begun = time.monotonic()
        while not (self.stored and self._away_since is None):
            self.look()
            waited_s = time.monotonic() - max(begun, self._answered_at)
            if self._refused or waited_s >= (min(patience_s, STOP_S) if stopped() else patience_s):
                break
            time.sleep(0.02)
        if self.stored:
            return []
        missing = self._journal.count(self._offset)
        return [f"records not in the database: {missing}; store them with: nsa import {self._journal.path}"]

    def _note(self, level: Literal["warning", "error"], message: str) -> None:
        self.tell(f"{level}: {message}")
        self.write([EventRecord(run_id=self._run_id, level=level, message=message)])

    def _follow(self) -> None:
        """The thread: bring the database up to date whenever the journal has grown, and renew the run's lease."""
        retry_s = _FIRST_RETRY_S
        while self._refused is None:
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                self._asked_at = time.monotonic()
                self._bring_up_to_date()
                if closing:
                    self._store.end_lease(self._run_id)
                self._away, retry_s = None, _FIRST_RETRY_S
            except StoreUnavailable as err:
                self._away = str(err)
                self._beats.clear()
                self._renewed_at = float("-inf")  # by which it is noticed that the database is back
                if not closing:
                    self._closing.wait(retry_s)
                    self._wake.set()
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
            except (StoreError, JournalError) as err:
                self._refused = str(err)
            except Exception as err:  # a bug of ours: the journal keeps the run
                self._refused = f"{type(err).__name__}: {err}"
            finally:
                self._asked_at = None
            if closing:
                return
            self._wake.wait(RENEW_S)

    def _bring_up_to_date(self) -> None:
        store = self._store
        while self._offset < self._journal.end:
            records, end = self._journal.records(self._offset, _BATCH)
            try:
                store.apply_many(records)
            except RunMissingError:
                if self._offset == 0:
                    raise
                self._offset = 0  # the database was replaced by an older or empty one: it gets the whole journal
                raise StoreUnavailable(f"{SETTING}: {store.name!r}: has lost this run") from None
            self._offset = end
            self._asked_at = self._answered_at = time.monotonic()
        if self._offset and time.monotonic() - self._renewed_at > RENEW_S:  # before, the run has no row
            store.take_lease(self._run_id)
            self._renewed_at = time.monotonic()
            self._asked_at = self._answered_at = time.monotonic()
        while self._beats:
            _, sign = self._beats.popitem()
            try:
                store.beat(self._run_id, sign.point_id, sign.at, sign.phase, sign.done, sign.total, sign.rate)
            except StoreUnavailable:
                raise
            except StoreError:  # a number of steps that it cannot hold: a later sign follows
                continue
            self._asked_at = self._answered_at = time.monotonic()
