"""Tables of figures reported elsewhere: early reports, peers, a peer's stages, our own export.

A table's header identifies its layout. Reported runs have origin `reported` and the dates of the report; they are
never fitted together with measured ones.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
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
from orchestrator.store import records as rec

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
_ENVIRONMENT = ("gpu", "torch", "triton")


class ReportedError(UserError):
    """The table cannot be imported; the message names file and line, value and fix."""


class Row(dict[str, str]):
    """A row by its columns, with its place in the column `file`; a column that the table lacks is empty."""

    def __missing__(self, name: str) -> str:
        return ""

    def error(self, name: str, problem: str) -> ReportedError:
        return ReportedError(f"{self['file']}: {name}: {problem}")

    def number(self, name: str) -> float | None:
        """The cell as a number; None if empty."""
        text = self[name].strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.error(name, f"{shown(text)} is no number; correct the cell")
        return value

    def integer(self, name: str) -> int | None:
        """The cell as an integer; None if empty."""
        value = self.number(name)
        if value is not None and value != int(value):
            raise self.error(name, f"{shown(self[name])} is no whole number; correct the cell")
        return None if value is None else int(value)

    def time(self, name: str = "date") -> datetime:
        """The cell's date and time in UTC; a bare date is midnight."""
        try:
            moment = datetime.fromisoformat(self[name])
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            raise self.error(name, f"{shown(self[name])} is no date; write YYYY-MM-DD") from None

    def state(self, name: str) -> PointState:
        try:
            return PointState(self[name])
        except ValueError:
            raise self.error(name, f"{self[name]!r} is unknown; use ok, hang, timeout or target") from None


@dataclass(frozen=True, slots=True)
class ReportedPoint:
    """One configuration of a report, with its metrics or its failure."""

    label: str
    axes: dict[str, Any]
    at: datetime
    environment: dict[str, Any]
    metrics: tuple[rec.MetricData, ...] = ()
    state: PointState = PointState.OK
    reason: str | None = None
    estimate_bytes: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportedRun:
    """One report; `notes` are its unmeasured statements (targets)."""

    run_id: str
    name: str
    kind: str
    source: str
    points: tuple[ReportedPoint, ...]
    notes: tuple[str, ...] = ()

    def records(self) -> list[rec.Record]:
        """The run's records, the same for the same table; the beginning's hash is that of all others."""
        rest: list[rec.Record] = []
        ends: list[rec.Record] = []
        for number, point in enumerate(self.points):
            about = {"run_id": self.run_id, "at": point.at, "point_id": f"{self.run_id}/{number}"}
            key = hashlib.sha256(f"{self.run_id}{point.label}{number}".encode()).hexdigest()[:16]
            planned = {name: getattr(point, name) for name in ("label", "config", "axes", "estimate_bytes")}
            rest.append(rec.PointRecord(**about, index=number, key=key, **planned))
            ended = {name: getattr(point, name) for name in ("state", "reason", "environment", "metrics")}
            ends.append(rec.OutcomeRecord(**about, attempt=1, **ended))
        times = [point.at for point in self.points] or [datetime(2000, 1, 1, tzinfo=UTC)]
        rest += ends
        rest += [rec.EventRecord(run_id=self.run_id, at=min(times), message=note) for note in self.notes]
        rest.append(rec.RunEndRecord(run_id=self.run_id, at=max(times), state=RunState.DONE))
        begin = rec.RunRecord(
            run_id=self.run_id,
            at=min(times),
            name=self.name,
            kind=self.kind,
            spec={"kind": self.kind, "source": self.source, "notes": list(self.notes)},
            spec_hash=hashlib.sha256("".join(r.model_dump_json() for r in rest).encode()).hexdigest()[:16],
            origin=Origin.REPORTED,
            source=self.source,
        )
        return [begin, *rest]


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
        estimates: dict[tuple, float | None] = {}
        points: dict[tuple, list[list[Row]]] = defaultdict(list)
        notes = []
        for row in group:
            if row["metric"] == "memory_estimated":
                estimates[tuple(row[name] for name in _SEED_CONFIG)] = row.number("value")
            elif row["status"] == "target":
                said = f"{row['metric']} {row['value']} {row['unit']} for {row['pass']} at S={row['seq_len']}"
                notes.append(f"stated as a target, not measured: {said}" + _in_brackets(row["note"]))
            else:
                same = points[(*(row[name] for name in _SEED_SAME), row["status"], row["note"])]
                if not same or row["metric"] in {other["metric"] for other in same[-1]}:
                    same.append([])
                same[-1].append(row)
        all_points = tuple(_seed_point(each, estimates) for each in chain.from_iterable(points.values()))
        yield ReportedRun(f"reported-{source}", f"report {source[:3]}", "reported", source, all_points, tuple(notes))


