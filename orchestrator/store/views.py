"""The reporting views as typed tables, so that Python reads the same values on both databases."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Double, MetaData, String, Table

from jobs.schema.axes import AXES
from orchestrator.store.types import UtcDateTime

_metadata = MetaData()  # separate from the models': migrations create the views, and no schema comparison covers them
_TEXT, _INT, _FLOAT, _TIME = String(), BigInteger(), Double(), UtcDateTime()

_RUN = {"run_id": _TEXT, "run_name": _TEXT, "origin": _TEXT, "source": _TEXT}
_AXES = {axis.name: _TEXT if axis.type == "text" else _INT for axis in AXES} | {"gpu": _TEXT, "more_axes": JSON()}
_METRIC = {
    "metric": _TEXT,
    "unit": _TEXT,
    "value": _FLOAT,
    "ci_low": _FLOAT,
    "ci_high": _FLOAT,
    "per_sequence": _FLOAT,
}
_POINT = {"point_id": _TEXT, "label": _TEXT, "state": _TEXT}
_SCALING = {**_RUN, **_POINT, **_AXES, **_METRIC, "ended_at": _TIME}


def _view(name: str, columns: dict) -> Table:
    return Table(name, _metadata, *(Column(column, kind) for column, kind in columns.items()))


v_scaling = _view("v_scaling", {**_SCALING, "plot": _TEXT})
v_metrics = _view(
    "v_metrics", {**_SCALING, "kind": _TEXT, "p10": _FLOAT, "p90": _FLOAT, "method": _TEXT, "estimate_bytes": _INT}
)
v_points = _view(
    "v_points",
    {
        **_RUN,
        "kind": _TEXT,
        "point_id": _TEXT,
        "number": _INT,
        "label": _TEXT,
        "state": _TEXT,
        "reason": _TEXT,
        "attempt": _INT,
        **_AXES,
        "estimate_bytes": _INT,
        "node": _TEXT,
        "phase": _TEXT,
        "done": _INT,
        "total": _INT,
        "rate": _FLOAT,
        "heartbeat_at": _TIME,
        "started_at": _TIME,
        "ended_at": _TIME,
        "key": _TEXT,
    },
)
v_gate = _view(
    "v_gate",
    {
        "target": _TEXT,
        "target_title": _TEXT,
        "target_result": _TEXT,
        "position": _INT,
        "rule": _TEXT,
        "title": _TEXT,
        "result": _TEXT,
        "value": _FLOAT,
        "comparison": _TEXT,
        "bound": _FLOAT,
        "unit": _TEXT,
        "margin": _FLOAT,
        "reason": _TEXT,
        "evidence": JSON(),
        "run_id": _TEXT,
        "evaluated_at": _TIME,
    },
)
