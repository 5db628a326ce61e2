"""Tables of figures reported elsewhere: early reports, peers, a peer's stages, our own export.

A table's header identifies its layout. Reported runs have origin `reported` and the dates of the report; they are
never fitted together with measured ones.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from jobs.schema.axes import AXES, MORE, more_columns
from jobs.schema.plain_text import shown
from jobs.schema.quantities import (
    GPU_UTILIZATION,
    PEAK_DRIVER,
    PEAK_EXTRA_MEMORY,
    PEAK_MEMORY,
    STAGE,
    THROUGHPUT,
    TIME,
    Quantity,
)
from jobs.schema.states import Origin, PointState, RunState
from orchestrator.errors import UserError
from orchestrator.store.records import (
    EventRecord,
    MetricData,
    OutcomeRecord,
    PointRecord,
    Record,
    RunEndRecord,
    RunRecord,
)

# Name in the reports -> our quantity, and the factor from their unit to ours.
_SEED_METRICS = {
    "memory_allocated": (PEAK_MEMORY, 1.0),
    "memory_used": (PEAK_DRIVER, 1.0),
    "elapsed": (TIME, 1000.0),
    "throughput": (THROUGHPUT, 1.0),
    "gpu_utilization": (GPU_UTILIZATION, 1.0),
}
_SEED_CONFIG = ("layers", "dim", "heads", "kv_groups", "batch", "seq_len")
_SEED_SAME = ("gpu", "torch", "implementation", "pass", *_SEED_CONFIG, "branch", "selection_backend", "sliding_backend")
_WHOLE = 2**63 - 1024  # the largest that a float has below 2**63


class ReportedError(UserError):
    """The table cannot be imported; the message names file and line, value and fix."""


class Row(dict[str, str]):
    """A row by its columns, with its place in the column `file`; a column that the table lacks is empty."""

    def __missing__(self, name: str) -> str:
        return ""

    def error(self, name: str, problem: str) -> ReportedError:
        return ReportedError(f"{self['file']}: {name}: {problem}")


@dataclass(frozen=True, slots=True)
class ReportedPoint:
    """One configuration of a report, with its metrics or its failure."""

    label: str
    axes: dict[str, Any]
    at: datetime
    environment: dict[str, Any]
    metrics: tuple[MetricData, ...] = ()
    state: PointState = PointState.OK
    reason: str | None = None
    estimate_bytes: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def records(self, run_id: str, number: int) -> tuple[PointRecord, OutcomeRecord]:
        about = {"run_id": run_id, "at": self.at, "point_id": f"{run_id}/{number}"}
        planned = PointRecord(
            **about,
            index=number,
            key=hashlib.sha256(f"{run_id}{self.label}{number}".encode()).hexdigest()[:16],
            label=self.label,
            config=self.config,
            axes=self.axes,
            estimate_bytes=self.estimate_bytes,
        )
        ended = OutcomeRecord(
            **about,
            attempt=1,
            state=self.state,
            reason=self.reason,
            metrics=self.metrics,
            environment=self.environment,
        )
        return planned, ended


@dataclass(frozen=True)
class ReportedRun:
    """One report; `notes` are its unmeasured statements (targets)."""

    run_id: str
    name: str
    kind: str
    source: str
    points: tuple[ReportedPoint, ...]
    notes: tuple[str, ...] = ()

    def records(self) -> list[Record]:
        """The run's records, the same for the same table; the beginning's hash is that of all others."""
        times = [point.at for point in self.points] or [datetime(2000, 1, 1, tzinfo=UTC)]
        points = [point.records(self.run_id, number) for number, point in enumerate(self.points)]
        rest: list[Record] = [*(planned for planned, _ in points), *(ended for _, ended in points)]
        rest += [EventRecord(run_id=self.run_id, at=min(times), message=note) for note in self.notes]
        rest.append(RunEndRecord(run_id=self.run_id, at=max(times), state=RunState.DONE))
        digest = hashlib.sha256()
        for record in rest:
            digest.update(record.model_dump_json().encode())
        begin = RunRecord(
            run_id=self.run_id,
            at=min(times),
            name=self.name,
            kind=self.kind,
            spec={"kind": self.kind, "source": self.source, "notes": list(self.notes)},
            spec_hash=digest.hexdigest()[:16],
            origin=Origin.REPORTED,
            source=self.source,
        )
        return [begin, *rest]


Reader = Callable[[list[Row]], Iterable[ReportedRun]]


def layout(columns: Sequence[str]) -> Reader | None:
    """Reader for a table with these columns; None if the layout is unknown."""
    return next((reader for known, reader in _LAYOUTS if known <= set(columns)), None)


def seeds(rows: list[Row]) -> Iterable[ReportedRun]:
    """One run per written report, from a table with one quantity per row.

    Rows of one configuration become one point; a repeated quantity starts another point, so contradictory figures stay
    separate. `hang` and `timeout` become states, a `target` (never measured) a note, an estimate the estimate of its
    point.
    """
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row["source"]].append(row)
    for source, group in by_source.items():
        estimates = {_config(row): _number(row, "value") for row in group if row["metric"] == "memory_estimated"}
        points: dict[tuple, list[list[Row]]] = defaultdict(list)
        for row in group:
            if row["metric"] == "memory_estimated" or row["status"] == "target":
                continue
            same = points[(*(row[name] for name in _SEED_SAME), row["status"], row["note"])]
            if same and row["metric"] not in {other["metric"] for other in same[-1]}:
                same[-1].append(row)
            else:
                same.append([row])
        yield ReportedRun(
            run_id=f"reported-{source}",
            name=f"report {source[:3]}",
            kind="reported",
            source=source,
            points=tuple(_seed_point(each, estimates) for each in chain.from_iterable(points.values())),
            notes=tuple(_target(row) for row in group if row["status"] == "target"),
        )


def _seed_point(rows: list[Row], estimates: dict[tuple, float | None]) -> ReportedPoint:
    row = rows[0]
    state = _state(row, "status")
    heads, dim = _integer(row, "heads"), _integer(row, "dim")
    variant = [row["branch"] if row["branch"] != "all" else "", row["selection_backend"], row["sliding_backend"]]
    implementation = row["implementation"] + _in_brackets(*variant)
    shape = f"{_integer(row, 'layers')} layers dim {row['dim']} S={_integer(row, 'seq_len')}"
    version = row["torch"] and f"torch {row['torch']}"
    whole = row["pass"] == "forward+backward" and row["branch"] == "all"
    estimated = estimates.get(_config(row)) if whole else None
    return ReportedPoint(
        label=f"{implementation} {row['pass']} {shape}" + _in_brackets(version, row["note"]),
        axes={
            "implementation": implementation,
            "workload": "model",
            "pass_": row["pass"],
            "seq_len": _integer(row, "seq_len"),
            "batch": _integer(row, "batch"),
            "query_heads": heads,
            "kv_heads": _integer(row, "kv_groups"),
            "head_dim": dim // heads if dim and heads else None,
            "layers": _integer(row, "layers"),
            "device": "cuda",
        },
        at=_day(row),
        environment=_environment(row),
        metrics=tuple(_seed_metric(each) for each in rows) if state is PointState.OK else (),
        state=state,
        reason=None if state is PointState.OK else f"reported as {row['status']}" + _in_brackets(row["note"]),
        estimate_bytes=None if estimated is None else round(estimated * 2**20),
        config={
            name: value for name, value in row.items() if name not in ("file", "metric", "value", "unit") and value
        },
    )


def _seed_metric(row: Row) -> MetricData:
    value = _number(row, "value")
    if row["metric"] not in _SEED_METRICS:
        raise row.error("metric", f"{row['metric']!r} is unknown; use one of {', '.join(_SEED_METRICS)}")
    if value is None:
        raise row.error("value", "'' is missing from an ok row; fill it in or correct the status")
    quantity, factor = _SEED_METRICS[row["metric"]]
    return _metric(quantity, value * factor, f"reported {row['metric']}")


def _config(row: Row) -> tuple:
    return tuple(row[name] for name in _SEED_CONFIG)


def _target(row: Row) -> str:
    return (
        f"stated as a target, not measured: {row['metric']} {row['value']} {row['unit']} for {row['pass']} at"
        f" S={row['seq_len']}" + _in_brackets(row["note"])
    )


def peers(rows: list[Row]) -> Iterable[ReportedRun]:
    """One run of peers' attention operators, from rows holding forward and forward+backward of one configuration."""
    yield ReportedRun(
        run_id="reported-peers-" + "-".join(sorted({row["gpu"] for row in rows})),
        name="peers",
        kind="reported",
        source="peers: public implementations and dense attention",
        points=tuple(point for row in rows for point in _peer_points(row)),
    )


