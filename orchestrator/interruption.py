"""Ctrl-C while a command begins or ends: an exit code and no traceback. Imports next to nothing, as it comes first."""

import os
import signal
from types import FrameType

INTERRUPTED = 130  # exit code of a process that SIGINT ended, as shells give it


def end_during_imports() -> None:
    """Let SIGINT end the process at once while it imports a module, unless it is ignored or handled otherwise.

    There a KeyboardInterrupt may become another error, or be printed and lost in a callback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def end_at_once() -> None:
    """Let SIGINT end the process at once from here on: Python's own end would print a traceback of it."""
    if signal.getsignal(signal.SIGINT) in (_interrupt, signal.default_int_handler):
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
