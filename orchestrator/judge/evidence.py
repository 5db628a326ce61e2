"""The measured runs that verdicts may rest on: an outline of each, and on demand the points and metrics of a few.

The database groups the points of a run by their coordinates, so that a store of a million points takes tens of
thousands of rows, and the points themselves are read of the few runs that a verdict rests on. Reads without pandas,
which costs more than the reading.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import pandas as pd
from sqlalchemy import Table as View
from sqlalchemy import Text, cast, exists, func, select

from jobs.schema.axes import AXES, MORE, more_columns
from jobs.schema.states import FAILED, Origin, PointState, RunState
from orchestrator.git import git
from orchestrator.judge.analysis import Fit, scaling_fits
from orchestrator.judge.scope import LENGTH, Hardware, Row, Scope, Where, is_among
from orchestrator.settings import SOURCES
from orchestrator.store import Store, models
from orchestrator.store.models import Attempt, Environment, Metric, Point
from orchestrator.store.views import AXIS_COLUMNS, v_metrics, v_points

Series = tuple[Any, ...]
_SERIES = (*(axis.name for axis in AXES if axis.in_series), "gpu", "kind")
_AXES = tuple(axis.name for axis in AXES if axis.name != LENGTH)
_SHARED = ("run_id", "run_name", "kind", "point_id", "label", *(axis.name for axis in AXES), "gpu")
_POINT = (*_SHARED, "state", "reason")
_METRIC = (*_SHARED, "origin", "source", "metric", "unit", "value", "ci_low", "ci_high", "p10", "p90", "per_sequence")
_DIGESTS = ("sha256", "heldout_sha256", "tokenizer_sha256")  # of training data: bytes have the first, tokens the others
_OLD = timedelta(days=90)
_THROTTLED = 50  # % of the time
_UNSTEADY = 0.5  # of the value: the distance from the tenth to the ninetieth percentile


@dataclass(frozen=True)
class Part:
    """Points of a run that differ in their lengths alone: a row of the others' coordinates, and the lengths."""

    row: Row
    lengths: set[Any]
    ok: set[Any]  # the lengths at which a point has metrics
    failed: set[Any]  # the lengths at which a point failed

    def lengths_in(self, scope: Scope) -> set[Any]:
        """The lengths that are in the scope."""
        requested = getattr(scope.where, LENGTH) if scope.matches(self.row) else ()
        return {length for length in self.lengths if is_among(length, requested)}


