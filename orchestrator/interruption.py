"""Ctrl-C while a command begins or ends: an exit code and no traceback. Imports next to nothing, as it comes first."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code of a process that SIGINT ended, as shells give it."""


class AtOnce:
    """A context that SIGINT ends together with the process, unless it was ignored at the start.

    For imports: there a KeyboardInterrupt may become another error, or be printed and lost in a callback.
    """

    def __enter__(self) -> None:
        self._raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._raises:
            signal.signal(signal.SIGINT, _end)

    def __exit__(self, *_: object) -> None:
        if self._raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once() -> None:
    """Let SIGINT end the process at once from here on: Python's own end would print a traceback of it."""
    AtOnce().__enter__()


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
