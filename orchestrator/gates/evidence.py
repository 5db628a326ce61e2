"""The measured runs that verdicts may rest on, and which of them a rule prefers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import pandas as pd
from sqlalchemy import select

from jobs.axes import AXES, MORE, more_columns
from orchestrator.analysis import Fit, scaling_fits
from orchestrator.gates.filters import LENGTH, Row, Where
from orchestrator.gates.hardware import RANKS, Hardware
from orchestrator.states import FAILED, Origin, RunState
from orchestrator.store import Store, queries
from orchestrator.store.models import Metric, Point
from orchestrator.store.views import v_points

Series = tuple[Any, ...]
Lengths = Mapping[Series, int]
_SERIES = (*(axis.name for axis in AXES if axis.in_series), "gpu", "kind")
_COORDINATES = (*(axis.name for axis in AXES if axis.name != LENGTH), "gpu", "kind", "run_name")
_coordinates = itemgetter(*_COORDINATES)
_POINT = ("run_id", "run_name", "kind", "point_id", "label", "state", *(axis.name for axis in AXES), "gpu")


@dataclass(frozen=True, eq=False)
class Scope:
    """The points that a rule is about: a filter, on one hardware if it names one.

    Attributes:
        whole: the points measured on all GPUs of the hardware; else those on one.
        lengths: the number of lengths of each series in a `Run.shape`, as far as it was asked for.
    """

    where: Where
    hardware: Hardware | None = None
    whole: bool = False
    lengths: dict[int, Lengths] = field(default_factory=dict)

    def matches(self, row: Row) -> bool:
        """Whether a row of the views v_metrics or v_points is in the scope."""
        return self._is_here(row) and self.where.matches(row)

    def matches_but_length(self, row: Row) -> bool:
        """Whether all coordinates of a row match, its length aside."""
        return self._is_here(row) and self.where.matches_but_length(row)

    def _is_here(self, row: Row) -> bool:
        return self.hardware is None or self.hardware.measured(row, whole=self.whole)

    def __str__(self) -> str:
        return str(self.where) + (f"; on {self.hardware.title}" if self.hardware else "")


@dataclass(frozen=True)
class Shape:
    """Distinct coordinates of a run's points: a row for each but its length, its series, its lengths."""

    number: int
    parts: tuple[tuple[Row, Series, frozenset[Any]], ...]


@dataclass(frozen=True, eq=False)
class Metrics:
    """The metrics of the runs in `run_ids` (None: all); a run's rows are read when a rule asks for them."""

    store: Store
    run_ids: Sequence[str] | None

    @cached_property
    def names(self) -> set[tuple[str, str]]:
        """Run id and metric's name, of each metric that any point of the run has."""
        query = select(Point.run_id, Metric.name).join(Metric, Metric.point_id == Point.id).distinct()
        if self.run_ids is not None:
            query = query.where(Point.run_id.in_(self.run_ids))
        with self.store.session() as session:
            return {(run_id, name) for run_id, name in session.execute(query)}


