"""Copies of an attempt's files to the artifact store, in the background, as a store may hang."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.background import in_background
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore, Source, point_index
from orchestrator.store.records import ArtifactData, ArtifactRecord, EventRecord

if TYPE_CHECKING:
    from orchestrator.execute.supervisor import Assignment

STALL_S = 60.0
"""Seconds without a copied piece after which the files that wait for the store are given up."""

_POLL_S = 0.1


class ArtifactCopies(AbstractContextManager["ArtifactCopies"]):
    """Copies the files of one attempt, one after the other; a store that hangs holds up the end of the attempt alone.

    What is being copied when the block ends is abandoned. `url` is the store's; None: no file is kept.
    """

    def __init__(self, assignment: Assignment, url: str | None) -> None:
        self._assignment, self._url = assignment, url
        self._names: set[str] = set()
        self._pending: deque[Source] = deque()  # the first is being copied
        self._copy: Future[ArtifactData] | None = None
        self._last_piece = 0.0  # when the last piece of it was copied
        self._abandoned = threading.Event()
        self._store = ArtifactStore(url or "")

    def __exit__(self, *_: object) -> None:
        self._abandoned.set()

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
            copy = self._copy = self._copy or self._begin(source)
            if wait([copy], timeout).done:
                self._copy = None
                self._pending.popleft()
                try:
                    yield ArtifactRecord(**of_attempt.ids, artifact=copy.result())
                except ArtifactError as err:
                    yield of_attempt.warning(f"file not kept: {err}")
                except Exception as err:  # it must not cost the other files
                    yield of_attempt.warning(f"file not kept: {source.name!a}: {type(err).__name__}: {err}")
            elif time.monotonic() - self._last_piece < STALL_S:
                return
            else:
                self._abandoned.set()
                self._copy, self._store = None, ArtifactStore(self._store.url)  # later files get another connection
                stalled = list(self._pending)
                self._pending.clear()
                reason = f"the artifact store {self._url} did not answer for {STALL_S:g} s"
                yield from (of_attempt.warning(f"file not kept: {each.name!a}: {reason}") for each in stalled)

    def rest(
        self, sources: Sequence[Source], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[ArtifactRecord | EventRecord]:
        """Copy the files of the attempt's end, too, and yield the records of all that remain, until `stopped`."""
        self.add(sources)
        while self._pending and not stopped():
            for record in self.records(_POLL_S):
                yield record
                if stopped():
                    return

    def _begin(self, source: Source) -> Future[ArtifactData]:
        """Copy a file in a thread of its own, which ends with the next piece once nobody waits for it."""
        attempt, abandoned = self._assignment, threading.Event()
        self._abandoned, self._last_piece = abandoned, time.monotonic()

        def after_piece() -> None:
            if abandoned.is_set():
                raise InterruptedError("nobody waits for the copy")
            self._last_piece = time.monotonic()

        path = f"{attempt.run_id}/{point_index(attempt.point_id):04d}/{attempt.attempt}/{source.name}"
        return in_background(partial(self._store.put, source, path, after_piece))
