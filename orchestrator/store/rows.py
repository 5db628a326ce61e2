"""Columns of rows from the records that they hold. Changes objects alone; what is in the database is up to callers."""

from __future__ import annotations

import hashlib
import json
import math
from datetime import datetime
from typing import Any

from jobs.schema.axes import AXES, check_coordinate, check_more
from jobs.schema.states import PointState
from orchestrator.database_url import StoreError
from orchestrator.store.models import Point, Remeasurement
from orchestrator.store.records import EventRecord, OutcomeRecord, PointRecord, StartRecord

_ATTEMPT = [column.key for column in Remeasurement.__table__.columns if column.key not in ("point_id", "plan")]


def plan(point: Point, record: PointRecord) -> None:
    """Describe a planned point. Raises StoreError."""
    point.number, point.key, point.label = record.index, record.key, record.label
    point.config, point.estimate_bytes = record.config, record.estimate_bytes
    _axes(point, record)


def _axes(point: Point, record: PointRecord) -> None:
    """Set the point's axes. A length or batch of 0 is refused: the views divide by the batch, and fits take logs."""
    rest = dict(record.axes)
    for axis in AXES:
        value = rest.pop(axis.attribute, rest.pop(axis.name, None))
        try:
            check_coordinate(axis, value)
        except ValueError as err:
            raise StoreError(f"point {record.point_id!r}: {err}") from None
        setattr(point, axis.attribute, value)
    try:
        check_more(rest)
    except ValueError as err:
        raise StoreError(f"point {record.point_id!r}: {err}") from None
    point.more_axes = rest


def reach(point: Point, record: PointRecord) -> None:
    """Begin a planned point's state: pending, or skipped with its reason."""
    _begin(point, record.attempt, record.state, record.at)
    point.resumed = record.resumed or 0
    point.reason, point.ended_at = clean(record.reason), record.at if record.state.ended else None
    point.route, point.environment_id = {}, None


def plan_again(again: Remeasurement, record: PointRecord) -> None:
    """Begin the state of a point that is planned to be measured again."""
    _begin(again, record.attempt, record.state, record.at)
    again.resumed, again.plan = record.resumed or 0, record.model_dump(mode="json")


def start(row: Point | Remeasurement, record: StartRecord) -> None:
    """Begin an attempt; a point loses the route and environment of earlier ones."""
    _begin(row, record.attempt, PointState.RUNNING, record.at)
    row.node, row.started_at, row.heartbeat_at = record.node, record.at, record.at
    if isinstance(row, Point):
        row.route, row.environment_id = {}, None


def _begin(row: Point | Remeasurement, attempt: int, state: PointState, at: datetime) -> None:
    """Set the state of a point's attempt and clear the progress of earlier ones."""
    row.state, row.reason, row.state_at, row.attempt = state, None, at, attempt
    row.started_at = row.ended_at = row.heartbeat_at = None
    row.node = row.phase = row.done = row.total = row.rate = None


def end_without_outcome(again: Remeasurement, record: OutcomeRecord) -> None:
    """Set how an attempt got lost or was cancelled."""
    again.state, again.reason, again.state_at = record.state, clean(record.reason), record.at
    again.attempt, again.ended_at = record.attempt, record.at
    again.started_at = record.started_at or again.started_at


def take_over(point: Point, again: Remeasurement) -> None:
    """Replace what a point had before it was measured again by the plan and progress of that attempt."""
    plan(point, PointRecord.model_validate(again.plan))
    for name in _ATTEMPT:
        setattr(point, name, getattr(again, name))


def end(point: Point, record: OutcomeRecord) -> None:
    """Set how an attempt ended."""
    point.state, point.reason, point.state_at = record.state, clean(record.reason), record.at
    point.attempt, point.ended_at = record.attempt, record.at
    point.started_at = record.started_at or point.started_at
    point.route = dict(record.route)
    point.environment_id = digest(record.environment) if record.environment else None


def metrics(record: OutcomeRecord) -> list[dict[str, Any]]:
    """Columns of the metrics of an attempt, one mapping a row."""
    return [
        {**metric.model_dump(), "samples": list(metric.samples), "point_id": record.point_id}
        for metric in record.metrics
    ]


def environment(content: dict[str, Any]) -> dict[str, Any]:
    """Columns of an environment."""
    gpu = content.get("gpu")
    gpu = gpu.get("name") if isinstance(gpu, dict) else gpu
    return {"id": digest(content), "gpu": None if gpu is None else clean(str(gpu)), "content": content}


def event(record: EventRecord) -> dict[str, Any]:
    """Columns of an event, whose id can be found from its row."""
    record = record.model_copy(update={"message": clean(record.message)})
    values = {name: getattr(record, name) for name in ("run_id", "point_id", "at", "level", "message")}
    return {"id": digest(record.model_dump(mode="json")), **values}


def refuse_untrue(record: OutcomeRecord) -> None:
    """Raise StoreError for numbers of a failed point, numbers that are not finite, and a state that is no end."""
    if record.metrics and record.state is not PointState.OK:
        raise StoreError(
            f"metrics: point {record.point_id!r} ended {record.state.value!r} with numbers; only 'ok' may carry metrics"
        )
    if not record.state.ended:
        raise StoreError(f"state: {record.state.value!r} of point {record.point_id!r} is no end; send a start instead")
    for metric in record.metrics:
        if not all(math.isfinite(number) for number in (metric.value, *metric.samples)):
            raise StoreError(
                f"metrics: {metric.name!r} of point {record.point_id!r} is not finite; end the point 'error' instead"
            )


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def clean(text: str | None) -> str | None:
    """The text without characters that a database rejects: captured output may hold NUL bytes and lone surrogates."""
    if text is None:
        return None
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
