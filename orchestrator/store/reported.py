"""Tables of figures reported elsewhere: a quantity a row, as in our own export; or peers, a configuration a row.

A table's header identifies its layout. Reported runs have origin `reported` and the dates of the report; they are
never fitted together with measured ones.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from jobs.schema.axes import AXES, MORE, more_columns
from jobs.schema.plain_text import shown
from jobs.schema.quantities import PEAK_EXTRA_MEMORY, TIME, Quantity
from jobs.schema.states import Origin, PointState, RunState
from orchestrator.errors import UserError
from orchestrator.store import records as rec

_ENVIRONMENT = ("gpu", "torch", "triton")


class Row(dict[str, str]):
    """A row by its columns, with its place in the column `file`; a column that the table lacks is empty."""

    def __missing__(self, name: str) -> str:
        return ""

    def error(self, name: str, problem: str) -> UserError:
        return UserError(f"{self['file']}: {name}: {problem}")

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

    def time(self, name: str) -> datetime:
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
            raise self.error(name, f"{shown(self[name])} is unknown; use one of {', '.join(PointState)}") from None


@dataclass(frozen=True)
class Report:
    """A report: where it is from, and of each point its plan and its outcome; `notes` are statements (targets)."""

    run_id: str
    name: str
    kind: str
    source: str
    notes: tuple[str, ...] = ()
    points: list[tuple[rec.PointRecord, rec.OutcomeRecord]] = field(default_factory=list)

    def add(self, label: str, at: datetime, *, axes: Any, estimate_bytes: int | None = None, **ended: Any) -> None:
        """Add a point with its metrics or its failure: `ended` are fields of its outcome."""
        number = len(self.points)
        about: Any = {"run_id": self.run_id, "at": at, "point_id": f"{self.run_id}/{number}"}
        key = hashlib.sha256(f"{self.run_id}{label}{number}".encode()).hexdigest()[:16]
        planned = {"label": label, "axes": axes, "estimate_bytes": estimate_bytes}
        point = rec.PointRecord(**about, index=number, key=key, config={}, **planned)
        self.points.append((point, rec.OutcomeRecord(**about, attempt=1, **ended)))

    def records(self) -> list[rec.Record]:
        """The run's records, the same for the same table; the beginning's hash is that of all others."""
        times = [point.at for point, _ in self.points] or [datetime(2000, 1, 1, tzinfo=UTC)]
        rest: list[rec.Record] = [*(point for point, _ in self.points), *(outcome for _, outcome in self.points)]
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


def peers(rows: list[Row]) -> Iterable[Report]:
    """One run of peers' attention operators, from rows holding forward and forward+backward of one configuration."""
    cards = "-".join(sorted({row["gpu"] for row in rows}))
    source = "peers: public implementations and dense attention"
    report = Report(f"reported-peers-{cards}", "peers", "reported", source)
    for row in rows:
        name, memory = row["implementation"], row.number("peak_extra_mib")
        numbers = {axis: row.integer(axis) for axis in ("query_heads", "kv_heads", "head_dim", "seq_len", "batch")}
        axes = {"implementation": name, "workload": "attention", "device": "cuda", "dtype": row["dtype"], **numbers}
        environment = {name: row[name] for name in _ENVIRONMENT if row[name]}
        for pass_, column in (("forward", "forward_ms"), ("forward+backward", "forward_backward_ms")):
            if (time := row.number(column)) is not None:
                metrics = [_metric(TIME, time, "median of triton's do_bench")]
                if memory is not None and pass_ != "forward":
                    method = "max_memory_allocated of one pass minus what was allocated before it"
                    metrics.append(_metric(PEAK_EXTRA_MEMORY, memory, method))
                label = f"{name} {pass_} {row['query_heads']}/{row['kv_heads']} d{row['head_dim']} S={row['seq_len']}"
                of = {"environment": environment, "metrics": tuple(metrics), "state": PointState.OK}
                report.add(label, row.time("date"), axes={**axes, "pass_": pass_}, **of)
    yield report


def exported(rows: list[Row]) -> Iterable[Report]:
    """Runs of a table with one metric a row, as `nsa export` writes it; a row without a point is a note of its run.

    Their origin here is `reported`; a run that another database measured gets another id.
    """
    runs: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row["run_id"]][row["point_id"]].append(row)
    for run_id, groups in runs.items():
        first = next(iter(groups.values()))[0]
        notes = tuple(row["reason"] for row in groups.pop("", ()))
        name = run_id if run_id.startswith("reported-") else f"imported-{run_id}"
        report = Report(name, first["run_name"], first["kind"], first["source"] or f"export of {run_id}", notes)
        for group in groups.values():
            _add_exported(report, group)
        yield report


def _add_exported(report: Report, rows: list[Row]) -> None:
    row = rows[0]
    state = row.state("state")
    ended = state if state.ended else PointState.LOST
    axes: dict[str, Any] = {}
    for axis in AXES:
        axes[axis.attribute] = row.integer(axis.name) if axis.type == "whole" else row[axis.name] or None
    axes["implementation"] = row["backend"] or axes["implementation"]
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
    report.add(
        row["label"],
        row.time("ended_at" if row["ended_at"] else "created_at"),
        axes=axes,
        estimate_bytes=row.integer("estimate_bytes"),
        environment={name: row[name] for name in _ENVIRONMENT if row[name]},
        metrics=tuple(metrics.values()),
        state=ended,
        reason=row["reason"] or (None if ended is state else f"was {row['state']} when it was exported"),
    )


def _metric(quantity: Quantity, value: float, how: str) -> rec.MetricData:
    return rec.MetricData(name=quantity.name, unit=quantity.unit, value=value, method=f"reported: {how}")


Reader = Callable[[list[Row]], Iterable[Report]]
LAYOUTS: tuple[tuple[set[str], Reader], ...] = (
    # Columns by which a layout is known, and its reader.
    ({"run_id", "run_name", "point_id", "metric", "value", "state"}, exported),
    ({"implementation", "forward_ms", "forward_backward_ms", "peak_extra_mib"}, peers),
)
