"""The measured runs that verdicts may rest on, and which of them a rule prefers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from jobs.axes import AXES, more_columns
from orchestrator.gates.rules import Row, Where
from orchestrator.states import Origin, RunState
from orchestrator.store import Store, queries

Series = tuple[Any, ...]
_SERIES = (*(axis.name for axis in AXES if axis.in_series), "gpu", "kind")


@dataclass(frozen=True)
class Run:
    """One measured run: its state and commit, a row per metric and a row per point."""

    run_id: str
    state: RunState
    commit: str | None
    metrics: list[Row]
    points: list[Row]

    def __str__(self) -> str:
        return f"run {self.run_id}" + (f" at {self.commit}" if self.commit else "")

    def lengths(self, where: Where) -> Mapping[Series, int]:
        """The number of lengths of each series that matches, whatever became of the points."""
        series: dict[Series, set[Any]] = defaultdict(set)
        for point in self.points:
            if where.matches(point):
                own = [(name, point[name]) for name in more_columns(point) if point[name] is not None]
                series[*(point[name] for name in _SERIES), *own].add(point["seq_len"])
        return {key: len(found) for key, found in series.items()}

    def of(self, metric: str, *filters: Where) -> list[Row]:
        """Rows of a metric that match all filters."""
        rows = [row for row in self.metrics if row["metric"] == metric]
        return [row for row in rows if all(each.matches(row) for each in filters)]


def measured_runs(store: Store, run_ids: Sequence[str] | None) -> list[Run]:
    """The measured runs, newest first.

    A failed point may lack its GPU; it gets its run's GPU, so that a rule about one GPU sees the failure.
    """
    found = queries.runs(store, origin=Origin.MEASURED, limit=None)
    rows = [row for row in _rows(found) if run_ids is None or row["run_id"] in run_ids]
    cards = {row["run_id"]: row["gpu"] for row in rows}
    metrics: dict[str, list[Row]] = defaultdict(list)
    for row in _rows(queries.measurements(store, run_ids=list(cards))):
        metrics[row["run_id"]].append(row)
    points: dict[str, list[Row]] = defaultdict(list)
    for row in _rows(queries.states(store, run_ids=list(cards))):
        points[row["run_id"]].append({**row, "gpu": row["gpu"] or cards[row["run_id"]]})
    return [
        Run(row["run_id"], RunState(row["state"]), _commit(row), metrics[row["run_id"]], points[row["run_id"]])
        for row in rows
    ]


def _commit(run: Row) -> str | None:
    """A run's commit in short, with a mark for uncommitted changes."""
    if not run["git_commit"]:
        return None
    return str(run["git_commit"])[:10] + (" (uncommitted changes)" if run["git_dirty"] else "")


def _rows(frame: pd.DataFrame) -> list[Row]:
    """A frame's rows with None for missing values, so that equal shapes compare equal."""
    return [
        {str(name): None if value is pd.NaT or value != value else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def preferred(runs: list[Run], where: Where) -> list[Run]:
    """The complete runs, newest first; then those that an older one exceeds, for where that lacks the metric.

    An older run exceeds one if it has all of its series, with at least as many lengths each, and more in all.
    """
    complete = [(run, run.lengths(where)) for run in runs if run.state is RunState.DONE]
    exceeded = {
        run.run_id
        for place, (run, measured) in enumerate(complete)
        if any(measured != more and _all_in(measured, more) for _, more in complete[place + 1 :])
    }
    return sorted((run for run, measured in complete if measured), key=lambda run: run.run_id in exceeded)


def _all_in(measured: Mapping[Series, int], more: Mapping[Series, int]) -> bool:
    return all(more.get(series, 0) >= lengths for series, lengths in measured.items())
