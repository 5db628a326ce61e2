"""Keeps the files of an attempt: copies them to the artifact store beside its supervisor, which stays responsive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from orchestrator.execute.artifacts import ArtifactError, ArtifactStore, Source, artifact_path, point_index
from orchestrator.messages import Assignment
from orchestrator.store.records import ArtifactRecord, EventRecord

STALL_S = 60.0
"""Seconds without a copied piece after which the files that wait for the store are given up."""

_POLL_S = 0.1


class _Abandoned(Exception):  # noqa: N818  (an event)
    """Nobody waits for the copies any more."""


class Keeping:
    """Copies the files of one attempt to the store; a store that hangs holds up the end of the attempt alone.

    What is being copied when the block ends is abandoned.

    Args:
        store: the store's URL; None: no file is kept.
    """

    def __init__(self, assignment: Assignment, store: str | None) -> None:
        self._assignment = assignment
        self._store = store
        self._names: set[str] = set()
        self._pending: list[Source] = []  # in the order of their copies
        self._copier: _Copier | None = None

    def __enter__(self) -> Keeping:
        return self

    def __exit__(self, *_: object) -> None:
        self._abandon()

    def add(self, sources: Sequence[Source]) -> None:
        """Have files of the running attempt kept; waits for nothing."""
        if self._store is None:
            return
        for source in sources:
            if source.name in self._names:
                source = replace(source, content="", problem="another file of this attempt has this name")
            self._names.add(source.name)
            if self._copier is None:
                self._copier = _Copier(self._assignment, self._store)
                self._copier.start()
            if not self._pending:
                self._copier.last_piece = time.monotonic()
            self._pending.append(source)
            self._copier.sources.put(source)

    def records(self, timeout: float = 0.0) -> Iterator[ArtifactRecord | EventRecord]:
        """A record for each file that was copied since the last call, or given up: the artifact, or a warning that says
        why it is not kept. Waits up to `timeout` seconds for each."""
        while self._pending and self._copier is not None:
            try:
                copied = self._copier.results.get(timeout=timeout)
            except queue.Empty:
                if time.monotonic() - self._copier.last_piece < STALL_S:
                    return
                self._abandon()  # later files get another thread, and a connection of its own
                stalled, self._pending = self._pending, []
                reason = f"the artifact store {self._store} did not answer for {STALL_S:g} s"
                yield from (self._not_kept(f"{source.name!a}: {reason}") for source in stalled)
                return
            self._pending.pop(0)
            yield self._not_kept(copied) if isinstance(copied, str) else copied

    def rest(
        self, sources: Sequence[Source], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[ArtifactRecord | EventRecord]:
        """Keep the files of the attempt's end, too, and yield the records of all that are not kept yet.

        Waits for a store that hangs for at most twice STALL_S: for what is being copied, then for all the rest.

        Args:
            stopped: polled several times a second; once true, the generator ends.
        """
        for more in ([], sources):
            self.add(more)
            while self._pending and not stopped():
                for record in self.records(_POLL_S):
                    yield record
                    if stopped():
                        return

    def _abandon(self) -> None:
        if self._copier is not None:
            self._copier.abandoned = True
            self._copier.sources.put(None)
            self._copier = None

    def _not_kept(self, problem: str) -> EventRecord:
        return self._assignment.warning(f"file not kept: {problem}")


class _Copier(threading.Thread):
    """Copies one file after the other; a store that hangs holds up this thread alone."""

    def __init__(self, assignment: Assignment, store: str) -> None:
        super().__init__(name="artifacts", daemon=True)
        self.sources: queue.SimpleQueue[Source | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[ArtifactRecord | str] = queue.SimpleQueue()  # or the problem
        self.last_piece = time.monotonic()
        self.abandoned = False
        self._assignment = assignment
        self._store = store

    def run(self) -> None:
        store, point = ArtifactStore(self._store), self._assignment
        while (source := self.sources.get()) is not None and not self.abandoned:
            self.last_piece = time.monotonic()
            try:
                path = artifact_path(point.run_id, point_index(point.point_id), point.attempt, source.name)
                artifact = store.put(source, path, self._piece_copied)
                self.results.put(ArtifactRecord(**point.ids, attempt=point.attempt, artifact=artifact))
            except ArtifactError as err:
                self.results.put(str(err))
            except _Abandoned:
                return
            except Exception as err:  # it must not cost the other files
                self.results.put(f"{source.name!a}: {type(err).__name__}: {err}")

    def _piece_copied(self) -> None:
        if self.abandoned:
            raise _Abandoned
        self.last_piece = time.monotonic()
