"""Outlines of measured runs: what rules ask of all runs, read without a row for each of their points.

The database groups the points of a run by their coordinates, so that a store of a million points takes tens of
thousands of rows, and the points themselves are read of the few runs that a verdict rests on.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import Select, Text, cast, func, select

from jobs.schema.axes import AXES, MORE, more_columns
from jobs.schema.states import FAILED, Origin, PointState
from orchestrator.judge.filters import LENGTH, Row
from orchestrator.judge.hardware import RANKS
from orchestrator.store import Store
from orchestrator.store.models import Attempt, Environment, Point
from orchestrator.store.models import Run as StoredRun

Series = tuple[Any, ...]
_SERIES = (*(axis.name for axis in AXES if axis.in_series), "gpu", "kind")
_AXES = tuple(axis.name for axis in AXES if axis.name != LENGTH)
_coordinates = itemgetter(*_AXES, "gpu", "kind", "run_name")


@dataclass(frozen=True)
class Part:
    """Points of a run that differ in their lengths alone: a row of the others' coordinates, the series, the lengths."""

    row: Row
    series: Series
    lengths: frozenset[Any]


@dataclass(frozen=True)
class Shape:
    """Distinct coordinates of a run's points, whatever became of them; runs of equal shape share one."""

    number: int
    parts: tuple[Part, ...]

    @cached_property
    def places(self) -> tuple[tuple[Part, ...], ...]:
        """The parts by where they were measured, which is all that a hardware asks: device, card, number of GPUs."""
        found: dict[tuple, list[Part]] = defaultdict(list)
        for part in self.parts:
            found[part.row["device"], part.row["gpu"], part.row.get(RANKS)].append(part)
        return tuple(map(tuple, found.values()))

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The columns of the kind-specific axes that any of the points has, sorted."""
        return tuple(sorted({name for part in self.parts for name, _ in _own(part.row)}))

    @cached_property
    def ranks(self) -> int:
        """The most GPUs that one of the points used together."""
        return max((part.row.get(RANKS) or 1 for part in self.parts), default=1)


@dataclass(frozen=True)
class Outline:
    """A run's shape, its number of points by state, and the parts that failed."""

    shape: Shape
    states: Mapping[PointState, int]
    failed: tuple[Part, ...]

    @property
    def points(self) -> int:
        """The number of the run's points."""
        return sum(self.states.values())


def outlines(store: Store, runs: Sequence[Row], *, everything: bool) -> dict[str, Outline]:
    """The outline of each run, by id; `everything`: these are all measured runs.

    A failed point may lack its GPU; it gets its run's GPU, so that a rule about one GPU sees the failure.
    """
    shapes, lengths = _Shapes(), _Lengths()
    query = _grouped(None if everything else [run["run_id"] for run in runs])
    known = {run["run_id"]: run for run in runs}
    found: dict[str, Outline] = {}
    with store.session() as session:
        for run_id, groups in groupby(session.execute(query), itemgetter(0)):
            if run_id in known:  # or it has begun since
                found[run_id] = _outline(known[run_id], groups, shapes, lengths)
    return {run_id: found.get(run_id) or _outline(known[run_id], (), shapes, lengths) for run_id in known}


def series_of(point: Row) -> Series:
    """The series of a row of v_points: its coordinates but the length."""
    return (*(point[name] for name in _SERIES), *_own(point))


def _grouped(run_ids: Sequence[str] | None) -> Select:
    """Groups of points with equal coordinates and state: their number, how many have a length, and the lengths."""
    table = Point.__table__.c
    # JSON has no equality on Postgres, and its text has. Equal axes in another order are put together by `_outline`.
    more = cast(Point.more_axes, Text)
    columns = (Point.run_id, Attempt.state, Environment.gpu, more, *(table[name] for name in _AXES))
    length = table[LENGTH]
    query = (
        select(*columns, func.count(), func.count(length), func.aggregate_strings(cast(length, Text), ","))
        .select_from(Point)
        .join(StoredRun, StoredRun.id == Point.run_id)
        .join(Point.outcome)
        .join(Environment, Environment.id == Attempt.environment_id, isouter=True)
        .where(StoredRun.origin == Origin.MEASURED)
    )
    if run_ids is not None:
        query = query.where(Point.run_id.in_(run_ids))
    return query.group_by(*columns).order_by(Point.run_id)


def _outline(run: Row, groups: Iterable[Sequence[Any]], shapes: _Shapes, known: _Lengths) -> Outline:
    states: Counter[PointState] = Counter()
    parts, failed = _Parts(), _Parts()
    for _, state, card, more, *values, number, with_length, text in groups:
        states[state] += number
        row = dict(zip(_AXES, values, strict=True))
        row |= {"gpu": card or run["gpu"], "kind": run["kind"], "run_name": run["name"]}
        row |= {MORE + name: value for name, value in (json.loads(more or "{}") or {}).items()}
        lengths = known.of(text) | ({None} if with_length < number else frozenset())
        parts.add(row, lengths)
        if state in FAILED:
            failed.add(row, lengths)
    return Outline(shapes.of(parts), states, tuple(failed))


class _Parts:
    """Parts in the making, by their coordinates."""

    def __init__(self) -> None:
        self._found: dict[tuple, tuple[Row, set[Any]]] = {}

    def add(self, row: Row, lengths: Iterable[Any]) -> None:
        key = (*_coordinates(row), *_own(row))
        self._found.setdefault(key, (row, set()))[1].update(lengths)

    def __iter__(self) -> Iterator[Part]:
        return (Part(row, series_of(row), frozenset(lengths)) for row, lengths in self._found.values())

    @property
    def identity(self) -> frozenset[tuple]:
        return frozenset((key, frozenset(lengths)) for key, (_, lengths) in self._found.items())


class _Shapes:
    """Shapes of runs; equal runs share one."""

    def __init__(self) -> None:
        self._known: dict[frozenset[tuple], Shape] = {}

    def of(self, parts: _Parts) -> Shape:
        """The shape of a run with these parts."""
        identity = parts.identity
        if identity not in self._known:
            self._known[identity] = Shape(len(self._known), tuple(parts))
        return self._known[identity]


class _Lengths:
    """Lengths as the database joins them; sweeps repeat each other's."""

    def __init__(self) -> None:
        self._known: dict[str | None, frozenset[int]] = {None: frozenset()}

    def of(self, text: str | None) -> frozenset[int]:
        """The lengths of a text like "512,1024"; none of None."""
        if text not in self._known:
            assert text is not None, "known from the beginning"
            self._known[text] = frozenset(map(int, text.split(",")))
        return self._known[text]


def _own(point: Row) -> list[tuple[str, Any]]:
    """The kind-specific axes of a point with their values."""
    return [(name, point[name]) for name in more_columns(point) if point[name] is not None]
