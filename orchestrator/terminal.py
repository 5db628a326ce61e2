"""Prints text with control characters escaped, in any encoding of the terminal."""

import errno
import os
import select
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

from rich.console import Console
from rich.text import Text

from jobs.schema.plain_text import in_a_line, printable

_MISTAKES = 20  # lines of one error; who mends these sees the next ones
_WIDTH_OF_A_PIPE = 200
output_lost = False  # whether a part of the output could not be written, although somebody may miss it


class _Outlet(FileIO):
    """A standard stream's file that drops what can no longer be written.

    Measuring goes on when the reader of a pipe ends, a disk fills or a terminal is closed. But for a pipe's reader,
    who wants no more, the first loss is reported on standard error.
    """

    def write(self, data: Any, /) -> int:
        global output_lost
        try:
            while (count := super().write(data)) is None:  # a pipe that does not block, and is full
                select.select([], [self], [])
            return count
        except OSError as err:
            if err.errno != errno.EPIPE and not output_lost:
                output_lost = True
                with suppress(OSError):
                    os.write(2, f"error: output: cannot be written ({err.strerror}); the rest is not shown\n".encode())
            return memoryview(data).nbytes


def prepare() -> None:
    """Let standard output and error take any text: what their encoding lacks is escaped, what fails is dropped."""
    sys.stdout = _lasting(sys.stdout, sys.__stdout__)
    sys.stderr = _lasting(sys.stderr, sys.__stderr__)


def _lasting(stream: Any, original: Any) -> Any:
    if stream is None:  # closed at start
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    if stream is not original:  # put there by this process itself
        return stream
    with suppress(OSError):
        stream.flush()
    outlet = BufferedWriter(_Outlet(stream.fileno(), "wb", closefd=False))
    return TextIOWrapper(outlet, stream.encoding, "backslashreplace", line_buffering=True)


def say(text: object = "", end: str = "\n") -> None:
    """Print text on standard output, at once."""
    print(printable(str(text)), end=end, flush=True)


def warn(text: object) -> None:
    """Print a line on standard error, at once."""
    print(in_a_line(text), file=sys.stderr, flush=True)


def complain(error: Exception) -> None:
    """Print an error's `mistakes` on standard error, each in a line."""
    for line in mistakes(error):
        warn(f"error: {line}")


def mistakes(error: Exception) -> list[str]:
    """An error's lines, each a mistake; of very many the first ones and their number."""
    lines = str(error).split("\n")
    left = len(lines) - _MISTAKES
    return [*lines[:_MISTAKES], *([f"and {left:,} more mistakes; mend these first"] if left > 0 else [])]


class PlainConsole(Console):
    """A console whose texts are shown as they are: no markup that they hold, no emoji, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def wide_console() -> Console:
    """Console on standard output, 200 columns wide if that is a file or a pipe; it breaks no line but a table's."""
    width = None if Console().is_terminal else _WIDTH_OF_A_PIPE
    return PlainConsole(width=width, markup=False, soft_wrap=True)