@dataclass(frozen=True, eq=False)
class Run:
    """One measured run: its state and commit, a row per point, and on demand a row per metric.

    Attributes:
        minutes: its duration; None if it has not ended, or was resumed after a pause.
    """

    run_id: str
    name: str
    kind: str
    gpu: str | None
    state: RunState
    commit: str | None
    minutes: float | None
    points: list[Row]
    shape: Shape
    source: Metrics

    def __str__(self) -> str:
        return f"run {self.run_id}" + (f" at {self.commit}" if self.commit else "")

    @property
    def ranks(self) -> int:
        """The most GPUs that one of its points used together."""
        return max((point.get(RANKS) or 1 for point in self.points), default=1)

    def lengths(self, scope: Scope) -> Lengths:
        """The number of lengths of each series in the scope, whatever became of the points."""
        known = scope.lengths.get(self.shape.number)
        if known is None:
            series: dict[Series, set[Any]] = defaultdict(set)
            for row, name, lengths in self.shape.parts:
                if scope.matches_but_length(row):
                    series[name] |= {length for length in lengths if scope.where.matches_length(length)}
            known = {name: len(lengths) for name, lengths in series.items() if lengths}
            scope.lengths[self.shape.number] = known
        return known

    def of(self, metric: str, scope: Scope, *more: Where) -> list[Row]:
        """Rows of a metric that are in the scope and match all further filters."""
        if (self.run_id, metric) not in self.source.names:
            return []
        rows = (row for row in self._metrics.get(metric, ()) if scope.matches(row))
        return [row for row in rows if all(each.matches(row) for each in more)]

    def fits(self, metric: str, scope: Scope) -> list[Fit]:
        """Fits of a metric's series in the scope."""
        rows = self.of(metric, scope)
        points = (metric, *(row["point_id"] for row in rows))
        if points not in self._fits:
            self._fits[points] = scaling_fits(pd.DataFrame(rows)) if rows else []
        return self._fits[points]

    def in_scope(self, scope: Scope, *more: Where) -> list[Row]:
        """Rows of the points in the scope that match all further filters."""
        if not self.lengths(scope):
            return []
        return [point for point in self.points if scope.matches(point) and all(each.matches(point) for each in more)]

    def failures(self, scope: Scope, *more: Where) -> list[Row]:
        """Rows of the failed points in the scope that match all further filters."""
        if not self._failures or not self.lengths(scope):
            return []
        return [point for point in self._failures if scope.matches(point) and all(each.matches(point) for each in more)]

    @cached_property
    def _failures(self) -> list[Row]:
        return [point for point in self.points if point["state"] in FAILED]

    @cached_property
    def _metrics(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = defaultdict(list)
        for row in _rows(queries.measurements(self.source.store, run_ids=[self.run_id])):
            found[row["metric"]].append(row)
        return found

    @cached_property
    def _fits(self) -> dict[tuple[str, ...], list[Fit]]:
        return {}


def measured_runs(store: Store, run_ids: Sequence[str] | None) -> list[Run]:
    """The measured runs, newest first.

    A failed point may lack its GPU; it gets its run's GPU, so that a rule about one GPU sees the failure.
    """
    rows = _rows(queries.runs(store, run_ids=run_ids, origin=Origin.MEASURED))
    points = _points(store, {row["run_id"]: row["gpu"] for row in rows}, everything=run_ids is None)
    shapes, metrics = _Shapes(), Metrics(store, run_ids)
    return [
        Run(
            row["run_id"],
            row["name"],
            row["kind"],
            row["gpu"],
            RunState(row["state"]),
            _commit(row),
            _minutes(row),
            points[row["run_id"]],
            shapes.of(points[row["run_id"]]),
            metrics,
        )
        for row in rows
    ]


def _points(store: Store, cards: Mapping[str, str | None], *, everything: bool) -> dict[str, list[Row]]:
    """The points of the runs in `cards`, by run, in the runs' order.

    Read without pandas, which takes most of the time where there are many runs.
    """
    query = select(*(v_points.c[name] for name in _POINT), v_points.c.more_axes)
    query = query.where(v_points.c.origin == Origin.MEASURED.value)
    if not everything:
        query = query.where(v_points.c.run_id.in_(cards))
    found: dict[str, list[Row]] = defaultdict(list)
    with store.session() as session:
        for *values, more in session.execute(query.order_by(v_points.c.run_id, v_points.c.number)):
            row = dict(zip(_POINT, values, strict=True))
            row["gpu"] = row["gpu"] or cards.get(row["run_id"])
            if more:
                row |= {MORE + name: value for name, value in more.items()}
            found[row["run_id"]].append(row)
    return found


class _Shapes:
    """Shapes of runs; equal runs share one."""

    def __init__(self) -> None:
        self._known: dict[Any, Shape] = {}

    def of(self, points: Iterable[Row]) -> Shape:
        """The shape of a run with these points."""
        found: dict[tuple, tuple[Row, set[Any]]] = {}
        for point in points:
            key = (*_coordinates(point), *_own(point))
            found.setdefault(key, (point, set()))[1].add(point[LENGTH])
        identity = frozenset((key, frozenset(lengths)) for key, (_, lengths) in found.items())
        if identity not in self._known:
            parts = tuple((row, series_of(row), frozenset(lengths)) for row, lengths in found.values())
            self._known[identity] = Shape(len(self._known), parts)
        return self._known[identity]


def series_of(point: Row) -> Series:
    """The series of a row of v_points: its coordinates but the length."""
    return (*(point[name] for name in _SERIES), *_own(point))


def _own(point: Row) -> list[tuple[str, Any]]:
    """The kind-specific axes of a point with their values."""
    if len(point) == len(_POINT):  # it has none, and there are many such points
        return []
    return [(name, point[name]) for name in more_columns(point) if point[name] is not None]


def _commit(run: Row) -> str | None:
    """A run's commit in short, with a mark for uncommitted changes."""
    if not run["git_commit"]:
        return None
    return str(run["git_commit"])[:10] + (" (uncommitted changes)" if run["git_dirty"] else "")


def _minutes(run: Row) -> float | None:
    if run["ended_at"] is None or run["resumed"]:
        return None
    return (run["ended_at"] - run["created_at"]).total_seconds() / 60


def _rows(frame: pd.DataFrame) -> list[Row]:
    """A frame's rows with None for missing values, so that equal shapes compare equal."""
    return [
        {str(name): None if value is pd.NaT or value != value else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def preferred(runs: Sequence[Run], scope: Scope) -> list[Run]:
    """The complete runs, newest first; then those that an older one exceeds, for where that lacks the metric.

    An older run exceeds one if it has all of its series, with at least as many lengths each, and more in all.
    """
    complete = [(run, measured) for run in runs if run.state is RunState.DONE and (measured := run.lengths(scope))]
    oldest = {frozenset(measured.items()): place for place, (_, measured) in enumerate(complete)}
    exceeded_before = {  # a run before this place is exceeded
        measured: max((place for more, place in oldest.items() if _exceeds(more, measured)), default=-1)
        for measured in oldest
    }
    exceeded = {
        run.run_id
        for place, (run, measured) in enumerate(complete)
        if place < exceeded_before[frozenset(measured.items())]
    }
    return sorted((run for run, _ in complete), key=lambda run: run.run_id in exceeded)


def _exceeds(more: frozenset[tuple[Series, int]], measured: frozenset[tuple[Series, int]]) -> bool:
    lengths = dict(more)
    return more != measured and all(lengths.get(series, 0) >= number for series, number in measured)
