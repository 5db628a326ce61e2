"""Readers of reported tables, by layout: early reports, peers, a peer's stages, and our own export."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
from jobs.schema.states import PointState
from orchestrator.store.records import MetricData
from orchestrator.store.reported import Reader, ReportedError, ReportedPoint, ReportedRun, Row, day, integer, number

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


def layout(columns: Sequence[str]) -> Reader | None:
    """Reader for a table with these columns; None if the layout is unknown."""
    for known, reader in _LAYOUTS:
        if known <= set(columns):
            return reader
    return None


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
        estimates = {_config(row): row for row in group if row["metric"] == "memory_estimated"}
        taken = [row for row in group if row["metric"] != "memory_estimated" and row["status"] != "target"]
        yield ReportedRun(
            run_id=f"reported-{source}",
            name=f"report {source[:3]}",
            kind="reported",
            source=source,
            points=tuple(_seed_point(same, estimates) for same in _configurations(taken)),
            notes=tuple(_target(row) for row in group if row["status"] == "target"),
        )


def _configurations(rows: list[Row]) -> list[list[Row]]:
    groups: dict[tuple, list[list[Row]]] = defaultdict(list)
    for row in rows:
        same = groups[(*(row[name] for name in _SEED_SAME), row["status"], row["note"])]
        if same and row["metric"] not in {other["metric"] for other in same[-1]}:
            same[-1].append(row)
        else:
            same.append([row])
    return [group for same in groups.values() for group in same]


def _seed_point(rows: list[Row], estimates: dict[tuple, Row]) -> ReportedPoint:
    row = rows[0]
    state = _state(row)
    estimate = estimates.get(_config(row)) if row["pass"] == "forward+backward" and row["branch"] == "all" else None
    estimated = None if estimate is None else number(estimate, "value")
    return ReportedPoint(
        label=_seed_label(row),
        axes=_seed_axes(row),
        at=day(row),
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
    value = number(row, "value")
    if row["metric"] not in _SEED_METRICS:
        known = ", ".join(_SEED_METRICS)
        raise ReportedError(f"{row['file']}: metric: {row['metric']!r} is unknown; use one of {known}")
    if value is None:
        raise ReportedError(f"{row['file']}: value: '' is missing from an ok row; fill it in or correct the status")
    quantity, factor = _SEED_METRICS[row["metric"]]
    return _metric(quantity, value * factor, f"reported {row['metric']}")


def _seed_axes(row: Row) -> dict[str, Any]:
    variant = [row["branch"] if row["branch"] != "all" else "", row["selection_backend"], row["sliding_backend"]]
    heads, dim = integer(row, "heads"), integer(row, "dim")
    return {
        "implementation": row["implementation"] + _in_brackets(", ".join(filter(None, variant))),
        "workload": "model",
        "pass_": row["pass"],
        "seq_len": integer(row, "seq_len"),
        "batch": integer(row, "batch"),
        "query_heads": heads,
        "kv_heads": integer(row, "kv_groups"),
        "head_dim": dim // heads if dim and heads else None,
        "layers": integer(row, "layers"),
        "device": "cuda",
    }


def _seed_label(row: Row) -> str:
    axes = _seed_axes(row)
    label = f"{axes['implementation']} {row['pass']} {row['layers']} layers dim {row['dim']} S={row['seq_len']}"
    return label + _in_brackets(", ".join(filter(None, [row["torch"] and f"torch {row['torch']}", row["note"]])))


def _config(row: Row) -> tuple:
    return tuple(row[name] for name in _SEED_CONFIG)


def _state(row: Row) -> PointState:
    try:
        return PointState(row["status"])
    except ValueError:
        raise ReportedError(
            f"{row['file']}: status: {row['status']!r} is unknown; use ok, hang, timeout or target"
        ) from None


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
    for pass_, column in (("forward", "forward_ms"), ("forward+backward", "forward_backward_ms")):
        time = number(row, column)
        memory = number(row, "peak_extra_mib") if pass_ == "forward+backward" else None
        if time is None:
            continue
        metrics = [_metric(TIME, time, "reported: median of triton's do_bench")]
        if memory is not None:
            method = "reported: max_memory_allocated of one pass minus what was allocated before it"
            metrics.append(_metric(PEAK_EXTRA_MEMORY, memory, method))
        yield ReportedPoint(
            label=_peer_label(row, pass_),
            axes=_peer_axes(row, pass_) | {"batch": integer(row, "batch"), "dtype": row["dtype"]},
            at=day(row),
            environment=_environment(row),
            metrics=tuple(metrics),
        )


def stages(rows: list[Row]) -> Iterable[ReportedRun]:
    """One run with the stages of a peer's forward: columns NAME_ms become metrics stage_NAME."""
    points = []
    for row in rows:
        length, tokens = integer(row, "seq_len"), integer(row, "tokens")
        names = [name.removesuffix("_ms") for name in row if name.endswith("_ms")]
        values = {name: number(row, f"{name}_ms") for name in names}
        batch = tokens // length if tokens and length else None
        points.append(
            ReportedPoint(
                label=_peer_label(row, "stages"),
                axes=_peer_axes(row, "forward") | {"batch": batch},
                at=day(row),
                environment=_environment(row),
                metrics=tuple(
                    _metric(STAGE.named(name), value, "reported: by the peer's own switch")
                    for name, value in values.items()
                    if value is not None
                ),
            )
        )
    run_id = "reported-peer-stages-" + "-".join(sorted({row["gpu"] for row in rows}))
    yield ReportedRun(run_id, "peer stages", "stages", "peers: stages of the fastest forward", tuple(points))


