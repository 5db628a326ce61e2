"""Keeps the files of an attempt: copies them to the artifact store beside its supervisor, which stays responsive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from orchestrator.execute.artifacts import ArtifactError, ArtifactStore, Source, place, point_index
from orchestrator.messages import Assignment
from orchestrator.store.records import ArtifactData, ArtifactRecord, EventRecord

STALL_S = 60.0
"""Seconds without a piece that is copied after which the files that are being copied are given up."""

_POLL_S = 0.1
_MOST = 16 << 20  # characters of texts that wait


class _Abandoned(Exception):  # noqa: N818  (an event)
    """Nobody waits for the copies any more."""


class Keeping:
    """Copies the files of one attempt to the store; a store that hangs holds up the end of the attempt alone.

    One thread copies; files that come meanwhile wait for it, and are copied by another with a connection of its own.
    What is copied when the block ends is abandoned.

    Args:
        store: the store's URL; None: no file is kept.
    """

    def __init__(self, assignment: Assignment, store: str | None) -> None:
        self._assignment = assignment
        self._store = store
        self._names: set[str] = set()
        self._waiting: list[Source] = []
        self._copies: _Copies | None = None

    def __enter__(self) -> Keeping:
        return self

    def __exit__(self, *_: object) -> None:
        if self._copies is not None:
            self._copies.abandoned.set()

    def add(self, sources: Sequence[Source]) -> None:
        """Have files of the running attempt kept. Waits for nothing: a text for which there is no room is given up."""
        size = sum(map(_size, self._waiting))
        for source in sources:
            size += _size(source)
            if size > _MOST:
                reason = f"more than {_MOST:,} characters of texts wait for the artifact store {self._store}"
                size, source = size - _size(source), replace(source, content="", problem=reason)
            self._take(source)
        self._copy()

    def records(self, timeout: float = 0.0) -> Iterator[ArtifactRecord | EventRecord]:
        """A record for each file that was copied since the last call, or given up: the artifact, or a warning that says
        why it is not kept. Waits up to `timeout` seconds for each."""
        if (copies := self._copies) is None:
            return
        stalled = copies.stalled()  # asked first: what comes after it is a sign
        try:
            while (found := copies.results.get(timeout=timeout)) is not None:
                stalled = False
                yield _record(self._assignment, found)
        except queue.Empty:
            if not stalled:
                return
            copies.abandoned.set()
            yield from (_warning(self._assignment, message) for message in copies.left())
        self._copies = None
        self._copy()

    def rest(
        self, sources: Sequence[Source], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[ArtifactRecord | EventRecord]:
        """Keep the files of the attempt's end, too, and yield the records of all that are not kept yet.

        Waits for a store that hangs for at most twice STALL_S: for what is being copied, then for all the rest.

        Args:
            stopped: polled several times a second; once true, the generator ends.
        """
        for source in sources:
            self._take(source)
        self._copy()
        while self._copies is not None and not stopped():
            for record in self.records(_POLL_S):
                yield record
                if stopped():
                    return

    def _take(self, source: Source) -> None:
        if source.name in self._names:
            source = replace(source, content="", problem="another file of this attempt has this name")
        self._names.add(source.name)
        self._waiting.append(source)

    def _copy(self) -> None:
        """Begin to copy what waits, unless something is being copied."""
        if self._store is None:
            self._waiting = []
        elif self._copies is None and self._waiting:
            self._copies, self._waiting = _Copies(self._assignment, self._waiting, self._store), []
            self._copies.begin()


class _Copies(threading.Thread):
    """Copies one file after the other; a store that hangs holds up this thread alone."""

    def __init__(self, assignment: Assignment, sources: Sequence[Source], store: str) -> None:
        super().__init__(name="artifacts", daemon=True)
        self.results: queue.SimpleQueue[ArtifactData | str | None] = queue.SimpleQueue()
        self.abandoned = threading.Event()
        self._assignment = assignment
        self._sources = sources
        self._store = store
        self._begun = 0
        self._signed = time.monotonic()

    def begin(self) -> None:
        """Start to copy; where the host has no room for the thread, these files are given up."""
        try:
            self.start()
        except RuntimeError as err:
            for source in self._sources:
                self.results.put(f"{source.name!a}: the host has no room for the thread that copies it ({err})")
            self.results.put(None)

    def run(self) -> None:
        store = ArtifactStore(self._store)
        for number, source in enumerate(self._sources):
            self._begun, self._signed = number, time.monotonic()
            try:
                self.results.put(store.put(source, self._place(source), self._sign))
            except ArtifactError as err:
                self.results.put(str(err))
            except _Abandoned:
                return
            except Exception as err:  # it must not cost the other files
                self.results.put(f"{source.name!a}: {type(err).__name__}: {err}")
        self.results.put(None)

    def stalled(self) -> bool:
        return time.monotonic() - self._signed > STALL_S

    def left(self) -> list[str]:
        """A message for each file that was not copied."""
        reason = f"the artifact store {self._store} did not answer for {STALL_S:g} s"
        return [f"{source.name!a}: {reason}" for source in self._sources[self._begun :]]

    def _place(self, source: Source) -> str:
        asked = self._assignment
        return place(asked.run_id, point_index(asked.point_id), asked.attempt, source.name)

    def _sign(self) -> None:
        if self.abandoned.is_set():
            raise _Abandoned
        self._signed = time.monotonic()


def _size(source: Source) -> int:
    return len(source.content) if isinstance(source.content, str) else 0


def _record(assignment: Assignment, found: ArtifactData | str) -> ArtifactRecord | EventRecord:
    if isinstance(found, str):
        return _warning(assignment, found)
    run_id, point_id = assignment.run_id, assignment.point_id
    return ArtifactRecord(run_id=run_id, point_id=point_id, attempt=assignment.attempt, artifact=found)


def _warning(assignment: Assignment, message: str) -> EventRecord:
    return EventRecord(
        run_id=assignment.run_id, point_id=assignment.point_id, level="warning", message=f"file not kept: {message}"
    )
