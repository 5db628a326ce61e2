"""Reads runs for rules: an outline of every measured run, and on demand the points and metrics of a few.

The database groups the points of a run by their coordinates, so that a store of a million points takes tens of
thousands of rows, and the points themselves are read of the few runs that a verdict rests on.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import Select, Table, Text, cast, exists, func, select

from jobs.schema.axes import AXES, MORE, more_columns
from jobs.schema.states import FAILED, Origin, PointState
from orchestrator.judge.filters import LENGTH, Row
from orchestrator.judge.hardware import RANKS
from orchestrator.store import Store
from orchestrator.store.models import Attempt, Environment, Metric, Point, Run
from orchestrator.store.views import v_metrics, v_points

Series = tuple[Any, ...]
_SERIES = (*(axis.name for axis in AXES if axis.in_series), "gpu", "kind")
_AXES = tuple(axis.name for axis in AXES if axis.name != LENGTH)
_coordinates = itemgetter(*_AXES, "gpu", "kind", "run_name")
_ALL = (*(axis.name for axis in AXES), "gpu")
_POINT = ("run_id", "run_name", "kind", "point_id", "label", "state", "reason", *_ALL)
_METRIC = ("run_id", "run_name", "origin", "source", "kind", "point_id", "label", *_ALL)
_METRIC += ("metric", "unit", "value", "ci_low", "ci_high", "p10", "p90", "per_sequence")


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
    def by_machine(self) -> tuple[tuple[Part, ...], ...]:
        """The parts by device, card and number of GPUs, which is all that a hardware asks."""
        groups: dict[tuple, list[Part]] = defaultdict(list)
        for part in self.parts:
            groups[part.row["device"], part.row["gpu"], part.row.get(RANKS)].append(part)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def own_columns(self) -> tuple[str, ...]:
        """The columns of the kind-specific axes that any of the points has, sorted."""
        return tuple(sorted({name for part in self.parts for name, _ in _own_axes(part.row)}))

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
    table = Point.__table__.c
    # JSON has no equality on Postgres, and its text has. Equal axes in another order are put together by `_outline`.
    columns = (Point.run_id, Attempt.state, Environment.gpu, cast(Point.more_axes, Text), *(table[a] for a in _AXES))
    length = table[LENGTH]
    query = (
        select(*columns, func.count(), func.count(length), func.aggregate_strings(cast(length, Text), ","))
        .select_from(Point)
        .join(Run, Run.id == Point.run_id)
        .join(Point.outcome)
        .join(Environment, Environment.id == Attempt.environment_id, isouter=True)
        .where(Run.origin == Origin.MEASURED)
        .group_by(*columns)
        .order_by(Point.run_id)
    )
    if not everything:
        query = query.where(Point.run_id.in_([run["run_id"] for run in runs]))
    shapes: dict[frozenset, Shape] = {}
    known = {run["run_id"]: run for run in runs}
    by_run: dict[str, Outline] = {}
    with store.session() as session:
        for run_id, groups in groupby(session.execute(query), itemgetter(0)):
            if run_id in known:  # or it has begun since
                by_run[run_id] = _outline(known[run_id], groups, shapes)
    return {run_id: by_run.get(run_id) or _outline(run, (), shapes) for run_id, run in known.items()}


def _outline(run: Row, groups: Iterable[Sequence[Any]], shapes: dict[frozenset, Shape]) -> Outline:
    states: Counter[PointState] = Counter()
    parts: dict[tuple, tuple[Row, set[Any]]] = {}
    failed: dict[tuple, tuple[Row, set[Any]]] = {}
    for _, state, card, more, *values, number, with_length, text in groups:
        states[state] += number
        row = dict(zip(_AXES, values, strict=True))
        row |= {"gpu": card or run["gpu"], "kind": run["kind"], "run_name": run["name"]}
        row |= {MORE + name: value for name, value in (json.loads(more or "{}") or {}).items()}
        lengths = _lengths(text) | ({None} if with_length < number else frozenset())
        key = (*_coordinates(row), *_own_axes(row))
        for group in (parts, failed) if state in FAILED else (parts,):
            group.setdefault(key, (row, set()))[1].update(lengths)
    identity = frozenset((key, frozenset(lengths)) for key, (_, lengths) in parts.items())
    if identity not in shapes:
        shapes[identity] = Shape(len(shapes), _parts(parts))
    return Outline(shapes[identity], states, _parts(failed))


@lru_cache(maxsize=10_000)  # sweeps repeat each other's
def _lengths(text: str | None) -> frozenset[Any]:
    return frozenset(map(int, text.split(","))) if text else frozenset()


def _parts(groups: Mapping[tuple, tuple[Row, set[Any]]]) -> tuple[Part, ...]:
    return tuple(Part(row, series_of(row), frozenset(lengths)) for row, lengths in groups.values())


def series_of(point: Row) -> Series:
    """The series of a row of v_points: its coordinates but the length."""
    return (*(point[name] for name in _SERIES), *_own_axes(point))


def _own_axes(point: Row) -> list[tuple[str, Any]]:
    """The kind-specific axes of a point with their values."""
    return [(name, point[name]) for name in more_columns(point) if point[name] is not None]


@dataclass(frozen=True, eq=False)
class Source:
    """The measured runs in `run_ids` (None: all) of a store. Reads without pandas, which costs more than the reading.

    Raises:
        StoreUnavailable: in each of its reads.
    """

    store: Store
    run_ids: Sequence[str] | None
    _known: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    def having(self, kind: str, metric: str) -> frozenset[str]:
        """Ids of the runs of a kind of which any point has a metric."""
        if (kind, metric) not in self._known:
            of_run = select(Point.id).join(Point.metrics)
            measured = exists(of_run.where(Point.run_id == Run.id, Metric.name == metric).correlate(Run))
            query = select(Run.id).where(Run.origin == Origin.MEASURED, Run.kind == kind, measured)
            if self.run_ids is not None:
                query = query.where(Run.id.in_(self.run_ids))
            with self.store.session() as session:
                self._known[kind, metric] = frozenset(session.scalars(query))
        return self._known[kind, metric]

    def points(self, run_id: str, gpu: str | None) -> list[Row]:
        """Rows of the points of a run, by number; one without a GPU of its own gets `gpu`, the run's."""
        query = _columns(v_points, _POINT).where(v_points.c.run_id == run_id).order_by(v_points.c.number)
        return [row | {"gpu": row["gpu"] or gpu} for row in self._rows(query, _POINT)]

    def metric(self, run_id: str, metric: str, own_columns: Iterable[str]) -> list[Row]:
        """Rows of one metric of a run, by point, each with all `own_columns`.

        A value that is missing or no number is None, so that equal shapes compare equal.
        """
        query = _columns(v_metrics, _METRIC).where(v_metrics.c.run_id == run_id, v_metrics.c.metric == metric)
        empty = dict.fromkeys(own_columns)
        return [
            empty | {name: None if value != value else value for name, value in row.items()}
            for row in self._rows(query.order_by(v_metrics.c.point_id), _METRIC)
        ]

    def environments(self, run_id: str) -> dict[str, Any]:
        """The environment of each point of a run that has one, by id."""
        query = select(Point.id, Environment.content).join(Point.outcome)
        query = query.join(Environment, Environment.id == Attempt.environment_id).where(Point.run_id == run_id)
        with self.store.session() as session:
            return {point_id: content or {} for point_id, content in session.execute(query)}

    def _rows(self, query: Select, names: Sequence[str]) -> list[dict[str, Any]]:
        with self.store.session() as session:
            return [
                dict(zip(names, values, strict=True)) | {MORE + name: value for name, value in (more or {}).items()}
                for *values, more in session.execute(query)
            ]


def _columns(view: Table, names: Sequence[str]) -> Select:
    return select(*(view.c[name] for name in names), view.c.more_axes)
