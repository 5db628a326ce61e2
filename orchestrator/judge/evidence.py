"""The measured runs that verdicts may rest on, and which of them a rule prefers."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import pandas as pd

from jobs.schema.states import FAILED, Origin, RunState
from orchestrator.judge.analysis import Fit, scaling_fits
from orchestrator.judge.filters import Row, Where
from orchestrator.judge.hardware import Hardware
from orchestrator.judge.stored import Outline, Series, Source, outlines
from orchestrator.settings import SOURCES
from orchestrator.store import Store, queries

Lengths = Mapping[Series, int]
_DIGESTS = ("sha256", "heldout_sha256", "tokenizer_sha256")  # of training data: bytes have the first, tokens the others
_OLD = timedelta(days=90)
_THROTTLED = 50  # % of the time
_UNSTEADY = 0.5  # of the value: the distance from the tenth to the ninetieth percentile


@dataclass(frozen=True, eq=False)
class Scope:
    """The points that a rule is about: a filter, on one hardware if it names one.

    Attributes:
        whole: the points measured on all GPUs of the hardware; else those on one.
        lengths: the number of lengths of each series in a shape, by its number, as far as it was asked for.
    """

    where: Where
    hardware: Hardware | None = None
    whole: bool = False
    lengths: dict[int, Lengths] = field(default_factory=dict)

    def matches(self, row: Row) -> bool:
        """Whether a row of the views v_metrics or v_points is in the scope."""
        return self.is_here(row) and self.where.matches(row)

    def matches_but_length(self, row: Row) -> bool:
        """Whether all coordinates of a row match, its length aside."""
        return self.is_here(row) and self.where.matches_but_length(row)

    def is_here(self, row: Row) -> bool:
        """Whether a row's point was measured on the scope's hardware."""
        return self.hardware is None or self.hardware.measured(row, whole=self.whole)

    def __str__(self) -> str:
        return str(self.where) + (f"; on {self.hardware.title}" if self.hardware else "")


@dataclass(frozen=True, eq=False)
class Run:
    """One measured run: its state, commit and outline, and on demand a row per point and per metric.

    Attributes:
        minutes: its duration; None if it has not ended, or was resumed after a pause.
        foreign: why its code is not that of this history; "" if it is.
        old: whether the newest run came long after it.
    """

    run_id: str
    name: str
    kind: str
    gpu: str | None
    state: RunState
    commit: str | None
    minutes: float | None
    outline: Outline
    source: Source
    resumed: bool
    foreign: str
    old: bool
    _metrics: dict[str, list[Row]] = field(default_factory=dict)
    _fits: dict[tuple[str, ...], list[Fit]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"run {self.run_id}" + (f" at {self.commit}" if self.commit else "")

    @property
    def complete(self) -> bool:
        """Whether it is done, or was and all that its points are still counts while some are measured again."""
        if self.state is RunState.DONE:
            return True
        return self.resumed and all(state.settles for state in self.outline.states)

    def lengths(self, scope: Scope) -> Lengths:
        """The number of lengths of each series in the scope, whatever became of the points."""
        shape = self.outline.shape
        known = scope.lengths.get(shape.number)
        if known is None:
            series: dict[Series, set[Any]] = defaultdict(set)
            for parts in shape.by_machine:
                if scope.is_here(parts[0].row):
                    for part in filter(lambda part: scope.where.matches_but_length(part.row), parts):
                        series[part.series] |= set(filter(scope.where.matches_length, part.lengths))
            known = {name: len(lengths) for name, lengths in series.items() if lengths}
            scope.lengths[shape.number] = known
        return known

    def of(self, metric: str, scope: Scope, *more: Where) -> list[Row]:
        """Rows of a metric that are in the scope and match all further filters."""
        if not self.lengths(scope) or self.run_id not in self.source.having(self.kind, metric):
            return []
        rows = (row for row in self._values(metric) if scope.matches(row))
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
        return [point for point in self._points if scope.matches(point) and all(each.matches(point) for each in more)]

    def failed(self, scope: Scope) -> bool:
        """Whether a point in the scope failed."""
        return any(
            scope.matches_but_length(part.row) and any(map(scope.where.matches_length, part.lengths))
            for part in self.outline.failed
        )

    def failures(self, scope: Scope, *more: Where) -> list[Row]:
        """Rows of the failed points in the scope that match all further filters."""
        if not self.failed(scope):
            return []
        points = (point for point in self._points if point["state"] in FAILED)
        return [point for point in points if scope.matches(point) and all(each.matches(point) for each in more)]

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
            values = [row["value"] or 0 for row in self._values(name) if row["point_id"] in points]
            found += [words.format(max(values))] if values and max(values) > most else []
        for row in self._values(timed):
            if row["point_id"] in points and None not in (row["p10"], row["p90"], row["value"]):
                spread = (row["p90"] - row["p10"]) / abs(row["value"]) if row["value"] else 0
                found += [f"unsteady: {spread:.0%} between its percentiles 10 and 90"] if spread > _UNSTEADY else []
        cards = [env["gpu"] for point, env in self._environments.items() if point in points and "gpu" in env]
        for card in (each for each in cards if isinstance(each, dict)):
            limit, usual = _number(card.get("power_limit_w")), hardware.power if hardware else None
            found += [f"power capped at {limit:g} W"] if limit and usual and limit < usual else []
            found += ["ECC was off"] if card.get("ecc") == "0" else []
        return list(dict.fromkeys(found))

    def _values(self, metric: str) -> list[Row]:
        if metric not in self._metrics:
            self._metrics[metric] = self.source.metric(self.run_id, metric, self.outline.shape.own_columns)
        return self._metrics[metric]

    @cached_property
    def _environments(self) -> Mapping[str, Any]:
        return self.source.environments(self.run_id)

    @cached_property
    def _points(self) -> list[Row]:
        return self.source.points(self.run_id, self.gpu)


def measured_runs(store: Store, run_ids: Sequence[str] | None) -> list[Run]:
    """The measured runs, newest first. Raises StoreUnavailable."""
    rows: list[Row] = [
        {str(name): None if value is pd.NaT or value != value else value for name, value in row.items()}
        for row in queries.runs(store, run_ids=run_ids, origin=Origin.MEASURED).to_dict("records")
    ]
    known, source = outlines(store, rows, everything=run_ids is None), Source(store, run_ids)
    newest = max((row["created_at"] for row in rows), default=None)
    runs = []
    for row in rows:
        commit, minutes = row["git_commit"] and str(row["git_commit"])[:10], None
        foreign = "" if not commit or in_history(commit) else f"commit {commit} is not in this history"
        if commit and row["git_dirty"]:
            commit += " (uncommitted changes)"
            foreign = "it ran with uncommitted changes"
        if row["ended_at"] is not None and not row["resumed"]:
            minutes = (row["ended_at"] - row["created_at"]).total_seconds() / 60
        runs.append(
            Run(
                row["run_id"],
                row["name"],
                row["kind"],
                row["gpu"],
                RunState(row["state"]),
                commit or None,
                minutes,
                known[row["run_id"]],
                source,
                row["resumed"] > 0,
                foreign,
                newest - row["created_at"] > _OLD,
            )
        )
    return runs


@cache
def in_history(commit: str) -> bool:
    """Whether a commit is an ancestor of the checkout's; True where there is no whole history to ask."""
    git = ["git", "-C", str(SOURCES)]
    try:
        known = subprocess.run(
            [*git, "rev-parse", "--is-shallow-repository", "--show-prefix"], capture_output=True, text=True
        )
        if known.stdout.split() != ["false"]:  # with a prefix, the repository is another one around a package
            return True
        asked = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True)
        return asked.returncode == 0
    except OSError:  # no git
        return True


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def preferred(runs: Sequence[Run], scope: Scope) -> list[Run]:
    """The complete runs, newest first; then those that an older one exceeds, for where that lacks the metric.

    An older run exceeds one if it has all of its series, with at least as many lengths each, and more in all.
    """
    complete = [(run, measured) for run in runs if run.complete and (measured := run.lengths(scope))]
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
