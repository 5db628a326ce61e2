"""The reporting views: each is written once, here, as a query. Python reads them as tables."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from jobs.schema.axes import AXES, RESULTS_NAME
from jobs.schema.states import FAILED, Origin, PointState, RunState
from orchestrator.store.models import Attempt, Base, Environment, Point, Run

_tables = Base.metadata.tables
_run, _point, _attempt, _environment = (_tables[name] for name in ("run", "point", "attempt", "environment"))
_metric, _quantity, _series, _verdict = (_tables[name] for name in ("metric", "quantity", "series", "verdict"))
_metadata = sa.MetaData()  # separate from the models', whose tables alone are compared with the migrations
QUERIES: dict[str, sa.Select] = {}  # by the view's name, those that others read first; `engine.upgrade` makes them


def _view(name: str, query: sa.Select) -> sa.Table:
    """The view as a table. States and origins are plain strings there."""
    QUERIES[name] = query
    types = {column.name: column.type for column in query.selected_columns}
    plain = {name: sa.String() if isinstance(kind, sa.Enum) else kind for name, kind in types.items()}
    return sa.Table(name, _metadata, *(sa.Column(name, kind) for name, kind in plain.items()))


_RUN = (_run.c.id.label("run_id"), _run.c.name.label("run_name"), _run.c.origin, _run.c.source)
_NAMES = [(_point.c.implementation == name, sa.literal_column(f"'{ours}'")) for name, ours in RESULTS_NAME.items()]
AXIS_COLUMNS: dict[str, sa.ColumnElement[Any]] = {axis.name: _point.c[axis.name] for axis in AXES}
AXIS_COLUMNS["implementation"] = sa.case(*_NAMES, else_=_point.c.implementation).label("implementation")
_AXES = (*AXIS_COLUMNS.values(), _environment.c.gpu, _point.c.more_axes, _point.c.implementation.label("backend"))
_OUTCOME = sa.and_(_attempt.c.point_id == _point.c.id, _attempt.c.number == _point.c.attempt)
_POINTS = (
    _point.join(_run, _run.c.id == _point.c.run_id)
    .join(_attempt, _OUTCOME)
    .outerjoin(_environment, _environment.c.id == _attempt.c.environment_id)
)
_UNSTARTED = sa.and_(_attempt.c.started_at.is_(None), _attempt.c.state.in_((PointState.PENDING, PointState.SKIPPED)))

v_points = _view(
    "v_points",
    sa.select(
        *_RUN,
        _run.c.kind,
        _point.c.id.label("point_id"),
        _point.c.number,
        _point.c.label,
        _attempt.c.state,
        _attempt.c.reason,
        sa.case((_UNSTARTED, _attempt.c.number - 1), else_=_attempt.c.number).label("attempt"),
        *_AXES,
        _point.c.estimate_bytes,
        *(_attempt.c[name] for name in ("node", "phase", "done", "total", "rate")),
        *(_attempt.c[name] for name in ("heartbeat_at", "started_at", "ended_at", "key")),
    ).select_from(_POINTS),
)

Newest, _Any = aliased(Attempt), aliased(Attempt)
OF_NEWEST = sa.and_(
    Newest.point_id == Point.id,
    Newest.number == sa.select(sa.func.max(_Any.number)).where(_Any.point_id == Point.id).scalar_subquery(),
)
"""Joins the newest attempt at a point, which may be later than the one that counts."""
AGAIN = Newest.number > Point.attempt
_ANSWERS = sa.and_(Attempt.state.in_(FAILED), Point.answers.contains(Attempt.state))  # no failure, but what was asked
FAILS = sa.and_(Attempt.state.in_(FAILED), sa.or_(Point.answers.is_(None), ~Point.answers.contains(Attempt.state)))


def runs_of(chosen: sa.Select | None = None, state: RunState | None = None) -> sa.Select:
    """Runs with their point counts, of those whose ids are chosen: the points of others are not read.

    `state` is what happened: failed where all that was measured failed, though the run went on to its end.
    """
    ends = (PointState.OK, PointState.SKIPPED, PointState.RUNNING, PointState.PENDING, PointState.CANCELLED)
    counted = {"failed": FAILS, "answered": _ANSWERS, **{each.value: Attempt.state == each for each in ends}}
    measured_again = Newest.state.in_((PointState.PENDING, PointState.RUNNING))
    points = (
        sa.select(
            Point.run_id,
            sa.func.count().label("points"),
            *(sa.func.sum(sa.case((one, 1), else_=0)).label(name) for name, one in counted.items()),
            sa.func.sum(sa.case((measured_again, 1), else_=0)).label("again"),
            sa.func.max(sa.func.coalesce(Newest.heartbeat_at, Attempt.heartbeat_at)).label("heartbeat_at"),
            sa.func.max(Environment.gpu).label("gpu"),
        )
        .join(Point.outcome)
        .join(Newest, sa.and_(OF_NEWEST, AGAIN), isouter=True)
        .join(Environment, Environment.id == Attempt.environment_id, isouter=True)
        .group_by(Point.run_id)
    )
    tally = (points if chosen is None else points.where(Point.run_id.in_(chosen))).subquery()
    none_ok = sa.and_(Run.state == RunState.DONE, Run.origin == Origin.MEASURED, tally.c.failed > 0, tally.c.ok == 0)
    happened = sa.case((none_ok, sa.literal(RunState.FAILED, Run.state.type)), else_=Run.state)
    counts = ("points", "ok", "failed", "answered", "skipped", "running", "pending", "cancelled", "again")
    columns = (
        *(Run.id.label("run_id"), Run.name, Run.kind, Run.origin, Run.source, happened.label("state")),
        *(Run.state.label("stored_state"), Run.reason, Run.created_at, Run.ended_at),
        *(sa.func.coalesce(tally.c[name], 0).label(name) for name in counts),
        *(tally.c.heartbeat_at, tally.c.gpu, Run.git_commit, Run.git_branch, Run.git_dirty, Run.spec_hash),
        *(Run.person, Run.tags, Run.notes, Run.host, Run.submission_id, Run.resumed),
    )
    joined = sa.select(*columns).join(tally, tally.c.run_id == Run.id, isouter=True)
    joined = joined if state is None else joined.where(happened == state)
    return joined if chosen is None else joined.where(Run.id.in_(chosen))


v_runs = _view("v_runs", runs_of())

# A rate (tok/s) does not depend on how many sequences ran side by side; a time or an amount of memory does.
_PER_SEQUENCE = sa.case(
    (_metric.c.unit.in_(("ms", "s", "MiB")), _metric.c.value.op("/")(sa.func.coalesce(_point.c.batch, 1))),
    else_=_metric.c.value,
)

v_metrics = _view(
    "v_metrics",
    sa.select(
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
        _POINTS.join(_metric, sa.and_(_metric.c.point_id == _point.c.id, _metric.c.attempt == _point.c.attempt))
    ),
)

_SCALING = [column for column in v_metrics.c if column.name not in ("kind", "p10", "p90", "method", "estimate_bytes")]

# Numbers of quantities that their run declares to be drawn against S.
v_scaling = _view(
    "v_scaling",
    sa.select(*_SCALING, _quantity.c.plot)
    .join(_quantity, sa.and_(_quantity.c.run_id == v_metrics.c.run_id, _quantity.c.name == v_metrics.c.metric))
    .where(v_metrics.c.seq_len.is_not(None), _quantity.c.plot.in_(("growth", "rate", "step rate"))),
)

v_throughput = _view("v_throughput", sa.select(*_SCALING).where(v_metrics.c.metric == "throughput"))

_MEMORY = ("peak_extra_memory", "peak_memory", "peak_reserved", "peak_driver", "peak_rss")
_ESTIMATE_MIB = v_metrics.c.estimate_bytes.op("/", return_type=sa.Double())(sa.literal_column("1048576.0"))

v_memory = _view(
    "v_memory", sa.select(*_SCALING, _ESTIMATE_MIB.label("estimate_mib")).where(v_metrics.c.metric.in_(_MEMORY))
)

v_series = _view(
    "v_series",
    sa.select(
        *_RUN[:2],
        _run.c.kind,
        _point.c.id.label("point_id"),
        _point.c.label,
        _attempt.c.state,
        AXIS_COLUMNS["implementation"],
        _point.c.implementation.label("backend"),
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

_SCOPE = sa.func.coalesce(_verdict.c.run_id, "")
_newest = (
    sa.select(_verdict.c.target, _SCOPE.label("scope"), sa.func.max(_verdict.c.evaluated_at).label("newest"))
    .group_by(_verdict.c.target, _SCOPE)
    .subquery("newest")
)

v_gate = _view(
    "v_gate",
    sa.select(
        *(_verdict.c[name] for name in ("target", "target_title", "target_result", "position", "rule", "title")),
        *(_verdict.c[name] for name in ("result", "value", "comparison", "bound", "unit", "margin", "reason")),
        *(_verdict.c[name] for name in ("evidence", "run_id", "evaluated_at")),
    ).join(
        _newest,
        sa.and_(
            _newest.c.target == _verdict.c.target,
            _newest.c.scope == _SCOPE,
            _newest.c.newest == _verdict.c.evaluated_at,
        ),
    ),
)
