"""Read-only queries for the dashboard, the reports and the gates; they return pandas frames and plain dictionaries.

Times are timezone-aware, in UTC. Numeric columns with missing values are floats with NaN; an empty frame has the same
columns. States, origins and results are plain strings.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

import pandas as pd
from pydantic import TypeAdapter
from sqlalchemy import Double, Row, Select, Table, Text, and_, case, cast, func, or_, select
from sqlalchemy.types import DateTime, Enum, Float, Integer, TypeDecorator

from jobs.schema.axes import MORE
from jobs.schema.quantities import Quantities, Quantity, Role
from jobs.schema.states import FAILED, Origin, PointState, RunState, reason_in_words
from orchestrator.store import models, views
from orchestrator.store.models import Artifact, Attempt, Environment, Event, Metric, Point, Run, Series
from orchestrator.store.store import Store
from orchestrator.store.views import AGAIN, FAILS, OF_NEWEST, Newest, runs_of, v_metrics, v_points, v_scaling

_DECLARATION = TypeAdapter(Quantity)
_PROGRESS = ("phase", "done", "total", "rate", "heartbeat_at")

CANCELLED_BY = "cancelled by "  # begin of the event that says who cancelled a run
_PREFLIGHTS = 1000  # points by which cards are judged

_NEWEST_FIRST = (Run.created_at.desc(), Run.id)
_RUNNING = Newest.state == PointState.RUNNING
_POINTS = (
    select(
        *(column for column in v_points.c if column.name not in _PROGRESS),
        *(getattr(Newest, name) for name in _PROGRESS),
        case((_RUNNING, Newest.number), else_=0).label("running"),
        case((_RUNNING, Newest.node)).label("running_on"),
        case((AGAIN, Newest.state)).label("again"),
        case((AGAIN, Newest.reason)).label("again_reason"),
        Attempt.route,
        Attempt.environment_id,
    )
    .join(Point, Point.id == v_points.c.point_id)
    .join(Point.outcome)
    .join(Newest, OF_NEWEST)
)
_DETAILS = _POINTS.add_columns(Point.config, Environment.content.label("environment")).join(
    Environment, Environment.id == Attempt.environment_id, isouter=True
)
# Where a point stands: coordinates, then its kind's own as JSON text, and its configuration so.
_PLACE = (
    *(Run.kind, *views.AXIS_COLUMNS.values(), Environment.gpu),
    *(cast(column, Text).label(column.key) for column in (Point.more_axes, Point.config)),
)
_STEPS = (  # of the trainings that run, as shares of all their steps: a training is one point for hours
    select(func.sum(cast(Newest.done, Double) / func.nullif(Newest.total, 0)))
    .join(Point, OF_NEWEST)
    .where(Run.state == RunState.RUNNING, Point.run_id == Run.id, _RUNNING, Newest.phase.startswith("train"))
    .scalar_subquery()
)
_UNDER_WAY = func.coalesce(_STEPS, 0.0).label("under_way")
_SAMPLE = (Series.name, Series.unit, Series.rank, Series.attempt, Series.step, Series.at, Series.value)


def runs(
    store: Store,
    *,
    run_ids: Sequence[str] | None = None,
    kind: str | None = None,
    state: RunState | str | None = None,
    origin: Origin | str | None = None,
    text: str | None = None,
    person: str | None = None,
    tag: str | None = None,
    commit: str | None = None,
    card: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    ended_since: datetime | None = None,
    limit: int | None = None,
) -> pd.DataFrame:
    """The runs, newest first, with point counts by state.

    `state` is what happened: failed where all that was measured failed. `text` searches id, name, source, host, person,
    tags and notes, `person` and `card` a part of their names, `commit` its beginning; `since` and `until` bound the
    beginning, `ended_since` the end. Points that are measured again are counted by their earlier outcomes, and in
    `again` until they have a new one. `under_way` are running trainings, as the sum of the shares of their steps.
    """
    within = [Run.created_at >= since] if since else []
    within += [Run.created_at < until] if until else []
    within += [Run.ended_at >= ended_since] if ended_since else []
    within += [Run.kind == kind] if kind else []
    within += [Run.origin == Origin(origin)] if origin else []
    happened = RunState(state) if state else None
    if happened:  # as it is stored; a run that is done may have failed
        within.append(Run.state.in_({happened, RunState.DONE} if happened is RunState.FAILED else {happened}))
    if run_ids is not None:
        within.append(Run.id.in_(run_ids))
    if text:
        columns = (Run.id, Run.name, Run.source, Run.host, Run.person, Run.tags, Run.notes)
        within.append(or_(*(column.icontains(text, autoescape=True) for column in columns)))
    if person:
        within.append(Run.person.icontains(person, autoescape=True))
    if tag:
        within.append((" " + Run.tags + " ").icontains(f" {tag} ", autoescape=True))
    if commit:
        within.append(Run.git_commit.istartswith(commit, autoescape=True))
    if card:
        of_card = select(Point.run_id).join(Point.outcome).join(Environment)
        within.append(Run.id.in_(of_card.where(Environment.gpu.icontains(card, autoescape=True))))
    chosen = select(Run.id).where(*within).order_by(*_NEWEST_FIRST).limit(None if happened else limit)
    return _frame(store, runs_of(chosen, happened).add_columns(_UNDER_WAY).order_by(*_NEWEST_FIRST).limit(limit))


def run_ids(
    store: Store, *, origin: Origin | None = None, commit: str = "", limit: int | None = None
) -> dict[str, str | None]:
    """Ids of the runs, of a commit that begins so, newest first, each with the submission id of its Ray job."""
    query = select(Run.id, Run.submission_id).order_by(*_NEWEST_FIRST).limit(limit)
    if origin is not None:
        query = query.where(Run.origin == origin)
    if commit:
        query = query.where(Run.git_commit.istartswith(commit, autoescape=True))
    with store.session() as session:
        return {row.id: row.submission_id for row in session.execute(query)}


def run(store: Store, run_id: str) -> dict[str, Any] | None:
    """One run: the columns of `runs`, its spec and its provenance; None if the id is unknown."""
    more = (_UNDER_WAY, Run.spec, Run.code_hash, Run.artifacts, Run.artifact_store, Run.labelled_at)
    return next(iter(_mappings(store, runs_of(select(Run.id).where(Run.id == run_id)).add_columns(*more))), None)


def names(store: Store, origin: Origin | None = None) -> pd.DataFrame:
    """Id, name, kind and spec_hash of the runs, newest first; `runs` counts their points as well."""
    query = select(Run.id.label("run_id"), Run.name, Run.kind, Run.spec_hash).order_by(*_NEWEST_FIRST)
    return _frame(store, query if origin is None else query.where(Run.origin == origin))


def repeats(store: Store, run_ids: Sequence[str], without: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Measured runs of the same names as these, and their spec and commit, which another of them has, too; by id."""
    names = select(Run.name).where(Run.id.in_(run_ids))
    query = select(Run.id, Run.spec_hash, Run.git_commit).where(Run.name.in_(names), Run.id.not_in(without))
    known = query.where(Run.origin == Origin.MEASURED, Run.git_commit.is_not(None), Run.git_dirty.is_(False))
    with store.session() as session:
        found = {row.id: (row.spec_hash, row.git_commit) for row in session.execute(known)}
    times = Counter(found.values())
    return {run_id: source for run_id, source in found.items() if times[source] > 1}


