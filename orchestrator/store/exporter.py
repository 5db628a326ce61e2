"""Export of stored results: CSV with one metric per row, JSON nested by run and point, or a run's journal."""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from jobs.schema.axes import AXES
from jobs.schema.plain_text import csv_cell
from jobs.schema.quantities import Quantity
from jobs.schema.states import PointState, RunState
from jobs.specs.user_files import write_output
from orchestrator.errors import UserError
from orchestrator.store import queries
from orchestrator.store import records as rec
from orchestrator.store.journal import Journal
from orchestrator.store.models import Artifact, Base, DeclaredQuantity, Environment, Event, Metric, Point, Run, Series
from orchestrator.store.store import Store

_PIECE = 1000  # samples of a record
_Model = TypeVar("_Model", bound=BaseModel)


class OutputError(UserError):
    """A file of results cannot be written."""


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file of results. Raises OutputError."""
    try:
        write_output(path, content)
    except OSError as err:
        raise OutputError(f"out: '{path}' cannot be written ({err.strerror}); choose another place") from None


def export(store: Store, path: Path, run_ids: Sequence[str]) -> str:
    """Write the runs to `path` as its suffix says (.csv, .json). Returns what was written. Raises UserError."""
    if path.suffix not in (".csv", ".json"):
        raise UserError(f"out: '{path}' is neither .csv nor .json; give one of these suffixes")
    write_file(path, to_csv(store, run_ids) if path.suffix == ".csv" else to_json(store, run_ids))
    return f"{path}: {len(run_ids)} run(s), {len(queries.states(store, run_ids=run_ids))} points"


def export_journal(store: Store, run_id: str, path: Path) -> str:
    """Write the journal of a run from the database, where the run's own is lost. Returns what was written.

    Raises UserError if there is a file already, JournalError if it cannot be written.
    """
    if os.path.exists(path):
        raise UserError(f"--journal: '{path}' exists; move it away first, or give --out FILE.jsonl")
    with Journal(path) as journal:
        journal.append(records(store, run_id))
    return f"{path}: 1 run(s), {len(queries.states(store, run_ids=[run_id]))} points"


def to_csv(store: Store, run_ids: Sequence[str]) -> str:
    """CSV with one row per metric, and one per point without any, with its state. A spreadsheet computes no cell."""
    points = queries.states(store, run_ids=run_ids).drop(columns=["phase", "done", "total", "rate", "heartbeat_at"])
    values = ["point_id", "metric", "unit", "value", "p10", "p90", "ci_low", "ci_high", "method"]
    frame = points.merge(queries.measurements(store, run_ids=run_ids)[values], on="point_id", how="left")
    runs = queries.runs(store, run_ids=run_ids)
    frame = frame.merge(runs[["run_id", "created_at"]], on="run_id", how="left")
    for name, column in frame.items():
        if column.dtype.kind not in "biufM":
            frame[name] = column.map(lambda value: csv_cell(value) if isinstance(value, str) else value)
    return frame.to_csv(index=False, lineterminator="\r\n")  # so that a cell with either is quoted


def to_json(store: Store, run_ids: Sequence[str]) -> str:
    """JSON list of runs: specs, events, points with configuration, environment, samples and series; without files."""
    runs = []
    shared = ["attempt", "name", "rank", "unit"]
    for run_id in run_ids:
        points = []
        for point_id in queries.points(store, run_id)["point_id"]:
            series = []
            for _, rows in queries.series(store, point_id).groupby(shared, sort=False):
                samples = {"steps": rows["step"], "times": rows["at"], "values": rows["value"]}
                same = _rows(rows.loc[:, shared].head(1))[0]
                series.append({**same, **{name: column.tolist() for name, column in samples.items()}})
            metrics = _rows(queries.metrics(store, point_id))
            points.append({**(queries.point(store, point_id) or {}), "metrics": metrics, "series": series})
        about = queries.run(store, run_id) or {"run_id": run_id}
        runs.append({**about, "events": _rows(queries.events(store, run_id)), "points": points})
    return json.dumps(runs, indent=2, default=lambda time: time.isoformat()) + "\n"


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows, with None instead of NaN."""
    return [
        {name: None if isinstance(value, float) and pd.isna(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def records(store: Store, run_id: str) -> list[rec.Record]:
    """The records of a run as the database has them, in an order that can be replayed; none if the run is unknown.

    Replayed into an empty database they give the run's rows, except for verdicts (computed from the rest) and the
    progress of a running point (`phase`, `done`, `total`), which no journal holds either. Raises StoreError.
    """
    with store.session() as session:
        run = session.get(Run, run_id)
        if run is None:
            return []
        found: list[rec.Record] = [*_begins(session, run)]
        for point in session.scalars(select(Point).where(Point.run_id == run_id).order_by(Point.number)):
            found += chain(_attempts(session, run, point), _files_and_series(session, run, point))
        events = select(Event).where(Event.run_id == run_id).order_by(Event.at, Event.id)
        found += [_made(rec.EventRecord, row) for row in session.scalars(events)]
        if run.labelled_at:
            found.append(_made(rec.LabelRecord, run, run_id=run_id, at=run.labelled_at, tags=run.tags.split()))
        if run.state.ended:
            found.append(_made(rec.RunEndRecord, run, run_id=run_id, at=run.state_at))
        return found


def _made(model: type[_Model], row: Base, **more: Any) -> _Model:
    """The model by the row's columns of its fields' names, and `more`."""
    return model.model_validate({name: getattr(row, name) for name in model.model_fields if hasattr(row, name)} | more)


def _begins(session: Session, run: Run) -> list[rec.RunRecord]:
    """The beginning of a run; of a resumed one also the latest resumption, at the latest time that it can have had."""
    query = select(DeclaredQuantity).where(DeclaredQuantity.run_id == run.id).order_by(DeclaredQuantity.position)
    names = Quantity.__dataclass_fields__
    declared = [{name: getattr(row, name) for name in names} for row in session.scalars(query)]
    state = run.state if run.state is RunState.PENDING else RunState.RUNNING
    same = {"run_id": run.id, "at": run.created_at, "state": state, "resumed": 0}
    first = _made(rec.RunRecord, run, **same, quantities=declared, axes=run.axes or ())
    latest = first.model_copy(update={"at": run.state_at, "resumed": run.resumed})
    if run.resumed:
        return [first.model_copy(update={"state": RunState.RUNNING}), latest]
    return [first, latest] if run.state_at > run.created_at and not run.state.ended else [first]


def _attempts(session: Session, run: Run, point: Point) -> Iterator[rec.Record]:
    """The plans of a point, and the start and the outcome of each attempt, as far as it came."""
    axes = {**{axis.attribute: getattr(point, axis.attribute) for axis in AXES}, **(point.more_axes or {})}
    for number, attempt in sorted(point.attempts.items()):
        state, environment_id, started_at = attempt.state, attempt.environment_id, attempt.started_at
        # Skipped when it was planned, and not by an outcome.
        skipped = state is PointState.SKIPPED and environment_id is None and started_at is None
        about = {"run_id": run.id, "attempt": number}
        if number == 1 or attempt.resumed > point.attempts[number - 1].resumed:
            planned = {
                "at": attempt.ended_at if skipped and attempt.ended_at else run.created_at,
                "point_id": point.id,
                "index": point.number,
                "key": attempt.key,
                "resumed": attempt.resumed,
                "axes": axes,
                "answers": (point.answers or "").split(),
                "state": PointState.SKIPPED if skipped else PointState.PENDING,
                "reason": attempt.reason if skipped else None,
            }
            yield _made(rec.PointRecord, point, **about | planned | {"attempt": number - 1})
        if attempt.heartbeat_at is not None:  # set by a start only; without a later progress it is the start's time
            unheard = attempt.phase is None or started_at is None
            yield _made(rec.StartRecord, attempt, **about, at=attempt.heartbeat_at if unheard else started_at)
        if state.ended and not skipped:
            same = (Metric.point_id == point.id, Metric.attempt == number)
            metrics = session.scalars(select(Metric).where(*same).order_by(Metric.id))
            environment = session.get(Environment, environment_id) if environment_id else None
            ended = {
                "at": attempt.ended_at,
                "metrics": [_made(rec.MetricData, row) for row in metrics],
                "environment": environment.content if environment else {},
                "final": attempt.settled or not state.settles,
            }
            yield _made(rec.OutcomeRecord, attempt, **about, **ended)


def _files_and_series(session: Session, run: Run, point: Point) -> Iterator[rec.Record]:
    about: dict[str, Any] = {"run_id": run.id, "point_id": point.id}
    for row in session.scalars(select(Artifact).where(Artifact.point_id == point.id).order_by(Artifact.id)):
        file = _made(rec.ArtifactData, row)
        yield rec.ArtifactRecord(**about, at=run.state_at, attempt=row.attempt, artifact=file)
    order = (Series.attempt, Series.name, Series.rank, Series.unit)
    query = select(*order, Series.step, Series.at, Series.value).where(Series.point_id == point.id)
    rows = session.execute(query.order_by(*order, Series.step))
    for (attempt, name, rank, unit), samples in groupby(rows, lambda row: (row.attempt, row.name, row.rank, row.unit)):
        same = {**about, "attempt": attempt, "name": name, "rank": rank, "unit": unit}
        while piece := list(islice(samples, _PIECE)):
            yield rec.SeriesRecord(
                **same,
                at=piece[-1].at,
                steps=tuple(row.step for row in piece),
                times=tuple(round(row.at.timestamp(), 3) for row in piece),
                values=tuple(row.value for row in piece),
            )
