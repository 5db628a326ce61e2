"""Storing beside measuring: the one thread that writes a run's records and progress to the store."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from orchestrator.database_url import RunMissingError, StoreError, StoreUnavailable
from orchestrator.messages import Progress
from orchestrator.run.backlog import Backlog
from orchestrator.store import journal
from orchestrator.store.journal import JournalError
from orchestrator.store.records import EventRecord, OutcomeRecord, Record, RunRecord, instead_of

if TYPE_CHECKING:
    from orchestrator.store import Store

_RETRY_S = 5.0
_LAST_RETRIES_S = 0.5
_MOST = 50
"""Records of a transaction: few, so that a store which works answers within a second."""


class Storing(threading.Thread):
    """Stores the records of a backlog. A store that does not answer holds up this thread alone, also at the end.

    Attributes:
        away: why the store cannot be used now; None while it can.
        refused: why the store takes nothing of this run any more; None while it does.
        instead: records to keep instead of those that the store refused.
        answered_at: time (monotonic) of the store's last answer.
        database: its URL without a password, for messages.
    """

    def __init__(self, store: Store, backlog: Backlog) -> None:
        super().__init__(name="storing", daemon=True)
        self.away: str | None = None
        self.refused: str | None = None
        self.instead: queue.SimpleQueue[OutcomeRecord | EventRecord] = queue.SimpleQueue()
        self.answered_at = time.monotonic()
        self.database = store.name
        self._store = store
        self._backlog = backlog
        self._signs: dict[str, Progress] = {}  # point id -> its latest: only the present matters
        self._woken, self._hurried, self._finished = threading.Event(), threading.Event(), threading.Event()
        self._asked_at: float | None = None

    @property
    def silent_s(self) -> float:
        """Seconds for which the store has owed an answer; 0 while it owes none."""
        asked = self._asked_at
        return 0.0 if asked is None else time.monotonic() - asked

    def wake(self) -> None:
        """Say that the backlog has records."""
        self._woken.set()

    def progress(self, sign: Progress) -> None:
        """Store a running point's progress, unless the store is away."""
        if self.away is None:
            self._signs[sign.point_id] = sign
            self.wake()

    def hurry(self) -> None:
        """Try again often from now on: the run has ended."""
        self._hurried.set()
        self.wake()

    def finish(self) -> None:
        """End the thread, at once unless it waits for the store."""
        self._finished.set()
        self.hurry()
        self.join(timeout=0.1)

    def run(self) -> None:
        while self.refused is None:
            self._woken.wait()
            if self._finished.is_set():
                return
            self._woken.clear()
            try:
                self._store_all()
            except StoreUnavailable as err:
                self.away = str(err)
                self._signs.clear()
                self._woken.set()
                if self._hurried.wait(_RETRY_S):
                    self._finished.wait(_LAST_RETRIES_S)
            except (StoreError, JournalError) as err:
                self.refused = str(err)
            except Exception as err:  # a bug of ours: the journal keeps the run
                self.refused = f"{type(err).__name__}: {err}"

    def _store_all(self) -> None:
        while (batch := self._backlog.take(_MOST)).records:
            self._apply(batch.records)
            self._backlog.stored(batch)
        while self._signs:
            _, sign = self._signs.popitem()
            try:
                with self._asking():
                    self._store.beat(sign.run_id, sign.point_id, sign.at, sign.phase, sign.done, sign.total, sign.rate)
            except StoreUnavailable:
                raise
            except Exception:  # one that the store refuses: the point's records matter, and a later sign follows
                continue

    def _apply(self, records: Sequence[Record]) -> None:
        """Store records. Those that the store refuses are replaced, so that they cost no other."""
        with self._asking():
            try:
                self._store.apply_many(records)
                return
            except StoreUnavailable:
                raise
            except RunMissingError:
                refused = self._apply_all_again(records)
            except Exception:
                refused = self._store.apply_each(records)
        for record, reason in refused:
            if isinstance(record, RunRecord) or (isinstance(record, EventRecord) and record.point_id is None):
                raise StoreError(reason)  # nothing can be said in its place
            self.instead.put(instead_of(record, reason))

    def _apply_all_again(self, records: Sequence[Record]) -> list[tuple[Record, str]]:
        """Store the whole journal, then `records`: the database was replaced by an older or an empty one.

        Returns:
            Those of `records` that are refused, and of the journal the run's beginning.
        """
        whole = journal.read(self._backlog.journal.path)
        refused = self._store.apply_each(chain(whole, records))
        run_id = records[0].run_id
        message = "the database had lost this run; what the journal has of it was stored again"
        self.instead.put(EventRecord(run_id=run_id, level="warning", message=message))
        again = {id(record) for record in records}
        return [one for one in refused if isinstance(one[0], RunRecord) or id(one[0]) in again]

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self._asked_at = time.monotonic()
        try:
            yield
            self.away, self.answered_at = None, time.monotonic()
        finally:
            self._asked_at = None
