"""Brings a run's journal into the database: a thread of its own, for which measuring never waits."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jobs.schema.states import PointState
from orchestrator.database_url import RunMissingError, StoreError, StoreUnavailable
from orchestrator.store.journal import Journal, JournalError
from orchestrator.store.lease import RENEW_S
from orchestrator.store.records import EventRecord, OutcomeRecord, Record, RunRecord

if TYPE_CHECKING:
    from orchestrator.store import Store

_BATCH = 50  # records of a transaction: few, so that a database which works answers within a second
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 10.0


class Projector(threading.Thread):
    """Stores the records of a journal from its beginning on, and renews the lease on its run.

    What is stored already changes nothing, so that a resumed run brings in what the database has missed.

    Attributes:
        away: why the database cannot be used now; None while it can.
        refused: why the database takes nothing of this run any more; None while it does.
        replacements: records to be journalled because the database has refused others.
        answered_at: time (monotonic) of the database's last answer.
        offset: the byte of the journal up to which its records are stored.
        database: its URL without a password, for messages.
    """

    def __init__(self, run_id: str, store: Store, journal: Journal) -> None:
        super().__init__(name="projector", daemon=True)
        self.away: str | None = None
        self.refused: str | None = None
        self.replacements: queue.SimpleQueue[OutcomeRecord | EventRecord] = queue.SimpleQueue()
        self.answered_at = time.monotonic()
        self.database = store.name
        self._run_id, self._store, self._journal = run_id, store, journal
        self.offset = 0
        self._beats: dict[str, tuple[Any, ...]] = {}  # point id -> its latest: only the present matters
        self._wake, self._stop_asked = threading.Event(), threading.Event()
        self._asked_at: float | None = None
        self._renewed_at = float("-inf")
        self._retry_s = _FIRST_RETRY_S

    @property
    def silent_s(self) -> float:
        """Seconds for which the database has owed an answer; 0 while it owes none."""
        asked = self._asked_at
        return 0.0 if asked is None else time.monotonic() - asked

    def wake(self) -> None:
        """Say that the journal has grown."""
        self._wake.set()

    def beat(self, point_id: str, *progress: Any) -> None:
        """Store a running point's progress, the arguments of `Store.beat`, unless the database is away."""
        if self.away is None:
            self._beats[point_id] = progress
            self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Store the rest, end the lease and the thread. One that the database keeps waiting is left to itself."""
        self._stop_asked.set()
        self._wake.set()
        self.join(timeout_s)

    def run(self) -> None:
        while self.refused is None:
            self._wake.clear()
            stopping = self._stop_asked.is_set()
            try:
                self._asked_at = time.monotonic()
                self._store_all()
                if stopping:
                    self._store.end_lease(self._run_id)
                self.away, self._retry_s = None, _FIRST_RETRY_S
            except StoreUnavailable as err:
                self.away = str(err)
                self._beats.clear()
                self._renewed_at = float("-inf")  # by which it is noticed that the database is back
                if not stopping:
                    self._stop_asked.wait(self._retry_s)
                    self._wake.set()
                self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
            except (StoreError, JournalError) as err:
                self.refused = str(err)
            except Exception as err:  # a bug of ours: the journal keeps the run
                self.refused = f"{type(err).__name__}: {err}"
            finally:
                self._asked_at = None
            if stopping:
                return
            self._wake.wait(RENEW_S)

    def _store_all(self) -> None:
        while self.offset < self._journal.end:
            records, end = self._journal.records(self.offset, _BATCH)
            try:
                self._store.apply_many(records)
            except RunMissingError:
                if self.offset == 0:
                    raise
                self.offset, self._renewed_at = 0, float("-inf")  # the database was replaced by an older or empty one
                message = "the database had lost this run; what the journal has of it was stored again"
                self.replacements.put(EventRecord(run_id=self._run_id, level="warning", message=message))
                continue
            except StoreUnavailable:
                raise
            except Exception:
                self._store_each(records)
            self.offset = end
            self._answered()
        if self.offset and time.monotonic() - self._renewed_at > RENEW_S:  # before, the run has no row
            self._store.take_lease(self._run_id)
            self._renewed_at = time.monotonic()
            self._answered()
        while self._beats:
            point_id, progress = self._beats.popitem()
            try:
                self._store.beat(self._run_id, point_id, *progress)
            except StoreUnavailable:
                raise
            except Exception:  # one that the database refuses: the point's records matter, and a later one follows
                continue
            self._answered()

    def _store_each(self, records: Sequence[Record]) -> None:
        """Store records, replacing those that the database refuses, so that they cost no other."""
        for record, reason in self._store.apply_each(records):
            if isinstance(record, RunRecord) or (isinstance(record, EventRecord) and record.point_id is None):
                raise StoreError(reason)  # nothing can be said in its place
            self.replacements.put(_replacement(record, reason))

    def _answered(self) -> None:
        self.answered_at = time.monotonic()
        self._asked_at = self.answered_at


def _replacement(record: Record, reason: str) -> OutcomeRecord | EventRecord:
    """The record that says why another one cannot be kept: a point's end without results, or a warning."""
    if isinstance(record, OutcomeRecord) and (record.metrics or record.route or record.environment):
        return OutcomeRecord(
            run_id=record.run_id,
            point_id=record.point_id,
            attempt=record.attempt,
            state=PointState.ERROR if record.state is PointState.OK else record.state,
            reason=f"{record.reason or 'measured'}, but its results cannot be kept: {reason}",
            started_at=record.started_at,
        )
    point_id = None if isinstance(record, OutcomeRecord | EventRecord) else getattr(record, "point_id", None)
    about = getattr(record, "point_id", record.run_id)
    message = f"{about}: its {record.type} is not kept: {reason}"
    return EventRecord(run_id=record.run_id, point_id=point_id, level="warning", message=message)