def _seed_point(rows: list[Row], estimates: dict[tuple, float | None]) -> ReportedPoint:
    row = rows[0]
    state = row.state("status")
    heads, dim, layers, length = (row.integer(name) for name in ("heads", "dim", "layers", "seq_len"))
    variant = [row["branch"] if row["branch"] != "all" else "", row["selection_backend"], row["sliding_backend"]]
    implementation = row["implementation"] + _in_brackets(*variant)
    version = row["torch"] and f"torch {row['torch']}"
    whole = row["pass"] == "forward+backward" and row["branch"] == "all"
    estimated = estimates.get(tuple(row[name] for name in _SEED_CONFIG)) if whole else None
    label = f"{implementation} {row['pass']} {layers} layers dim {row['dim']} S={length}"
    metrics = []
    for each in rows if state is PointState.OK else ():
        value = each.number("value")
        if each["metric"] not in _SEED_METRICS:
            raise each.error("metric", f"{each['metric']!r} is unknown; use one of {', '.join(_SEED_METRICS)}")
        if value is None:
            raise each.error("value", "'' is missing from an ok row; fill it in or correct the status")
        quantity, factor = _SEED_METRICS[each["metric"]]
        metrics.append(_metric(quantity, value * factor, f" {each['metric']}"))
    return ReportedPoint(
        label=label + _in_brackets(version, row["note"]),
        axes={
            "implementation": implementation,
            "workload": "model",
            "pass_": row["pass"],
            "seq_len": length,
            "batch": row.integer("batch"),
            "query_heads": heads,
            "kv_heads": row.integer("kv_groups"),
            "head_dim": dim // heads if dim and heads else None,
            "layers": layers,
            "device": "cuda",
        },
        at=row.time(),
        environment={name: row[name] for name in _ENVIRONMENT if row[name]},
        metrics=tuple(metrics),
        state=state,
        reason=None if state is PointState.OK else f"reported as {row['status']}" + _in_brackets(row["note"]),
        estimate_bytes=None if estimated is None else round(estimated * 2**20),
        config={name: text for name, text in row.items() if name not in ("file", "metric", "value", "unit") and text},
    )


def peers(rows: list[Row]) -> Iterable[ReportedRun]:
    """One run of peers' attention operators, from rows holding forward and forward+backward of one configuration."""
    points = []
    for row in rows:
        more = {"batch": row.integer("batch"), "dtype": row["dtype"]}
        memory = row.number("peak_extra_mib")
        for pass_, column in (("forward", "forward_ms"), ("forward+backward", "forward_backward_ms")):
            if (time := row.number(column)) is not None:
                metrics = [_metric(TIME, time, ": median of triton's do_bench")]
                if memory is not None and pass_ != "forward":
                    method = ": max_memory_allocated of one pass minus what was allocated before it"
                    metrics.append(_metric(PEAK_EXTRA_MEMORY, memory, method))
                points.append(_peer_point(row, pass_, pass_, metrics, more))
    cards = "-".join(sorted({row["gpu"] for row in rows}))
    source = "peers: public implementations and dense attention"
    yield ReportedRun(f"reported-peers-{cards}", "peers", "reported", source, tuple(points))


def stages(rows: list[Row]) -> Iterable[ReportedRun]:
    """One run with the stages of a peer's forward: columns NAME_ms become metrics stage_NAME."""
    points = []
    for row in rows:
        length, tokens = row.integer("seq_len"), row.integer("tokens")
        times = {name.removesuffix("_ms"): row.number(name) for name in row if name.endswith("_ms")}
        method = ": by the peer's own switch"
        metrics = [_metric(STAGE.named(name), time, method) for name, time in times.items() if time is not None]
        batch = tokens // length if tokens and length else None
        points.append(_peer_point(row, "stages", "forward", metrics, {"batch": batch}))
    cards = "-".join(sorted({row["gpu"] for row in rows}))
    source = "peers: stages of the fastest forward"
    yield ReportedRun(f"reported-peer-stages-{cards}", "peer stages", "stages", source, tuple(points))


