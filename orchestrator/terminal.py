"""Everything that a command prints: text as it is, which no terminal acts on, in whatever encoding there is."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.text import Text

from jobs.plain_text import in_a_line, printable

_MISTAKES = 20  # lines of one error; who mends these sees the next ones


def prepare() -> None:
    """Let standard output and error take any text: what their encoding lacks is written as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
