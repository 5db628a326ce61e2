"""Inserts what a run holds that the database does not have yet, many rows at a time.

The rows are those that `writer.apply` writes record by record, in several statements each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from sqlalchemy import insert, inspect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from orchestrator.store import rows, writer
from orchestrator.store.models import Environment, Event, Metric, Point
from orchestrator.store.records import EventRecord, OutcomeRecord, PointRecord

ROWS = 1_000
"""Points of a batch, with their metrics: a few MB, which any server stores within the time limit of a statement."""
_COLUMNS = [attribute.key for attribute in inspect(Point).column_attrs]
_T = TypeVar("_T")


def add_points(session: Session, ended: Iterable[tuple[PointRecord, OutcomeRecord]]) -> None:
    """Insert points with the ends of their only attempts. Raises StoreError."""
    environments: set[str] = set()
    for some in _batches(ended):
        made = {}
        for _, outcome in some:
            rows.refuse_untrue(outcome)
            if outcome.environment:
                found = rows.environment(outcome.environment)
                made[found["id"]] = found
        if new := [environment for key, environment in made.items() if key not in environments]:
            writer.insert_new(session, Environment, new)
        environments |= made.keys()
        _insert(session, Point, [_point(*records) for records in some])
        _insert(session, Metric, [metric for _, outcome in some for metric in rows.metrics(outcome)])


def add_events(session: Session, events: Iterable[EventRecord]) -> None:
    """Insert events of a run; one that is there twice is stored once."""
    for some in _batches(events):
        writer.insert_new(session, Event, [rows.event(event) for event in some])


def _insert(session: Session, table: type[Point] | type[Metric], new: list[dict[str, Any]]) -> None:
    """Insert rows that have the same columns, in one statement."""
    if not new:
        return
    if session.get_bind().dialect.name == "postgresql":
        _copy(session, table, new)
    else:
        session.execute(insert(table).execution_options(render_nulls=True), new)


def _copy(session: Session, table: type[Point] | type[Metric], new: list[dict[str, Any]]) -> None:
    """Insert rows by COPY: psycopg's `executemany` sends a statement a row."""
    connection = session.connection()
    columns = {name: inspect(table).column_attrs[name].columns[0] for name in new[0]}
    converters = {
        name: column.type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
        for name, column in columns.items()
    }
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
        sql.Identifier(table.__tablename__),
        sql.SQL(", ").join(sql.Identifier(column.name) for column in columns.values()),
    )
    driver: psycopg.Connection[Any] = connection.connection.driver_connection  # pyright: ignore[reportAssignmentType]
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for row in new:
                copy.write_row([convert(row[name]) if convert else row[name] for name, convert in converters.items()])
    except Exception as err:  # as SQLAlchemy raises what a driver raises, or a value that it cannot pass on
        raise DBAPIError.instance(statement.as_string(), None, err, psycopg.Error) from err


def _point(planned: PointRecord, ended: OutcomeRecord) -> dict[str, Any]:
    point = Point(id=planned.point_id, run_id=planned.run_id)
    rows.reach(point, planned)
    rows.plan(point, planned)
    rows.end(point, ended)
    return {name: getattr(point, name) for name in _COLUMNS}


def _batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    left = iter(items)
    while some := list(islice(left, ROWS)):
        yield some
