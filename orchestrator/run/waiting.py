"""Waiting for a cluster to have room, for as long as it can ever have it."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.run.executor import ExecutorError, ExecutorGone

NEVER_S = 600.0
"""Seconds without any node that could run a point, busy or not, after which a run no longer waits for one."""

_LOOK_S = 5.0


class RoomWatch:
    """Whether the cluster has, free or busy, a node that can run a point. Nodes come and go while a run waits.

    Args:
        check: raises ExecutorError while no node can.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._possible = self._looked = time.monotonic()

    def look(self) -> None:
        """Look every 5 s. Raises ExecutorGone once no node could for NEVER_S seconds."""
        clock = time.monotonic()
        if clock - self._looked < _LOOK_S:
            return
        self._looked = clock
        try:
            self._check()
        except ExecutorError as err:
            if clock - self._possible >= NEVER_S:
                reason = "; ".join(str(err).splitlines())
                raise ExecutorGone(f"waited {NEVER_S:g} s for a node that can run a point: {reason}") from None
        else:
            self._possible = clock
