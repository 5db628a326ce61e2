"""Calls that may never return, each in a thread of its own: a signal is answered meanwhile.

Ray waits for a cluster that says nothing inside its native code, minutes long, and no signal ends that in Python's main
thread. The thread of such a call is left behind; `leave` then ends the process without waiting for it.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NoReturn, TypeVar

T = TypeVar("T")

_LOOK_S = 0.1  # a signal may reach another thread, and then ends no wait of the main one
_threads: list[threading.Thread] = []


def in_background(call: Callable[[], T]) -> Future[T]:
    """The result, to come, of a call that is made in a daemon thread."""
    made: Future[T] = Future()

    def make() -> None:
        try:
            made.set_result(call())
        except BaseException as err:
            made.set_exception(err)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    _threads[:] = [*(other for other in _threads if other.is_alive()), thread]
    return made


def interruptibly(call: Callable[[], T], look: Callable[[], object] = lambda: None) -> T:
    """Make a call that an exception of a signal handler may leave, as may one of `look`, called meanwhile."""
    made = in_background(call)
    while not wait([made], _LOOK_S).done:
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