def _peer_axes(row: Row, pass_: str) -> dict[str, Any]:
    heads = {name: integer(row, name) for name in ("query_heads", "kv_heads", "head_dim", "seq_len")}
    name = row["implementation"].removesuffix(" forward")
    return {"implementation": name, "workload": "attention", "pass_": pass_, "device": "cuda", **heads}


def _peer_label(row: Row, pass_: str) -> str:
    shape = f"{row['query_heads']}/{row['kv_heads']} d{row['head_dim']}"
    return f"{row['implementation'].removesuffix(' forward')} {pass_} {shape} S={row['seq_len']}"


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
    state = _state({**row, "status": row["state"]})
    ended = state if state.ended else PointState.LOST
    return ReportedPoint(
        label=row["label"],
        axes=_exported_axes(row),
        at=day(row, "ended_at" if row["ended_at"] else "created_at"),
        environment={"gpu": row["gpu"]} if row["gpu"] else {},
        metrics=_exported_metrics(rows),
        state=ended,
        reason=row["reason"] or (None if ended is state else f"was {row['state']} when it was exported"),
        estimate_bytes=integer(row, "estimate_bytes"),
    )


def _exported_axes(row: Row) -> dict[str, Any]:
    axes = {
        axis.attribute: integer(row, axis.name) if axis.type == "whole" else row[axis.name] or None for axis in AXES
    }
    return axes | {name.removeprefix(MORE): _whole_or_text(row[name]) for name in more_columns(row) if row[name]}


def _whole_or_text(cell: str) -> int | str:
    whole = cell.removeprefix("-")
    return int(cell) if whole.isdecimal() and str(int(cell)) == cell else cell


def _exported_metrics(rows: list[Row]) -> tuple[MetricData, ...]:
    metrics: dict[str, MetricData] = {}
    for row in rows:
        if not row["metric"]:
            continue
        metric = _exported_metric(row)
        if metric.name in metrics:
            twice = f"{shown(metric.name)} is there twice for the point {shown(row['point_id'])}"
            raise ReportedError(f"{row['file']}: metric: {twice}; remove one of the rows")
        metrics[metric.name] = metric
    return tuple(metrics.values())


def _exported_metric(row: Row) -> MetricData:
    value = number(row, "value")
    if value is None:
        raise ReportedError(f"{row['file']}: value: '' is missing; fill it in or remove the row")
    return MetricData(
        name=row["metric"],
        unit=row["unit"],
        value=value,
        p10=number(row, "p10"),
        p90=number(row, "p90"),
        ci_low=number(row, "ci_low"),
        ci_high=number(row, "ci_high"),
        method=row["method"],
    )


def _metric(quantity: Quantity, value: float, method: str) -> MetricData:
    return MetricData(name=quantity.name, unit=quantity.unit, value=value, method=method)


def _environment(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("gpu", "torch", "triton") if row.get(name)}


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


_LAYOUTS: tuple[tuple[set[str], Reader], ...] = (
    ({"run_id", "run_name", "point_id", "metric", "value", "state"}, exported),
    ({"source", "metric", "value", "status", "kv_groups", "branch"}, seeds),
    ({"implementation", "forward_ms", "forward_backward_ms", "peak_extra_mib"}, peers),
    ({"implementation", "tokens", "compress_ms", "selected_ms"}, stages),
)
