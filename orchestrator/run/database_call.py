"""Calls of the database from the driver's main thread: a stop waits for none, and one without an answer is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from orchestrator import pending_queries, terminal
from orchestrator.aside import Aside
from orchestrator.database_url import SETTING, StoreUnavailable

T = TypeVar("T")

TIMEOUT_S = 30.0
"""Seconds without an answer, as those of a locked SQLite file, after which a call fails."""
STOP_S = 0.8
"""The same once the driver is to end: Ray kills a stopped job after three seconds."""
SLOW_S = 1.5
"""Seconds without an answer after which the user is told."""

_LOOK_S = 0.1  # a signal may reach another thread, and then ends no wait of the main one
_turn = threading.Lock()


def never() -> None:
    """No reason to stop: that of a caller whom signals interrupt."""


def call_database(
    database: str, call: Callable[[], T], timeout_s: float = TIMEOUT_S, stopped: Callable[[], str | None] = never
) -> T:
    """Result of a call, made in a thread of its own, which is left behind where the database does not answer.

    Args:
        database: its URL without a password, for messages.
        stopped: a reason to wait no longer.

    Raises:
        StoreUnavailable: the database has owed an answer for `timeout_s` seconds, or the driver was stopped.
    """
    made, told = Aside(partial(_in_turn, call)), False
    while not made.done(_LOOK_S):
        waited_s = pending_queries.waited_s(made.thread)
        silent = f"{SETTING}: {database!r}: has not answered for {waited_s:.1f} s"
        if reason := stopped():
            raise StoreUnavailable(f"{SETTING}: {database!r}: is not waited for after {reason}")
        if waited_s >= timeout_s:
            raise StoreUnavailable(f"{silent}; end what locks or stops it")
        if waited_s >= SLOW_S and not told:
            told = True
            terminal.warn(f"warning: {silent}; it is waited for, {timeout_s:g} s at most")
    return made.result()


def _in_turn(call: Callable[[], T]) -> T:
    """Make a call after those that were left behind: the database gets all in their order."""
    pending_queries.sent()
    with _turn:
        pending_queries.answered()
        return call()