def _peer_points(row: Row) -> Iterable[ReportedPoint]:
    more = {"batch": _integer(row, "batch"), "dtype": row["dtype"]}
    time, both, memory = (_number(row, name) for name in ("forward_ms", "forward_backward_ms", "peak_extra_mib"))
    method = "reported: median of triton's do_bench"
    if time is not None:
        yield _peer_point(row, "forward", "forward", [_metric(TIME, time, method)], more)
    if both is not None:
        metrics = [_metric(TIME, both, method)]
        if memory is not None:
            method = "reported: max_memory_allocated of one pass minus what was allocated before it"
            metrics.append(_metric(PEAK_EXTRA_MEMORY, memory, method))
        yield _peer_point(row, "forward+backward", "forward+backward", metrics, more)


def stages(rows: list[Row]) -> Iterable[ReportedRun]:
    """One run with the stages of a peer's forward: columns NAME_ms become metrics stage_NAME."""
    points = []
    for row in rows:
        length, tokens = _integer(row, "seq_len"), _integer(row, "tokens")
        values = {name.removesuffix("_ms"): _number(row, name) for name in row if name.endswith("_ms")}
        metrics = [
            _metric(STAGE.named(name), value, "reported: by the peer's own switch")
            for name, value in values.items()
            if value is not None
        ]
        batch = tokens // length if tokens and length else None
        points.append(_peer_point(row, "stages", "forward", metrics, {"batch": batch}))
    run_id = "reported-peer-stages-" + "-".join(sorted({row["gpu"] for row in rows}))
    yield ReportedRun(run_id, "peer stages", "stages", "peers: stages of the fastest forward", tuple(points))


