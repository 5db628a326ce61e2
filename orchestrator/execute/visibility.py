"""Whether the files that other nodes kept are visible on the driver's host, which looks beside the run."""

from __future__ import annotations

import time
from functools import partial

from orchestrator.artifact_url import is_local
from orchestrator.aside import Aside, NoThreadError
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore


class Visibility:
    """Looks for kept files in an artifact store that is a folder; one that hangs holds up nothing.

    One look is made at a time. Of the files that come meanwhile, the latest of each node is looked for next.

    Args:
        store: the store's URL; None: no file is kept.
    """

    def __init__(self, store: str | None) -> None:
        self._store = store if store is not None and is_local(store) else None
        self._waiting: dict[str, str] = {}  # node -> path of a file that it kept
        self._looking: tuple[str, str, Aside[bool]] | None = None  # node, path and look

    def add(self, node: str | None, path: str) -> None:
        """Have a kept file looked for."""
        if self._store is not None:
            self._waiting[node or "another node"] = path

    def warning(self, patience_s: float = 0.0) -> str | None:
        """A sentence, once a run, about a folder that is not the same one here and on a node; None until then.

        Args:
            patience_s: seconds to wait for the looks that are left, at the run's end; 0: wait for nothing.
        """
        deadline = time.monotonic() + patience_s
        while self._store is not None and (look := self._next(self._store)) is not None:
            node, path, found = look
            if not found.done(max(0.0, deadline - time.monotonic())):
                return None
            self._looking = None
            try:
                there = found.result()
            except NoThreadError as err:
                self._waiting.setdefault(node, path)  # for later, when there may be room
                return f"whether artifacts of node {node} are visible here is not known: {err}" if patience_s else None
            if not there:
                self._store = None
                advice = "name a store that all nodes reach (NSA_ARTIFACT_STORE)"
                return f"artifacts of node {node} are not visible here: {advice}"
        return None

    def _next(self, store: str) -> tuple[str, str, Aside[bool]] | None:
        """The look that is being made, else a new one; None if nothing is left to look for."""
        if self._looking is None and self._waiting:
            node = next(iter(self._waiting))
            path = self._waiting.pop(node)
            self._looking = node, path, Aside(partial(_is_there, store, path))
        return self._looking


def _is_there(store: str, path: str) -> bool:
    try:
        return ArtifactStore(store).exists(path)
    except ArtifactError:
        return False
