"""Export of stored results for other programs: CSV with one metric per row, or JSON nested by run and point."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from jobs.schema.plain_text import csv_cell
from jobs.specs.user_files import write_output
from orchestrator.errors import UserError
from orchestrator.store import history, queries
from orchestrator.store.journal import Journal
from orchestrator.store.store import Store

_AT_ONCE = 200  # points, whose metrics and series are read together


class ExportError(UserError):
    """The file cannot be written; the message names it and the fix."""


@dataclass(frozen=True)
class ExportSummary:
    """The file written, and its numbers of runs and points."""

    path: Path
    runs: int
    points: int

    def __str__(self) -> str:
        return f"{self.path}: {self.runs} run(s), {self.points} points"


def export(store: Store, path: Path, run_ids: Sequence[str]) -> ExportSummary:
    """Write the runs to `path` in the format of its suffix (.csv or .json).

    Raises:
        ExportError: the suffix is unknown, or the file cannot be written.
    """
    if path.suffix not in (".csv", ".json"):
        raise ExportError(f"out: '{path}' is neither .csv nor .json; give one of these suffixes")
    text = to_csv(store, run_ids) if path.suffix == ".csv" else to_json(store, run_ids)
    try:
        write_output(path, text)
    except OSError as err:
        raise ExportError(f"out: '{path}' cannot be written ({err.strerror}); choose another place") from None
    return ExportSummary(path, len(run_ids), len(queries.states(store, run_ids=run_ids)))


def export_journal(store: Store, run_id: str, path: Path) -> ExportSummary:
    """Write the journal of a run from the database, where the run's own is lost.

    Raises:
        ExportError: there is a file already. JournalError: it cannot be written.
    """
    if os.path.exists(path):
        raise ExportError(f"--journal: '{path}' exists; move it away first, or give --out FILE.jsonl")
    with Journal(path) as journal:
        journal.append(history.records(store, run_id))
    return ExportSummary(path, 1, len(queries.states(store, run_ids=[run_id])))


def to_csv(store: Store, run_ids: Sequence[str]) -> str:
    """CSV with one row per metric; a point without metrics (a failed one) has one row with its state and no metric.

    A spreadsheet computes none of its cells (`csv_cell`).
    """
    points = queries.states(store, run_ids=run_ids).drop(columns=["phase", "done", "total", "rate", "heartbeat_at"])
    values = ["point_id", "metric", "unit", "value", "p10", "p90", "ci_low", "ci_high", "method"]
    frame = points.merge(queries.measurements(store, run_ids=run_ids)[values], on="point_id", how="left")
    created = {run_id: (queries.run(store, run_id) or {}).get("created_at") for run_id in run_ids}
    frame["created_at"] = [created[run_id] for run_id in frame["run_id"]]
    cells = frame.apply(lambda column: column.map(_cell) if column.dtype.kind not in "biufM" else column)
    return cells.to_csv(index=False, lineterminator="\r\n")  # so that a cell with either is quoted


def _cell(value: Any) -> Any:
    return csv_cell(value) if isinstance(value, str) else value


def to_json(store: Store, run_ids: Sequence[str]) -> str:
    """JSON list of runs: specs, events, points with configuration, environment, samples and series; without files."""
    return json.dumps([_run(store, run_id) for run_id in run_ids], indent=2, default=_jsonable) + "\n"


def _run(store: Store, run_id: str) -> dict[str, Any]:
    return {
        **(queries.run(store, run_id) or {"run_id": run_id}),
        "events": _rows(queries.events(store, run_id)),
        "points": list(_points(store, run_id)),
    }


def _points(store: Store, run_id: str) -> Iterator[dict[str, Any]]:
    """The run's points, read many at a time: the number of queries does not grow with that of points."""
    last = -1
    while points := queries.next_points(store, run_id, last, _AT_ONCE):
        first, last = points[0]["number"], points[-1]["number"]
        metrics: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in _rows(queries.metrics_between(store, run_id, first, last)):
            metrics[row.pop("point_id")].append(row)
        samples = queries.series_between(store, run_id, first, last).groupby("point_id", sort=False)
        series = {point_id: _series(frame) for point_id, frame in samples}
        for point in points:
            point_id = point["point_id"]
            yield {**point, "metrics": metrics.get(point_id, []), "series": series.get(point_id, [])}
        if len(points) < _AT_ONCE:
            return


def _series(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """One mapping a series of an attempt and a rank, its samples as lists."""
    names = ["attempt", "name", "rank", "unit"]
    return [
        {
            **_rows(rows.loc[:, names].head(1))[0],
            "steps": rows["step"].tolist(),
            "times": rows["at"].tolist(),
            "values": rows["value"].tolist(),
        }
        for _, rows in frame.groupby(names, sort=False)
    ]


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {name: None if isinstance(value, float) and pd.isna(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _jsonable(value: Any) -> str:
    return value.isoformat()