def specs(store: Store, run_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The specs of runs, by id."""
    with store.session() as session:
        return {row.id: row.spec for row in session.execute(select(Run.id, Run.spec).where(Run.id.in_(run_ids)))}


def headlines(store: Store, run_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The headline figure of runs, by id: of the first headline quantity that a run has, at its longest length, of the
    first point there. Columns of v_metrics."""
    declared, length = models.DeclaredQuantity, func.coalesce(Point.__table__.c.seq_len, 0)
    having = select(Point.id).join(Point.metrics).where(Point.run_id == declared.run_id, Metric.name == declared.name)
    headline = declared.run_id.in_(run_ids), declared.role == Role.HEADLINE, having.correlate(declared).exists()
    place = func.row_number().over(partition_by=declared.run_id, order_by=declared.position).label("place")
    first = select(declared.run_id, declared.name, place).where(*headline).subquery()
    longest = select(Point.id).join(Point.metrics).where(Point.run_id == first.c.run_id, Metric.name == first.c.name)
    longest = longest.order_by(length.desc(), Point.number).limit(1).correlate(first).scalar_subquery()
    chosen = {tuple(row) for row in _fetched(store, select(longest, first.c.name).where(first.c.place == 1))}
    ids, names = {point_id for point_id, _ in chosen}, {name for _, name in chosen}
    rows = _mappings(store, select(v_metrics).where(v_metrics.c.point_id.in_(ids), v_metrics.c.metric.in_(names)))
    return {row["run_id"]: row for row in rows if (row["point_id"], row["metric"]) in chosen}


def points(store: Store, run_id: str) -> pd.DataFrame:
    """The points of a run, by number: state, reason, progress, axes and the route taken.

    A point that is measured again has the state of its earlier outcome, which counts until it has a new one; `again`
    and `again_reason` are those of the newest attempt then, else None. Progress is of the newest attempt at each point;
    `running` is its number while it runs, else 0, and `running_on` its node. `failed_on` is the card of a point that
    failed on one, as "on GPU 3 (its UUID) of node1", else "".
    """
    frame = _frame(store, _POINTS.where(v_points.c.run_id == run_id).order_by(v_points.c.number))
    failed = frame["state"].isin([*FAILED])
    contents = environments(store, frame.loc[failed, "environment_id"].dropna().unique().tolist())
    rows = frame.assign(ranks=frame.get(f"{MORE}ranks")).to_dict("records")
    return frame.assign(failed_on=[_failed_on(row, contents.get(row["environment_id"], {})) for row in rows])


def point(store: Store, point_id: str) -> dict[str, Any] | None:
    """One point: the columns of `points`, its config, environment ({} if not recorded); None if the id is unknown."""
    found = next(iter(_mappings(store, _DETAILS.where(v_points.c.point_id == point_id))), None)
    return found and _with_place(found)


def _with_place(row: dict[str, Any]) -> dict[str, Any]:
    environment, ranks = row["environment"] or {}, (row["more_axes"] or {}).get("ranks")
    return {**row, "environment": environment, "failed_on": _failed_on({**row, "ranks": ranks}, environment)}


def _failed_on(row: Mapping[Any, Any], environment: Mapping[str, Any]) -> str:
    """The card of a failed point, and its node. Of several ranks the reason says which one failed, and where."""
    gpu = environment.get("gpu")
    if row["state"] not in FAILED or row["ranks"] or not (isinstance(gpu, dict) and gpu.get("uuid")):
        return ""
    return f"on GPU {gpu.get('index', '?')} ({gpu['uuid']}) of {row['node'] or environment.get('host')}"


def attempts(store: Store, run_id: str) -> pd.DataFrame:
    """All attempts at a run's points, by point: `point_id`, `number`, `state`, `started_at`."""
    query = select(Attempt.point_id, Attempt.number, Attempt.state, Attempt.started_at).join(Point)
    return _frame(store, query.where(Point.run_id == run_id).order_by(Point.number, Attempt.number))


def metrics(store: Store, point_id: str) -> pd.DataFrame:
    """The metrics of a point, with all samples and the method of measurement."""
    names = ("name", "unit", "value", "p10", "p90", "ci_low", "ci_high", "samples", "method")
    query = select(*(getattr(Metric, name) for name in names)).select_from(Point).join(Point.metrics)
    return _frame(store, query.where(Point.id == point_id).order_by(Metric.id))


def samples(store: Store, metric: str, point_ids: Sequence[str]) -> dict[str, list[float]]:
    """The samples of a metric, or its value where it has none, of points by id."""
    query = select(Metric.point_id, Metric.value, Metric.samples).select_from(Point).join(Point.metrics)
    rows = _mappings(store, query.where(Point.id.in_(point_ids), Metric.name == metric))
    return {row["point_id"]: row["samples"] or [row["value"]] for row in rows}


def coordinates(store: Store, metric: str, name: str | None = None) -> Sequence[Row]:
    """The different coordinates of points at which a metric was measured (in runs of a name): the columns _PLACE."""
    return _fetched(store, _measured(metric, name, *_PLACE).distinct())


def readings(
    store: Store, metric: str, name: str | None = None, within: Mapping[str, Collection[Any]] | None = None
) -> Sequence[Row]:
    """All values above 0 of a metric that were measured, by time of their runs (of a name): of its point the columns
    _PLACE, `point_id`, `route` (as JSON text) and `environment_id`; its `value`, `p10` and `p90`; of its run `run_id`,
    `created_at`, `git_commit` and `git_dirty`. `within`: values of axes, of which each is one of these."""
    of_run = (Run.id.label("run_id"), Run.created_at, Run.git_commit, Run.git_dirty)
    of_point = (Point.id.label("point_id"), cast(Attempt.route, Text).label("route"), Attempt.environment_id)
    query = _measured(metric, name, *_PLACE, Metric.value, Metric.p10, Metric.p90, *of_run, *of_point)
    for axis, values in (within or {}).items():
        column = views.AXIS_COLUMNS[axis]
        query = query.where(or_(column.in_([each for each in values if each is not None]), column.is_(None)))
    return _fetched(store, query.order_by(Run.created_at, Run.id, Point.number))


def _measured(metric: str, name: str | None, *columns: Any) -> Select:
    """Columns of the values above 0 of a metric that were measured, in runs of a name."""
    query = select(*columns).select_from(Run).join(Point, Point.run_id == Run.id).join(Point.outcome)
    query = query.join(Point.metrics).join(Environment, Environment.id == Attempt.environment_id, isouter=True)
    query = query.where(Metric.name == metric, Metric.value > 0, Run.origin == Origin.MEASURED)
    return query if name is None else query.where(Run.name == name)


def environments(store: Store, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Environments by id."""
    with store.session() as session:
        return {row.id: row.content for row in session.scalars(select(Environment).where(Environment.id.in_(ids)))}


def series(
    store: Store, point_id: str, *, attempt: int | None = None, most: int | None = None, since: datetime | None = None
) -> pd.DataFrame:
    """The samples of a point's series, by attempt, name and rank, and of each in the order of time.

    Steps that were done again after a restart have their latest samples, which come last. `most`: samples of each
    series to read, evenly spaced, and the last.
    """
    one = (Series.attempt, Series.name, Series.rank)
    query = select(*_SAMPLE).where(Series.point_id == point_id)
    query = query if attempt is None else query.where(Series.attempt == attempt)
    query = query if since is None else query.where(Series.at >= since)
    if most is not None:
        place = func.row_number().over(partition_by=one, order_by=(Series.at, Series.step)).label("place")
        rows = query.add_columns(place, func.count().over(partition_by=one).label("of")).subquery()
        stride = (rows.c.of + most - 1) // most
        query = select(*(rows.c[column.key] for column in _SAMPLE))
        query = query.where(or_((rows.c.place - 1) % stride == 0, rows.c.place == rows.c.of))
    shown = query.selected_columns
    return _frame(store, query.order_by(shown.attempt, shown.name, shown.rank, shown.at, shown.step))


def preflights(store: Store) -> list[dict[str, Any]]:
    """The newest points of kind "preflight" that were measured to an end, newest first: the columns of `point`, and
    `figures`, the metrics' values by name."""
    ended = v_points.c.started_at.is_not(None), v_points.c.ended_at.is_not(None)
    measured = v_points.c.origin == Origin.MEASURED.value, v_points.c.state != PointState.CANCELLED
    of_kind = _DETAILS.where(v_points.c.kind == "preflight", *ended, *measured)
    rows = _mappings(store, of_kind.order_by(v_points.c.ended_at.desc()).limit(_PREFLIGHTS))
    figures: dict[str, dict[str, float]] = {row["point_id"]: {} for row in rows}
    values = select(*(v_metrics.c[name] for name in ("point_id", "metric", "value")))
    for row in _mappings(store, values.where(v_metrics.c.kind == "preflight")):
        figures.get(row["point_id"], {})[row["metric"]] = row["value"]
    return [{**row, "environment": row["environment"] or {}, "figures": figures[row["point_id"]]} for row in rows]


def running(store: Store) -> list[dict[str, Any]]:
    """The points that are measured just now, of all runs, the oldest first: the columns of `points`, and the person."""
    query = _POINTS.add_columns(Run.person).join(Run, Run.id == v_points.c.run_id)
    order = (Run.created_at, Run.id, v_points.c.number)
    return _mappings(store, query.where(_RUNNING, Run.state == RunState.RUNNING).order_by(*order))


def latest(store: Store, point_ids: Sequence[str], names: Sequence[str]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The newest sample of each named series and rank, by point and attempt."""
    one = (Series.point_id, Series.attempt, Series.name, Series.rank)
    of_points = Series.point_id.in_(point_ids), Series.name.in_(names)
    last = select(*one, func.max(Series.step).label("step")).where(*of_points).group_by(*one).subquery()
    same = and_(*(last.c[column.key] == column for column in (*one, Series.step)))
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in _mappings(store, select(*one, Series.value).join(last, same)):
        found.setdefault((row["point_id"], row["attempt"]), []).append(row)
    return found


def nodes(store: Store, since: datetime) -> dict[str, datetime]:
    """The nodes that have measured since then, by name, with their last sign of life."""
    sign = func.coalesce(Attempt.ended_at, Attempt.heartbeat_at, Attempt.started_at)
    query = select(Attempt.node, func.max(sign).label("at")).where(Attempt.node.is_not(None), sign >= since)
    return {row["node"]: row["at"] for row in _mappings(store, query.group_by(Attempt.node).order_by(Attempt.node))}


def reasons(store: Store, run_ids: Sequence[str]) -> dict[str, str]:
    """Why runs did not end well, by id: who cancelled it, or the first point that failed."""
    first = func.min(Point.number).over(partition_by=Point.run_id).label("first")
    failed = (
        select(Point.id, Point.number, first).join(Point.outcome).where(Point.run_id.in_(run_ids), FAILS).subquery()
    )
    found: dict[str, str] = {}
    for row in _mappings(
        store, _DETAILS.join(failed, failed.c.id == Point.id).where(failed.c.number == failed.c.first)
    ):
        row = _with_place(row)
        found[row["run_id"]] = f"{row['label']}: {row['state']}, {reason_in_words(row) or 'without a reason'}"
    said = select(Event.run_id, Event.message).join(Run).where(Run.id.in_(run_ids), Run.state == RunState.CANCELLED)
    said = said.where(Event.message.startswith(CANCELLED_BY))
    return found | {row["run_id"]: row["message"] for row in _mappings(store, said)}


def artifacts(store: Store, point_id: str) -> pd.DataFrame:
    """The files of a point, latest attempt first, with their text if it is stored."""
    columns = (Artifact.name, Artifact.attempt, Artifact.path, Artifact.size, Artifact.sha256, Artifact.truncated)
    query = select(*columns, Artifact.content).where(Artifact.point_id == point_id)
    return _frame(store, query.order_by(Artifact.attempt.desc(), Artifact.name))


def files(store: Store, run_id: str, number: int | None = None) -> pd.DataFrame:
    """The files of a run's points, or of the one with a number, by point, latest attempt first; without their text."""
    columns = (Artifact.attempt, Artifact.name, Artifact.path, Artifact.size, Artifact.sha256)
    query = select(Point.number.label("point"), *columns).join(Point, Point.id == Artifact.point_id)
    query = query.where(Point.run_id == run_id, *([] if number is None else [Point.number == number]))
    return _frame(store, query.order_by(Point.number, Artifact.attempt.desc(), Artifact.name))


def events(store: Store, run_id: str) -> pd.DataFrame:
    """The events of a run, by time."""
    columns = (Event.at, Event.level, Event.message, Event.point_id)
    return _frame(store, select(*columns).where(Event.run_id == run_id).order_by(Event.at, Event.id))


def scaling(store: Store, *, run_ids: Sequence[str] | None = None, origin: Origin | str | None = None) -> pd.DataFrame:
    """Rows of the view v_scaling: time, throughput and memory against S, a row per ok point and metric."""
    order = ("run_id", "implementation", "workload", "pass", "seq_len", "metric", "point_id")
    query = _view(v_scaling, run_ids, *order)
    return _frame(store, query if origin is None else query.where(v_scaling.c.origin == Origin(origin).value))


def measurements(store: Store, *, run_ids: Sequence[str] | None = None, metric: str | None = None) -> pd.DataFrame:
    """Rows of the view v_metrics: all metrics (or one) of the ok points."""
    query = _view(v_metrics, run_ids, "run_id", "point_id", "metric")
    return _frame(store, query if metric is None else query.where(v_metrics.c.metric == metric))


def states(store: Store, *, run_ids: Sequence[str] | None = None) -> pd.DataFrame:
    """Rows of the view v_points: state and reason of every point."""
    return _frame(store, _view(v_points, run_ids, "run_id", "number"))


def lengths(store: Store, run_ids: Sequence[str]) -> dict[str, int]:
    """The numbers of different lengths at which runs measured a point, by id; without runs that have none."""
    length = Point.__table__.c.seq_len
    query = select(Point.run_id, func.count(length.distinct())).join(Point.outcome).group_by(Point.run_id)
    query = query.where(Point.run_id.in_(run_ids), Attempt.state == PointState.OK, length.is_not(None))
    return {row[0]: row[1] for row in _fetched(store, query)}


def _view(view: Table, run_ids: Sequence[str] | None, *order: str) -> Select:
    query = select(view).order_by(*(view.c[name] for name in order))
    return query if run_ids is None else query.where(view.c.run_id.in_(run_ids))


def quantities(store: Store, run_ids: Sequence[str] | None = None) -> Quantities:
    """Quantities that the runs (None: all) declare; the newest run's declaration wins where they differ."""
    columns = [models.DeclaredQuantity.__table__.c[field.name] for field in fields(Quantity)]
    query = select(*columns).join(Run, Run.id == models.DeclaredQuantity.run_id)
    if run_ids is not None:
        query = query.where(models.DeclaredQuantity.run_id.in_(run_ids))
    query = query.order_by(Run.created_at.desc(), models.DeclaredQuantity.position)
    # Runs of a kind declare the same.
    different = dict.fromkeys(tuple(row.items()) for row in _mappings(store, query))
    return Quantities([_DECLARATION.validate_python(dict(row)) for row in different])


def own_axes(store: Store, run_ids: Sequence[str]) -> dict[str, str]:
    """Labels of the axes that the runs' kinds declare themselves, by their column in frames."""
    with store.session() as session:
        declared = session.scalars(select(Run.axes).where(Run.id.in_(run_ids))).all()
    return {MORE + axis["name"]: axis["label"] for axes in declared for axis in axes or ()}


def counts(store: Store) -> dict[str, int]:
    """Numbers of runs, points, metrics (also of attempts that others replaced) and verdicts stored."""
    number = func.count()
    with store.session() as session:
        by_origin = dict(session.execute(select(Run.origin, number).group_by(Run.origin)).all())
        states = select(Attempt.state, number).select_from(Point).join(Point.outcome).group_by(Attempt.state)
        by_state = dict(session.execute(states).all())
        return {
            "runs": sum(by_origin.values()),
            "runs_measured": by_origin.get(Origin.MEASURED, 0),
            "runs_reported": by_origin.get(Origin.REPORTED, 0),
            "runs_running": session.scalars(select(number).where(Run.state == RunState.RUNNING)).one(),
            "points": sum(by_state.values()),
            **{f"points_{state.value}": by_state.get(state, 0) for state in PointState},
            "metrics": session.scalars(select(number).select_from(Metric)).one(),
            "verdicts": session.scalars(select(number).select_from(models.Verdict)).one(),
        }


def _frame(store: Store, query: Select) -> pd.DataFrame:
    """The rows of a query; `more_axes` comes as one column "axis_<name>" per kind-specific axis."""
    columns = {column.key: column.type for column in query.selected_columns}
    rows = [list(row.values()) for row in _mappings(store, query)]
    frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
    for name, kind in columns.items():
        kind = kind.impl if isinstance(kind, TypeDecorator) else kind
        if isinstance(kind, DateTime):
            frame[name] = pd.to_datetime(frame[name], utc=True)
        elif isinstance(kind, Integer | Float):
            frame[name] = pd.to_numeric(frame[name])
    if "more_axes" in columns:
        values = [each or {} for each in frame.pop("more_axes")]
        for name in sorted({name for each in values for name in each}):
            frame[MORE + name] = pd.Series([each.get(name) for each in values], index=frame.index, dtype=object)
    return frame


def _mappings(store: Store, query: Select) -> list[dict[str, Any]]:
    """The rows of a query, a mapping each, as the database has them: `more_axes` is one column."""
    columns = [str(column.key) for column in query.selected_columns]
    enums = [str(column.key) for column in query.selected_columns if isinstance(column.type, Enum)]
    rows = [dict(zip(columns, row, strict=True)) for row in _fetched(store, query)]
    for row in rows if enums else ():
        row |= {name: row[name] and row[name].value for name in enums}
    return rows


def _fetched(store: Store, query: Select) -> Sequence[Row]:
    with store.session() as session:
        return session.execute(query).all()
