"""Verdicts read a few rows of each run, however many points it has, and the points of the runs they rest on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from statements import counted

from jobs.schema.states import PointState
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import TargetVerdict, evaluate
from orchestrator.store import Store
from orchestrator.store.records import Record

RUNS, LENGTHS = 5, tuple(range(1024, 1044))


def test_runs_that_a_verdict_does_not_rest_on_are_not_read(sqlite_store: Store, sweep):
    """Older runs, of the same kind or another, whose points are ok or failed."""
    sqlite_store.apply_many(whole(sweep))
    before, statements, rows = cost(sqlite_store)
    for number in range(RUNS):
        first, *rest = sweep(f"r{number}", lengths=LENGTHS[number % 2 :], failures={PointState.HANG: "silent"})
        sqlite_store.apply_many([first.model_copy(update={"kind": ("bench", "scaling")[number % 2]}), *rest])
    after, more_statements, more_rows = cost(sqlite_store)
    assert more_statements == statements
    assert more_rows - rows < RUNS * 20  # of 40 points a run, with 4 metrics each
    assert after == before


def whole(sweep) -> list[Record]:
    """A later sweep of more lengths than the others."""
    records = sweep("whole", lengths=(*LENGTHS, 2048, 4096))
    return [record.model_copy(update={"at": record.at.replace(year=2027)}) for record in records]


def cost(store: Store) -> tuple[list[TargetVerdict], int, int]:
    """All verdicts, the number of statements that they took, and that of the rows fetched."""
    with counted(store.engine) as statements, fetched(store) as rows:
        verdicts = evaluate(store, load_gates())
    return verdicts, len(statements), len(rows)


@contextmanager
def fetched(store: Store) -> Iterator[list[tuple]]:
    """The rows that the database gives in the context."""
    rows: list[tuple] = []

    def take(_: sqlite3.Cursor, row: tuple) -> tuple:
        rows.append(row)
        return row

    with store.engine.connect() as connection:  # the pool's only one
        database = connection.connection.dbapi_connection
    assert isinstance(database, sqlite3.Connection)
    database.row_factory = take
    try:
        yield rows
    finally:
        database.row_factory = None