def _peer_point(row: Row, what: str, pass_: str, metrics: list[MetricData], more: dict[str, Any]) -> ReportedPoint:
    name = row["implementation"].removesuffix(" forward")
    heads = {axis: _integer(row, axis) for axis in ("query_heads", "kv_heads", "head_dim", "seq_len")}
    return ReportedPoint(
        label=f"{name} {what} {row['query_heads']}/{row['kv_heads']} d{row['head_dim']} S={row['seq_len']}",
        axes={"implementation": name, "workload": "attention", "pass_": pass_, "device": "cuda", **heads, **more},
        at=_day(row),
        environment=_environment(row),
        metrics=tuple(metrics),
    )


def exported(rows: list[Row]) -> Iterable[ReportedRun]:
    """Runs of an `nsa export` CSV from another database (one metric per row); their origin here is `reported`."""
    runs: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row["run_id"]][row["point_id"]].append(row)
    for run_id, points in runs.items():
        first = next(iter(points.values()))[0]
        yield ReportedRun(
            run_id=f"imported-{run_id}",
            name=first["run_name"],
            kind=first["kind"],
            source=first["source"] or f"export of {run_id}",
            points=tuple(_exported_point(group) for group in points.values()),
        )


def _exported_point(rows: list[Row]) -> ReportedPoint:
    row = rows[0]
    state = _state(row, "state")
    ended = state if state.ended else PointState.LOST
    axes = {
        axis.attribute: _integer(row, axis.name) if axis.type == "whole" else row[axis.name] or None for axis in AXES
    }
    return ReportedPoint(
        label=row["label"],
        axes=axes | {name.removeprefix(MORE): _whole_or_text(row[name]) for name in more_columns(row) if row[name]},
        at=_day(row, "ended_at" if row["ended_at"] else "created_at"),
        environment={"gpu": row["gpu"]} if row["gpu"] else {},
        metrics=_exported_metrics(rows),
        state=ended,
        reason=row["reason"] or (None if ended is state else f"was {row['state']} when it was exported"),
        estimate_bytes=_integer(row, "estimate_bytes"),
    )


def _whole_or_text(cell: str) -> int | str:
    whole = cell.removeprefix("-")
    return int(cell) if whole.isdecimal() and str(int(cell)) == cell else cell


def _exported_metrics(rows: list[Row]) -> tuple[MetricData, ...]:
    metrics: dict[str, MetricData] = {}
    for row in rows:
        if not (name := row["metric"]):
            continue
        if (value := _number(row, "value")) is None:
            raise row.error("value", "'' is missing; fill it in or remove the row")
        if name in metrics:
            twice = f"{shown(name)} is there twice for the point {shown(row['point_id'])}"
            raise row.error("metric", f"{twice}; remove one of the rows")
        spread = {column: _number(row, column) for column in ("p10", "p90", "ci_low", "ci_high")}
        same = {"name": name, "unit": row["unit"], "value": value, "method": row["method"]}
        metrics[name] = MetricData.model_validate(same | spread)
    return tuple(metrics.values())


def _metric(quantity: Quantity, value: float, method: str) -> MetricData:
    return MetricData(name=quantity.name, unit=quantity.unit, value=value, method=method)


def _environment(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("gpu", "torch", "triton") if row[name]}


def _in_brackets(*texts: str) -> str:
    joined = ", ".join(filter(None, texts))
    return f" ({joined})" if joined else ""


def _state(row: Row, name: str) -> PointState:
    try:
        return PointState(row[name])
    except ValueError:
        raise row.error(name, f"{row[name]!r} is unknown; use ok, hang, timeout or target") from None


def _number(row: Row, name: str) -> float | None:
    """The cell as a number; None if empty."""
    text = row[name].strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise row.error(name, f"{shown(text)} is no number; correct the cell")
    return value


def _integer(row: Row, name: str) -> int | None:
    """The cell as an integer; None if empty."""
    value = _number(row, name)
    if value is None:
        return None
    if value != int(value) or abs(value) > _WHOLE:
        raise row.error(name, f"{shown(row[name])} is no whole number; correct the cell")
    return int(value)


def _day(row: Row, name: str = "date") -> datetime:
    """The cell's date and time in UTC; a bare date is midnight."""
    try:
        moment = datetime.fromisoformat(row[name])
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise row.error(name, f"{shown(row[name])} is no date; write YYYY-MM-DD") from None


_LAYOUTS: tuple[tuple[set[str], Reader], ...] = (
    ({"run_id", "run_name", "point_id", "metric", "value", "state"}, exported),
    ({"source", "metric", "value", "status", "kv_groups", "branch"}, seeds),
    ({"implementation", "forward_ms", "forward_backward_ms", "peak_extra_mib"}, peers),
    ({"implementation", "tokens", "compress_ms", "selected_ms"}, stages),
)
