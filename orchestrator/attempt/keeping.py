"""Keeps the files of an ended attempt: copies them to the artifact store while its supervisor stays responsive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from orchestrator.artifacts import ArtifactError, ArtifactStore, Source, place, point_index
from orchestrator.messages import Assignment
from orchestrator.records import ArtifactData, ArtifactRecord, EventRecord

STALL_S = 60.0
"""Seconds without a piece that is copied after which a store is given up for the attempt."""

_POLL_S = 0.1


class _Abandoned(Exception):  # noqa: N818  (an event)
    """Nobody waits for the copies any more."""


def keep(
    assignment: Assignment, sources: Sequence[Source], store: str, stopped: Callable[[], bool] = lambda: False
) -> Iterator[ArtifactRecord | EventRecord]:
    """Copy files to the store and yield a record for each: the artifact, or a warning that says why it is not kept.

    Args:
        store: the store's URL.
        stopped: polled several times a second; once true, the generator ends and copies nothing more.
    """
    copies = _Copies(assignment, sources, store)
    copies.start()
    try:
        while not stopped():
            try:
                found = copies.results.get(timeout=_POLL_S)
            except queue.Empty:
                if not copies.stalled():
                    continue
                yield from (_warning(assignment, message) for message in copies.left())
                return
            if found is None:
                return
            yield _record(assignment, found)
    finally:
        copies.abandoned.set()


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

    def run(self) -> None:
        store, names = ArtifactStore(self._store), set()
        for number, source in enumerate(self._sources):
            self._begun, self._signed = number, time.monotonic()
            try:
                if source.name in names:
                    raise ArtifactError(f"{source.name!a}: another file of this attempt has this name")
                names.add(source.name)
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


def _record(assignment: Assignment, found: ArtifactData | str) -> ArtifactRecord | EventRecord:
    if isinstance(found, str):
        return _warning(assignment, found)
    run_id, point_id = assignment.run_id, assignment.point_id
    return ArtifactRecord(run_id=run_id, point_id=point_id, attempt=assignment.attempt, artifact=found)


def _warning(assignment: Assignment, message: str) -> EventRecord:
    return EventRecord(
        run_id=assignment.run_id, point_id=assignment.point_id, level="warning", message=f"file not kept: {message}"
    )
