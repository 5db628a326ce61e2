"""Statements that a database is asked, counted by SQLAlchemy's event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, event


@contextmanager
def counted(engine: Engine, name: str = "before_cursor_execute") -> Iterator[list[object]]:
    """The statements of the context, as they are sent."""
    calls: list[object] = []

    def count(*args: object) -> None:
        calls.append(args[2])

    event.listen(engine, name, count)
    try:
        yield calls
    finally:
        event.remove(engine, name, count)