def _peer_point(row: Row, what: str, pass_: str, metrics: list[rec.MetricData], more: dict[str, Any]) -> ReportedPoint:
    name = row["implementation"].removesuffix(" forward")
    heads = {axis: row.integer(axis) for axis in ("query_heads", "kv_heads", "head_dim", "seq_len")}
    label = f"{name} {what} {row['query_heads']}/{row['kv_heads']} d{row['head_dim']} S={row['seq_len']}"
    axes = {"implementation": name, "workload": "attention", "pass_": pass_, "device": "cuda", **heads, **more}
    environment = {name: row[name] for name in _ENVIRONMENT if row[name]}
    return ReportedPoint(label, axes, row.time(), environment, tuple(metrics))


def exported(rows: list[Row]) -> Iterable[ReportedRun]:
    """Runs of an `nsa export` CSV from another database (one metric per row); their origin here is `reported`."""
    runs: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row["run_id"]][row["point_id"]].append(row)
    for run_id, groups in runs.items():
        first, points = next(iter(groups.values()))[0], tuple(map(_exported_point, groups.values()))
        source = first["source"] or f"export of {run_id}"
        yield ReportedRun(f"imported-{run_id}", first["run_name"], first["kind"], source, points)


def _exported_point(rows: list[Row]) -> ReportedPoint:
    row = rows[0]
    state = row.state("state")
    ended = state if state.ended else PointState.LOST
    axes: dict[str, Any] = {}
    for axis in AXES:
        axes[axis.attribute] = row.integer(axis.name) if axis.type == "whole" else row[axis.name] or None
    for name in (name for name in more_columns(row) if row[name]):
        cell = row[name]
        whole = cell.removeprefix("-").isdecimal() and str(int(cell)) == cell
        axes[name.removeprefix(MORE)] = int(cell) if whole else cell
    metrics: dict[str, rec.MetricData] = {}
    for each in (each for each in rows if each["metric"]):
        name, value = each["metric"], each.number("value")
        spread: dict[str, Any] = {column: each.number(column) for column in ("p10", "p90", "ci_low", "ci_high")}
        if value is None:
            raise each.error("value", "'' is missing; fill it in or remove the row")
        if name in metrics:
            twice = f"{shown(name)} is there twice for the point {shown(each['point_id'])}"
            raise each.error("metric", f"{twice}; remove one of the rows")
        metrics[name] = rec.MetricData(name=name, unit=each["unit"], value=value, method=each["method"], **spread)
    return ReportedPoint(
        label=row["label"],
        axes=axes,
        at=row.time("ended_at" if row["ended_at"] else "created_at"),
        environment={"gpu": row["gpu"]} if row["gpu"] else {},
        metrics=tuple(metrics.values()),
        state=ended,
        reason=row["reason"] or (None if ended is state else f"was {row['state']} when it was exported"),
        estimate_bytes=row.integer("estimate_bytes"),
    )


def _metric(quantity: Quantity, value: float, how: str) -> rec.MetricData:
    return rec.MetricData(name=quantity.name, unit=quantity.unit, value=value, method=f"reported{how}")


def _in_brackets(*texts: str) -> str:
    joined = ", ".join(filter(None, texts))
    return f" ({joined})" if joined else ""


Reader = Callable[[list[Row]], Iterable[ReportedRun]]
LAYOUTS: tuple[tuple[set[str], Reader], ...] = (
    # Columns by which a layout is known, and its reader.
    ({"run_id", "run_name", "point_id", "metric", "value", "state"}, exported),
    ({"source", "metric", "value", "status", "kv_groups", "branch"}, seeds),
    ({"implementation", "forward_ms", "forward_backward_ms", "peak_extra_mib"}, peers),
    ({"implementation", "tokens", "compress_ms", "selected_ms"}, stages),
)
