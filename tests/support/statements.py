"""Statements that a database is asked."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event


@contextmanager
def counted(engine: Engine, name: str = "before_cursor_execute") -> Iterator[list[object]]:
    """The statements of the context, as SQLAlchemy hands them to the driver: one for many rows at once."""
    calls: list[object] = []

    def count(*args: object) -> None:
        calls.append(args[2])

    event.listen(engine, name, count)
    try:
        yield calls
    finally:
        event.remove(engine, name, count)


@contextmanager
def received(engine: Engine) -> Iterator[list[str]]:
    """The statements of the context that reach the server, filled at its end: psycopg may send one for each row.

    Read from the trace of libpq, as SQLAlchemy sees neither those nor COPY.
    """
    lines: list[str] = []
    with tempfile.NamedTemporaryFile("r") as file:

        def trace(connection: Any, *_: object) -> None:
            connection.pgconn.trace(os.open(file.name, os.O_WRONLY | os.O_APPEND))

        def untrace(connection: Any, *_: object) -> None:
            connection.pgconn.untrace()

        listeners = {"checkout": trace, "checkin": untrace}
        for name, listener in listeners.items():
            event.listen(engine.pool, name, listener)
        try:
            yield lines
        finally:
            for name, listener in listeners.items():
                event.remove(engine.pool, name, listener)
        lines += [line for line in file if re.search(r"\tF\t\d+\t(Query|Execute)\t", line)]