@dataclass(frozen=True, eq=False)
class Run:
    """One measured run: its state, commit and outline, and on demand a row per point and per metric."""

    run_id: str
    name: str
    kind: str
    gpu: str | None
    state: RunState
    commit: str | None
    minutes: float | None  # its duration; None if it has not ended, or was resumed after a pause
    shape: int  # runs of the same number have the same parts, but for the run's name in their rows
    parts: Sequence[Part]  # its points by coordinates, whatever became of them; runs alike in name, too, share them
    states: Mapping[PointState, int]  # number of its points by state
    complete: bool  # whether it is done, or was and all that its points are still counts while some are measured again
    foreign: str  # why its code is not that of this history; "" if it is
    old: bool  # whether the newest run came long after it
    source: Source
    _metrics: dict[str, list[Row]] = field(default_factory=dict)
    _fits: dict[tuple[str, ...], list[Fit]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"run {self.run_id}" + (f" at {self.commit}" if self.commit else "")

    def lengths(self, scope: Scope) -> Mapping[Series, int]:
        """The number of lengths of each series in the scope, whatever became of the points."""
        if not (is_among(self.name, scope.where.run_name) and is_among(self.kind, scope.where.job)):
            return {}
        if self.shape not in scope.lengths:
            series: dict[Series, set[Any]] = defaultdict(set)
            for part in self.parts:
                if lengths := part.lengths_in(scope):
                    series[series_of(part.row)] |= lengths
            scope.lengths[self.shape] = {name: len(lengths) for name, lengths in series.items()}
        return scope.lengths[self.shape]

    def measured(self, scope: Scope, *more: Where) -> set[Any]:
        """The lengths of the points in the scope that match all further filters and have metrics."""
        parts = (part for part in self.parts if all(each.matches(part.row) for each in more))
        return {length for part in parts for length in part.ok & part.lengths_in(scope)}

    def failed(self, scope: Scope) -> bool:
        """Whether a point in the scope failed."""
        return any(part.failed & part.lengths_in(scope) for part in self.parts)

    def in_scope(self, scope: Scope, *more: Where) -> list[Row]:
        """Rows of the points in the scope that match all further filters, by number."""
        points = self._points if self.lengths(scope) else []
        return [row for row in points if scope.matches(row) and all(each.matches(row) for each in more)]

    def of(self, metric: str, scope: Scope, *more: Where) -> list[Row]:
        """Rows of a metric that are in the scope and match all further filters."""
        if self.run_id not in self.source.having(self.kind, metric) or not self.lengths(scope):
            return []
        if metric not in self._metrics and not self.measured(scope, *more):
            return []  # without reading them
        rows = self._values(metric)
        return [row for row in rows if scope.matches(row) and all(each.matches(row) for each in more)]

    def fits(self, metric: str, scope: Scope) -> list[Fit]:
        """Fits of a metric's series in the scope."""
        rows = self.of(metric, scope)
        points = (metric, *(row["point_id"] for row in rows))
        if points not in self._fits:
            self._fits[points] = scaling_fits(pd.DataFrame(rows)) if rows else []
        return self._fits[points]

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """Fingerprint of the text that each point was trained on, by point id; without those that have none."""
        texts = {}
        for point_id, environment in self._environments.items():
            training = environment.get("training")
            corpus = training.get("corpus") if isinstance(training, dict) else None
            if isinstance(corpus, dict) and (digests := [str(corpus[d]) for d in _DIGESTS if d in corpus]):
                texts[point_id] = " ".join(digests)
        return texts

    def doubts(self, points: Sequence[str], hardware: Hardware | None, timed: str | None) -> list[str]:
        """The reasons not to rest a decision on these points.

        Args:
            hardware: the machine on which they were measured.
            timed: the metric, if it depends on the card's speed or memory.
        """
        found = [self.foreign] if self.foreign else []
        found += ["measured more than 90 days before the newest run"] if self.old else []
        if timed is None:
            return found
        for name, most, words in (
            ("gpu_processes", 1, "{:g} processes on the card"),
            ("gpu_throttled", _THROTTLED, "the card throttled {:.0f} % of the time"),
        ):
            worst = max((row["value"] or 0 for row in self._values(name) if row["point_id"] in points), default=0)
            found += [words.format(worst)] if worst > most else []
        for row in self._values(timed):
            if row["point_id"] in points and row["value"] and None not in (row["p10"], row["p90"]):
                spread = (row["p90"] - row["p10"]) / abs(row["value"])
                found += [f"unsteady: {spread:.0%} between its percentiles 10 and 90"] if spread > _UNSTEADY else []
        usual = hardware.power if hardware else None
        cards = [environment.get("gpu") for point, environment in self._environments.items() if point in points]
        for card in (each for each in cards if isinstance(each, dict)):
            with suppress(TypeError, ValueError):  # the driver may not know its limit
                if usual and 0 < (limit := float(card.get("power_limit_w", ""))) < usual:
                    found.append(f"power capped at {limit:g} W")
            found += ["ECC was off"] if card.get("ecc") == "0" else []
        return list(dict.fromkeys(found))

    def _values(self, metric: str) -> list[Row]:
        """Rows of a metric, by point, each with all own columns of the run, so that equal shapes compare equal."""
        if metric not in self._metrics:
            empty = {name: None for part in self.parts for name in more_columns(part.row)}
            rows = self.source.rows(v_metrics, _METRIC, "point_id", run_id=self.run_id, metric=metric)
            self._metrics[metric] = [
                empty | {name: None if value != value else value for name, value in row.items()} for row in rows
            ]
        return self._metrics[metric]

    @cached_property
    def _points(self) -> list[Row]:
        """Rows of the points, by number; one without a GPU of its own gets the run's."""
        rows = self.source.rows(v_points, _POINT, "number", run_id=self.run_id)
        return [row | {"gpu": row["gpu"] or self.gpu} for row in rows]

    @cached_property
    def _environments(self) -> Mapping[str, Any]:
        """The environment of each point that has one, by id."""
        query = select(Point.id, Environment.content).join(Point.outcome)
        query = query.join(Environment, Environment.id == Attempt.environment_id).where(Point.run_id == self.run_id)
        with self.source.store.session() as session:
            return {point_id: content or {} for point_id, content in session.execute(query)}


def series_of(point: Row) -> Series:
    """The series of a row of v_points: its coordinates but the length."""
    own = [(name, point[name]) for name in more_columns(point) if point[name] is not None]
    return (*(point[name] for name in _SERIES), *own)


@dataclass(frozen=True, eq=False)
class Source:
    """The measured runs in `run_ids` (None: all) of a store. Raises StoreUnavailable in each of its reads."""

    store: Store
    run_ids: Sequence[str] | None
    _known: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    def having(self, kind: str, metric: str) -> frozenset[str]:
        """Ids of the runs of a kind of which any point has a metric."""
        if (kind, metric) not in self._known:
            of_run = select(Point.id).join(Point.metrics).where(Point.run_id == models.Run.id, Metric.name == metric)
            query = select(models.Run.id).where(models.Run.origin == Origin.MEASURED, models.Run.kind == kind)
            query = query.where(exists(of_run.correlate(models.Run)))
            if self.run_ids is not None:
                query = query.where(models.Run.id.in_(self.run_ids))
            with self.store.session() as session:
                self._known[kind, metric] = frozenset(session.scalars(query))
        return self._known[kind, metric]

    def rows(self, view: View, names: Sequence[str], order: str, **equal: str) -> list[dict[str, Any]]:
        """The rows of a view with these values, their own axes as columns."""
        query = select(*(view.c[name] for name in names), view.c.more_axes).order_by(view.c[order])
        with self.store.session() as session:
            return [
                dict(zip(names, values, strict=True)) | {MORE + name: value for name, value in (more or {}).items()}
                for *values, more in session.execute(query.where(*(view.c[key] == equal[key] for key in equal)))
            ]


def measured_runs(store: Store, run_ids: Sequence[str] | None) -> list[Run]:
    """The measured runs, newest first. Raises StoreUnavailable."""
    columns = (models.Run.id, models.Run.name, models.Run.kind, models.Run.state, models.Run.resumed)
    more = (models.Run.git_commit, models.Run.git_dirty, models.Run.created_at, models.Run.ended_at)
    query = select(*columns, *more).where(models.Run.origin == Origin.MEASURED)
    query = query.order_by(models.Run.created_at.desc(), models.Run.id)
    with store.session() as session:
        rows = session.execute(query if run_ids is None else query.where(models.Run.id.in_(run_ids))).all()
    groups, source = _groups(store, run_ids), Source(store, run_ids)
    here = in_history(frozenset(row.git_commit for row in rows if row.git_commit))
    outline = cache(_outline)  # of very many runs most are alike
    shapes: dict[Any, int] = {}
    runs: list[Run] = []
    for row in rows:
        of_run = row.kind, groups.get(row.id, ())
        gpu, parts, states = outline(row.name, *of_run)
        commit, foreign = row.git_commit and row.git_commit[:10], ""
        if not commit and (SOURCES / ".git").exists():  # without, as where it is installed, no commit is known
            foreign = "its commit is unknown"
        elif commit and row.git_dirty:
            commit, foreign = f"{commit} (uncommitted changes)", "it ran with uncommitted changes"
        elif commit and row.git_commit not in here:
            foreign = f"commit {commit} is not in this history"
        whole = row.ended_at is not None and not row.resumed
        done = row.state is RunState.DONE
        runs.append(
            Run(
                run_id=row.id,
                name=row.name,
                kind=row.kind,
                gpu=gpu,
                state=row.state,
                commit=commit or None,
                minutes=(row.ended_at - row.created_at).total_seconds() / 60 if whole else None,
                shape=shapes.setdefault(of_run, len(shapes)),
                parts=parts,
                states=states,
                complete=done or (row.resumed > 0 and all(each.settles for each in states)),
                foreign=foreign,
                old=rows[0].created_at - row.created_at > _OLD,
                source=source,
            )
        )
    return runs


def _outline(
    name: str, kind: str, groups: Sequence[Sequence[Any]]
) -> tuple[str | None, list[Part], Counter[PointState]]:
    """A run's card, parts and number of points by state, from its `_groups`."""
    parts: dict[tuple, Part] = {}
    states: Counter[PointState] = Counter()
    gpu = max((card for _, card, *_ in groups if card), default=None)
    for state, card, more, *values, number, with_length, lengths in groups:
        states[state] += number
        # A failed point may lack its GPU; with its run's, a rule about one GPU sees the failure.
        point = dict(zip(_AXES, values, strict=True)) | {"gpu": card or gpu, "kind": kind}
        own = sorted((json.loads(more or "{}") or {}).items())
        point |= {MORE + name: value for name, value in own if value is not None}
        part = parts.setdefault(tuple(point.items()), Part(point | {"run_name": name}, set(), set(), set()))
        found = {*map(int, lengths.split(",") if lengths else ()), *([None] if with_length < number else [])}
        part.lengths.update(found)
        if state is PointState.OK or state in FAILED:
            (part.failed if state in FAILED else part.ok).update(found)
    return gpu, list(parts.values()), states


def _groups(store: Store, run_ids: Sequence[str] | None) -> dict[str, tuple[Sequence[Any], ...]]:
    """The points of each measured run by state and coordinates but the length."""
    # JSON has no equality on Postgres, and its text has. Equal axes in another order come together in `_outline`.
    axes = (AXIS_COLUMNS[name] for name in _AXES)
    columns = (Point.run_id, Attempt.state, Environment.gpu, cast(Point.more_axes, Text), *axes)
    length = AXIS_COLUMNS[LENGTH]
    query = (
        select(*columns, func.count(), func.count(length), func.aggregate_strings(cast(length, Text), ","))
        .select_from(Point)
        .join(models.Run, models.Run.id == Point.run_id)
        .join(Point.outcome)
        .join(Environment, Environment.id == Attempt.environment_id, isouter=True)
        .where(models.Run.origin == Origin.MEASURED)
        .group_by(*columns)
        .order_by(Point.run_id)
    )
    if run_ids is not None:
        query = query.where(Point.run_id.in_(run_ids))
    with store.session() as session:
        by_run = groupby(session.execute(query), itemgetter(0))
        return {run_id: tuple(group[1:] for group in groups) for run_id, groups in by_run}


@cache
def in_history(commits: frozenset[str]) -> frozenset[str]:
    """The commits that are ancestors of the checkout's; all of them where there is no whole history to ask."""
    if git(SOURCES, "rev-parse", "--is-shallow-repository", "--show-prefix").stdout.split() != [b"false"]:
        return commits  # with a prefix, the repository is another one around a package
    known = "\n" + git(SOURCES, "rev-list", "HEAD").stdout.decode()
    return frozenset(commit for commit in commits if f"\n{commit}" in known)


def preferred(runs: Sequence[Run], scope: Scope) -> list[Run]:
    """The complete runs, newest first; then those that an older one exceeds, for where that lacks the metric.

    An older run exceeds one if it has all of its series, with at least as many lengths each, and more in all.
    """
    if scope.preferred is not None:
        return scope.preferred
    one_of_each = {id(run.parts): run for run in runs}
    series = {key: frozenset(lengths.items()) for key, run in one_of_each.items() if (lengths := run.lengths(scope))}
    alike = [(run, series.get(id(run.parts))) for run in runs if run.complete] if series else []
    complete = [(run, measured) for run, measured in alike if measured]
    oldest = {measured: place for place, (_, measured) in enumerate(complete)}
    exceeded_before = dict.fromkeys(oldest, -1)  # place of the oldest run that exceeds what was measured
    for more, place in oldest.items():
        counts = dict(more)
        for measured in oldest.keys() - {more}:
            if all(counts.get(series, 0) >= number for series, number in measured):
                exceeded_before[measured] = max(exceeded_before[measured], place)
    exceeded = {run.run_id for place, (run, measured) in enumerate(complete) if place < exceeded_before[measured]}
    scope.preferred = sorted((run for run, _ in complete), key=lambda run: run.run_id in exceeded)
    return scope.preferred
