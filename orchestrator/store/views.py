"""The reporting views: each is written once, here, as a query. Python reads them as tables."""

from __future__ import annotations

from sqlalchemy import Column, Double, Enum, MetaData, Select, String, Table, and_, case, func, select
from sqlalchemy import literal_column as literal

from jobs.schema.axes import AXES
from jobs.schema.states import PointState
from orchestrator.store.models import Base

_tables = Base.metadata.tables
_run, _point, _attempt, _environment = (_tables[name] for name in ("run", "point", "attempt", "environment"))
_metric, _quantity, _series, _verdict = (_tables[name] for name in ("metric", "quantity", "series", "verdict"))
_metadata = MetaData()  # separate from the models', whose tables alone are compared with the migrations
QUERIES: dict[str, Select] = {}
"""The views' queries by name, those that others read first; `engine.upgrade` makes them."""


def _view(name: str, query: Select) -> Table:
    """The view as a table. States and origins are plain strings there."""
    QUERIES[name] = query
    types = {column.name: column.type for column in query.selected_columns}
    plain = {name: String() if isinstance(kind, Enum) else kind for name, kind in types.items()}
    return Table(name, _metadata, *(Column(name, kind) for name, kind in plain.items()))


_RUN = (_run.c.id.label("run_id"), _run.c.name.label("run_name"), _run.c.origin, _run.c.source)
_AXES = (*(_point.c[axis.name] for axis in AXES), _environment.c.gpu, _point.c.more_axes)
_OUTCOME = and_(_attempt.c.point_id == _point.c.id, _attempt.c.number == _point.c.attempt)
_POINTS = (
    _point.join(_run, _run.c.id == _point.c.run_id)
    .join(_attempt, _OUTCOME)
    .outerjoin(_environment, _environment.c.id == _attempt.c.environment_id)
)
_UNSTARTED = and_(_attempt.c.started_at.is_(None), _attempt.c.state.in_((PointState.PENDING, PointState.SKIPPED)))

v_points = _view(
    "v_points",
    select(
        *_RUN,
        _run.c.kind,
        _point.c.id.label("point_id"),
        _point.c.number,
        _point.c.label,
        _attempt.c.state,
        _attempt.c.reason,
        case((_UNSTARTED, _attempt.c.number - 1), else_=_attempt.c.number).label("attempt"),
        *_AXES,
        _point.c.estimate_bytes,
        *(_attempt.c[name] for name in ("node", "phase", "done", "total", "rate")),
        *(_attempt.c[name] for name in ("heartbeat_at", "started_at", "ended_at", "key")),
    ).select_from(_POINTS),
)

# A rate (tok/s) does not depend on how many sequences ran side by side; a time or an amount of memory does.
_PER_SEQUENCE = case(
    (_metric.c.unit.in_(("ms", "s", "MiB")), _metric.c.value.op("/")(func.coalesce(_point.c.batch, 1))),
    else_=_metric.c.value,
)

v_metrics = _view(
    "v_metrics",
    select(
        *_RUN,
        _run.c.kind,
        _point.c.id.label("point_id"),
        _point.c.label,
        _attempt.c.state,
        *_AXES,
        _metric.c.name.label("metric"),
        *(_metric.c[name] for name in ("unit", "value", "ci_low", "ci_high")),
        _PER_SEQUENCE.label("per_sequence"),
        *(_metric.c[name] for name in ("p10", "p90", "method")),
        _point.c.estimate_bytes,
        _attempt.c.ended_at,
    ).select_from(
        _POINTS.join(_metric, and_(_metric.c.point_id == _point.c.id, _metric.c.attempt == _point.c.attempt))
    ),
)

_SCALING = [column for column in v_metrics.c if column.name not in ("kind", "p10", "p90", "method", "estimate_bytes")]

# Numbers of quantities that their run declares to be drawn against S.
v_scaling = _view(
    "v_scaling",
    select(*_SCALING, _quantity.c.plot)
    .join(_quantity, and_(_quantity.c.run_id == v_metrics.c.run_id, _quantity.c.name == v_metrics.c.metric))
    .where(v_metrics.c.seq_len.is_not(None), _quantity.c.plot.in_(("growth", "rate", "step rate"))),
)

v_throughput = _view("v_throughput", select(*_SCALING).where(v_metrics.c.metric == "throughput"))

_MEMORY = ("peak_extra_memory", "peak_memory", "peak_reserved", "peak_driver", "peak_rss")
_ESTIMATE_MIB = v_metrics.c.estimate_bytes.op("/", return_type=Double())(literal("1048576.0"))

v_memory = _view(
    "v_memory", select(*_SCALING, _ESTIMATE_MIB.label("estimate_mib")).where(v_metrics.c.metric.in_(_MEMORY))
)

v_series = _view(
    "v_series",
    select(
        *_RUN[:2],
        _run.c.kind,
        _point.c.id.label("point_id"),
        _point.c.label,
        _attempt.c.state,
        _point.c.implementation,
        _point.c.seq_len,
        _series.c.attempt,
        (_series.c.attempt == _point.c.attempt).label("latest"),
        _series.c.name.label("series"),
        *(_series.c[name] for name in ("unit", "rank", "step", "at", "value")),
    )
    .join_from(_series, _point, _point.c.id == _series.c.point_id)
    .join(_attempt, _OUTCOME)
    .join(_run, _run.c.id == _point.c.run_id),
)

_SCOPE = func.coalesce(_verdict.c.run_id, "")
_newest = (
    select(_verdict.c.target, _SCOPE.label("scope"), func.max(_verdict.c.evaluated_at).label("newest"))
    .group_by(_verdict.c.target, _SCOPE)
    .subquery("newest")
)

v_gate = _view(
    "v_gate",
    select(
        *(_verdict.c[name] for name in ("target", "target_title", "target_result", "position", "rule", "title")),
        *(_verdict.c[name] for name in ("result", "value", "comparison", "bound", "unit", "margin", "reason")),
        *(_verdict.c[name] for name in ("evidence", "run_id", "evaluated_at")),
    ).join(
        _newest,
        and_(
            _newest.c.target == _verdict.c.target,
            _newest.c.scope == _SCOPE,
            _newest.c.newest == _verdict.c.evaluated_at,
        ),
    ),
)
