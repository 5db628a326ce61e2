"""Calls that may never return, each in a thread of its own: a signal is answered meanwhile.

Ray waits for a cluster that says nothing inside its native code, minutes long, and no signal ends that in Python's main
thread. The thread of such a call is left behind; `leave` then ends the process without waiting for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")

_LOOK_S = 0.1  # a signal may reach another thread, and then ends no wait of the main one
_threads: list[threading.Thread] = []


class BackgroundCall(Generic[T]):
    """A call that is being made in a daemon thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._make, daemon=True)
        self._thread.start()
        _threads[:] = [other for other in _threads if other.is_alive()]
        _threads.append(self._thread)

    def done(self, timeout: float = 0.0) -> bool:
        """Whether the call has returned or failed, after at most `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> T:
        """The result of a call that is done. Raises what the call raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def _make(self) -> None:
        try:
            self._result = self._call()
        except BaseException as err:
            self._error = err


def interruptibly(call: Callable[[], T], look: Callable[[], object] = lambda: None) -> T:
    """Make a call that an exception of a signal handler may leave, as may one of `look`, called meanwhile."""
    made = BackgroundCall(call)
    while not made.done(_LOOK_S):
        look()
    return made.result()


def leave(code: int, *, at_once: bool) -> NoReturn:
    """End this process; without Python's own end, and Ray's in it, if `at_once` or where a call was left.

    Ray says goodbye to a cluster, and waits for it minutes long if it is silent. One that hears nothing sees the end.
    """
    for thread in _threads:
        thread.join(_LOOK_S)
    if not at_once and not any(thread.is_alive() for thread in _threads):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
