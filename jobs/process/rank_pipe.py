"""A named pipe for the messages of ranks on one host: a line of JSON each.

A line is shorter than PIPE_BUF, so that lines of several ranks never mix, and a rank that is killed leaves no lock.
"""

from __future__ import annotations

import json
import os
import select
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from jobs.process.rank_messages import Message

_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(Message)}


class PipeWriter:
    """A rank's end of the pipe: call it with a message to send it."""

    def __init__(self, pipe: Path) -> None:
        self._file = os.open(pipe, os.O_WRONLY)

    def __call__(self, message: Message) -> None:
        os.write(self._file, json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n")


class PipeReader:
    """The other end of the pipe, which it makes."""

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self._file = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # its own writer, so that it never reads end of file
        self._rest = b""

    def messages(self, timeout: float) -> list[Message]:
        """Messages that arrived; waits up to `timeout` seconds for the first."""
        if select.select([self._file], [], [], timeout)[0]:
            self._rest += os.read(self._file, 1 << 16)
        *lines, self._rest = self._rest.split(b"\n")
        return [_decoded(json.loads(line)) for line in lines]

    def close(self) -> None:
        os.close(self._file)


def _decoded(data: list[Any]) -> Message:
    name, fields = data
    return _TYPES[name](**fields)
