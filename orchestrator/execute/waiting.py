"""Whether a cluster still answers, and can ever have the room that a run waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.aside import Aside, NoThreadError
from orchestrator.execute.executor import ExecutorError, ExecutorGone
from orchestrator.execute.ray_folder import answers

NEVER_S = 600.0
"""Seconds without any node that could run a point, busy or not, after which a run no longer waits for one."""

_LOOK_S = 5.0
_GONE_S = 30.0  # after 60 s without its head Ray ends the driver, which could then record nothing


class ClusterWatch:
    """Whether the cluster's head still answers, and the cluster can run a point.

    Args:
        head: its address, "host:port".
        check: asks the head, in another thread; raises ExecutorError while no node can run a point.
    """

    def __init__(self, head: str, check: Callable[[], None]) -> None:
        self._head = head
        self._room = RoomWatch(check)
        self._asked: Aside[bool] | None = None
        self._looked = time.monotonic()
        self._silent: float | None = None  # since when, if the last question has no answer yet

    def look(self) -> None:
        """Look every 5 s, and wait for nothing: a frozen head takes a question and never answers.

        Raises ExecutorGone once the head was silent for 30 s, or as `RoomWatch.look` does.
        """
        clock = time.monotonic()
        if self._asked is None:
            if clock - self._looked >= _LOOK_S:
                self._looked = clock
                self._silent = clock if self._silent is None else self._silent
                self._asked = Aside(self._ask)
            return
        if self._asked.done():
            asked, self._asked = self._asked, None
            if _answered(asked):
                self._silent = None
        if self._silent is not None and clock - self._silent > _GONE_S:
            raise ExecutorGone(f"the Ray cluster went away: its head at {self._head} does not answer")

    def _ask(self) -> bool:
        """Whether the head answers. One that is silent is asked for no more, as Ray would end this process over it."""
        if not answers(self._head):
            return False
        self._room.look()
        return True


def _answered(asked: Aside[bool]) -> bool:
    try:
        return asked.result()
    except NoThreadError:  # of this host: the head was not asked, so it is not silent
        return True


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
