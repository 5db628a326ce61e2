"""Inserts what a run holds that the database does not have yet, many rows at a time.

The rows are those that `writer.apply` writes record by record, in several statements each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Insert, insert, inspect
from sqlalchemy.orm import Session

from orchestrator.records import EventRecord, OutcomeRecord, PointRecord
from orchestrator.store import rows, writer
from orchestrator.store.models import Environment, Event, Metric, Point

_ROWS = 500
_COLUMNS = [attribute.key for attribute in inspect(Point).column_attrs]
_T = TypeVar("_T")


def add_points(session: Session, ended: Iterable[tuple[PointRecord, OutcomeRecord]]) -> None:
    """Insert points with the ends of their only attempts. Raises StoreError."""
    environments: set[str] = set()
    for some in _batches(ended):
        for _, outcome in some:
            rows.refuse_untrue(outcome)
            if outcome.environment and (made := rows.environment(outcome.environment))["id"] not in environments:
                writer.insert_new(session, Environment, [made])
                environments.add(made["id"])
        session.execute(_insert(Point), [_point(*records) for records in some])
        if metrics := [metric for _, outcome in some for metric in rows.metrics(outcome)]:
            session.execute(_insert(Metric), metrics)


def add_events(session: Session, events: Iterable[EventRecord]) -> None:
    """Insert events of a run; one that is there twice is stored once."""
    for some in _batches(events):
        writer.insert_new(session, Event, [rows.event(event) for event in some])


def _insert(table: type[Point] | type[Metric]) -> Insert:
    """An insertion of rows at once, also where they lack different columns."""
    return insert(table).execution_options(render_nulls=True)


def _point(planned: PointRecord, ended: OutcomeRecord) -> dict[str, Any]:
    point = Point(id=planned.point_id, run_id=planned.run_id)
    rows.reach(point, planned)
    rows.plan(point, planned)
    rows.end(point, ended)
    return {name: getattr(point, name) for name in _COLUMNS}


def _batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    left = iter(items)
    while some := list(islice(left, _ROWS)):
        yield some
