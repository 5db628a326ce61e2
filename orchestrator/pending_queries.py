"""Queries that the database has not answered yet, by thread: how long a call in another thread waits for it."""

from __future__ import annotations

import threading
import time

_sent: dict[int, float] = {}  # thread id -> time (monotonic)


def sent() -> None:
    """Note that this thread waits for the database from now on."""
    _sent[threading.get_ident()] = time.monotonic()


def answered() -> None:
    """Note that this thread waits for it no more."""
    _sent.pop(threading.get_ident(), None)


def waited_s(thread: int) -> float:
    """Seconds for which the database has owed a thread an answer; 0 while it owes none."""
    since = _sent.get(thread)
    return 0.0 if since is None else time.monotonic() - since
