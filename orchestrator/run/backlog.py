"""Records of a run on their way to the store. The journal is the buffer, so a store that is away costs no memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.store.journal import Journal, JournalFull
from orchestrator.store.records import Record, SeriesRecord

_MOST_IN_MEMORY = 10_000
"""Records that the journal's disk did not take, beyond which samples of live series are left out."""
_RETRY_S = 1.0


@dataclass(frozen=True)
class Batch:
    """Records to be stored next.

    Attributes:
        end: byte of the journal after them; None for records that only memory has.
        round: number of times that the journal had taken records from memory before.
    """

    records: Sequence[Record]
    end: int | None
    round: int


class Backlog:
    """Records from `journal.end` on that are not stored yet. One thread appends, another takes.

    Records that the journal's disk does not take wait in memory. They are stored from there, and again from the journal
    once it has them, which changes nothing.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.left_out = 0
        self._lock = threading.Lock()
        self._next = journal.end
        self._memory: list[Record] = []
        self._stored_of_memory = 0
        self._round = 0
        self._waiting = 0
        self._try_at = 0.0

    @property
    def waiting(self) -> int:
        """The number of records that are not stored."""
        return self._waiting

    @property
    def not_journalled(self) -> int:
        """The number of records that the journal lacks."""
        return len(self._memory)

    @property
    def only_here(self) -> int:
        """The number of records that neither the journal nor the store has."""
        return len(self._memory) - self._stored_of_memory

    def append(self, records: Sequence[Record]) -> None:
        """Journal records, after those that wait in memory.

        Raises JournalFull when the disk takes no more: then they wait there, too. It is asked again a second later.
        """
        with self._lock:
            self._waiting += len(records)
            if time.monotonic() < self._try_at:
                self._remember(records)
                return
            try:
                self.journal.append([*self._memory, *records])
            except JournalFull:
                self._try_at = time.monotonic() + _RETRY_S
                self._remember(records)
                raise
            self._waiting += self._stored_of_memory
            self._memory, self._stored_of_memory = [], 0
            self._round += 1

    def take(self, most: int) -> Batch:
        """The next records to store, at most `most`. Raises JournalError."""
        with self._lock:
            start, end, count = self._next, self.journal.end, self._round
            if start == end:
                first = self._stored_of_memory
                return Batch(self._memory[first : first + most], None, count)
        records, end = self.journal.records(start, most)
        return Batch(records, end, count)

    def stored(self, batch: Batch) -> None:
        """Note that a batch is stored."""
        with self._lock:
            if batch.end is not None:
                self._next = batch.end
            elif batch.round == self._round:
                self._stored_of_memory += len(batch.records)
            else:  # meanwhile in the journal, to be stored from there
                return
            self._waiting -= len(batch.records)

    def _remember(self, records: Sequence[Record]) -> None:
        self._memory += records
        if len(self._memory) <= _MOST_IN_MEMORY:
            return
        stored, rest = self._memory[: self._stored_of_memory], self._memory[self._stored_of_memory :]
        stored, kept = _without_series(stored), _without_series(rest)
        if len(stored) + len(kept) == len(self._memory):  # no series are left: a batch under way keeps its place
            return
        self._memory, self._stored_of_memory = stored + kept, len(stored)
        self.left_out += len(rest) - len(kept)
        self._waiting -= len(rest) - len(kept)
        self._round += 1


def _without_series(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not isinstance(record, SeriesRecord)]
