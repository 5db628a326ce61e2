"""Reasons for which a training ends early."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from jobs.schema.point import Interrupted


class Ineffective(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """A requested setting had no effect."""


class Diverged(Exception):  # noqa: N818
    """The loss became infinite or NaN."""


class Stopped(Exception):  # noqa: N818
    """A signal asked the training to end."""


class Suspended(Stopped, Interrupted):
    """A signal asked the training to end, and nothing is lost: it left a checkpoint, or had not begun."""

    @classmethod
    def at(cls, step: int, text: str) -> Self:
        """The exception of a training that ended as `text` says, and goes on from the checkpoint of `step`."""
        return cls(f"{text}; go on from the checkpoint of step {step}: nsa submit SPEC --resume RUN")


class MemoryLimit(Exception):  # noqa: N818
    """A rank of a soak held more memory than its limit."""


class RankFailed(RuntimeError):  # noqa: N818
    """One of several ranks failed; the first line names the rank and the cause."""


class RankDied(RankFailed):
    """A rank's process ended without a word: it was killed, or exited."""


@contextmanager
def noting_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of its usual effect; outside of the main thread nothing sets it."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
