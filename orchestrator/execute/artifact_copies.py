"""Copies of an attempt's files to the artifact store, in the background, as a store may hang."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from orchestrator.background import BackgroundCall
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore, Source, artifact_path, point_index
from orchestrator.messages import Assignment
from orchestrator.store.records import ArtifactData, ArtifactRecord, EventRecord

STALL_S = 60.0
"""Seconds without a copied piece after which the files that wait for the store are given up."""

_POLL_S = 0.1


class ArtifactCopies(AbstractContextManager["ArtifactCopies"]):
    """Copies the files of one attempt, one after the other; a store that hangs holds up the end of the attempt alone.

    What is being copied when the block ends is abandoned.

    Args:
        url: the store's; None: no file is kept.
    """

    def __init__(self, assignment: Assignment, url: str | None) -> None:
        self._assignment = assignment
        self._url = url
        self._names: set[str] = set()
        self._pending: deque[Source] = deque()  # the first is being copied
        self._copy: _Copy | None = None
        self._store = ArtifactStore(url or "")

    def __exit__(self, *_: object) -> None:
        if self._copy is not None:
            self._copy.abandoned = True

    def add(self, sources: Sequence[Source]) -> None:
        """Have files of the running attempt copied; waits for nothing."""
        for source in sources if self._url is not None else ():
            if source.name in self._names:
                source = replace(source, content="", problem="another file of this attempt has this name")
            self._names.add(source.name)
            self._pending.append(source)

    def records(self, timeout: float = 0.0) -> Iterator[ArtifactRecord | EventRecord]:
        """A record for each file that was copied since the last call, or given up: the artifact, or a warning that says
        why it is not kept. Waits up to `timeout` seconds for each."""
        of_attempt = self._assignment
        while self._pending:
            source = self._pending[0]
            copy = self._copy = self._copy or _Copy(self._store, of_attempt, source)
            if copy.done(timeout):
                self._copy = None
                self._pending.popleft()
                try:
                    yield ArtifactRecord(**of_attempt.ids, attempt=of_attempt.attempt, artifact=copy.result())
                except ArtifactError as err:
                    yield of_attempt.warning(f"file not kept: {err}")
                except Exception as err:  # it must not cost the other files
                    yield of_attempt.warning(f"file not kept: {source.name!a}: {type(err).__name__}: {err}")
            elif time.monotonic() - copy.last_piece < STALL_S:
                return
            else:
                copy.abandoned, self._copy = True, None
                self._store = ArtifactStore(self._store.url)  # later files get a connection of their own
                stalled = list(self._pending)
                self._pending.clear()
                reason = f"the artifact store {self._url} did not answer for {STALL_S:g} s"
                yield from (of_attempt.warning(f"file not kept: {each.name!a}: {reason}") for each in stalled)

    def rest(
        self, sources: Sequence[Source], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[ArtifactRecord | EventRecord]:
        """Copy the files of the attempt's end, too, and yield the records of all that remain.

        Args:
            stopped: polled several times a second; once true, the generator ends.
        """
        self.add(sources)
        while self._pending and not stopped():
            for record in self.records(_POLL_S):
                yield record
                if stopped():
                    return


class _Copy(BackgroundCall[ArtifactData]):
    """The copy of one file, in a thread of its own. `last_piece` is when the last piece of it was copied."""

    def __init__(self, store: ArtifactStore, point: Assignment, source: Source) -> None:
        self.last_piece = time.monotonic()
        self.abandoned = False

        def after_piece() -> None:
            if self.abandoned:
                raise InterruptedError("nobody waits for the copy")
            self.last_piece = time.monotonic()

        def copy() -> ArtifactData:
            path = artifact_path(point.run_id, point_index(point.point_id), point.attempt, source.name)
            return store.put(source, path, after_piece)

        super().__init__(copy)
