"""Charts that answer the question of a run's kind, declared in kinds.yaml: a query, and how its rows are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from sqlalchemy import text

from jobs.schema.plain_text import printable
from jobs.schema.states import PointState
from orchestrator.report import series
from orchestrator.store import Store

_MOST = 4000  # rows drawn of a chart; of more, evenly spaced ones
_STATES = {
    PointState.OK: series.LEAF,
    PointState.RUNNING: series.SKY,
    PointState.OOM: series.VERMILLION,
    PointState.TIMEOUT: series.PINK,
    PointState.HANG: series.CRIMSON,
    PointState.CRASH: series.BROWN,
    PointState.ERROR: series.VIOLET,
    PointState.SKIPPED: series.AMBER,
}
_LEGEND = {"orient": "bottom", "labelLimit": 0, "columns": 3, "symbolOpacity": 1, "symbolBaseFillColor": series.GREY}
_CONFIG = {
    "legend": _LEGEND,
    "axis": {"gridOpacity": 0.35, "labelLimit": 560},
    "axisYDiscrete": {"labelOverlap": False},
    "header": {"labelLimit": 0},
    "view": {"continuousHeight": 230, "continuousWidth": 480},
    "title": {"anchor": "start", "fontSize": 14},
    "range": {"category": [series.BLUE, series.AMBER, series.GREEN, series.VIOLET, *series.OTHER_COLORS]},
}


class KindChart(NamedTuple):
    """A chart of a run, in Vega-Lite without its rows, and these."""

    title: str
    spec: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def whole(self) -> dict[str, Any]:
        """The chart with its rows."""
        return {**self.spec, "data": {"values": self.rows}}


@cache
def _declared() -> Mapping[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text())


def kind_charts(store: Store, run_id: str, kind: str) -> list[KindChart]:
    """The charts of a run by its kind that have rows. Raises StoreUnavailable."""
    charts = []
    for chart in _declared().get(kind, ()):
        with store.session() as session:
            found = session.execute(text(chart["query"]), {"run": run_id}).mappings().all()
        step = len(found) // _MOST + 1
        rows = [{name: _cell(value) for name, value in row.items()} for row in found[::step]]
        if rows:
            spec = {name: _colored(part, rows) for name, part in chart.items() if name != "query"}
            charts.append(KindChart(chart["title"], spec | {"config": _CONFIG}, rows))
    return charts


def _cell(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return printable(value) if isinstance(value, str) else value


def _colored(part: Any, rows: list[dict[str, Any]]) -> Any:
    """The part of a chart, with the fixed colours of the implementations and states in it."""
    if isinstance(part, list):
        return [_colored(each, rows) for each in part]
    if not isinstance(part, dict):
        return part
    part = {name: _colored(each, rows) for name, each in part.items()}
    field = part.get("color", {}).get("field") if isinstance(part.get("color"), dict) else None
    if field in ("implementation", "state"):
        names = list(dict.fromkeys(row[field] for row in rows))
        looks = [_STATES.get(name, series.GREY) if field == "state" else series.look(name).color for name in names]
        part["color"] = part["color"] | {"scale": {"domain": names, "range": looks}}
    return part
