"""Charts as declared in charts.yaml, shared by the pages and the reports; `scaling_chart.py` has the rows of growth.

Text and grid take the colours of the theme that shows the chart; only series, states and guides are coloured here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from sqlalchemy import text

from jobs.schema.plain_text import printable
from jobs.schema.quantities import Quantities
from jobs.schema.states import PointState
from orchestrator.judge.branches import Branch, BranchShares
from orchestrator.report import series
from orchestrator.store import Store
from orchestrator.store.models import UtcDateTime

_DECLARED: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text())
_MOST = 4000  # rows drawn of a kind's chart; of more, evenly spaced ones of each series
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
_BRANCHES = {
    Branch.COMPRESSED: series.AMBER,
    Branch.SELECTED: series.PERIWINKLE,
    Branch.WINDOW: series.TEAL,
    Branch.OTHER: series.BROWN,
    Branch.SHARED: series.PINK,
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


class Chart(NamedTuple):
    """A chart in Vega-Lite without its rows, and these."""

    title: str
    spec: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def whole(self) -> dict[str, Any]:
        """The chart with its rows."""
        return {**self.spec, "data": {"values": self.rows}}


def kind_charts(store: Store, run_id: str, kind: str) -> list[Chart]:
    """The charts that answer the question of a run's kind and have rows. Raises StoreUnavailable."""
    charts = []
    for declared in _DECLARED["kinds"].get(kind, ()):
        with store.session() as session:
            query = text(declared["query"]).columns(at=UtcDateTime)
            found = session.execute(query, {"run": run_id}).mappings().all()
        if found:
            charts.append(_chart(declared, _thinned(found), {}))
    return charts


def _thinned(rows: Sequence[Mapping[Any, Any]]) -> list[Mapping[Any, Any]]:
    """At most about `_MOST` rows: a series, the rows of the same texts, is whole if it is short."""
    found = defaultdict(list)
    for row in rows:
        found[tuple(value for value in row.values() if isinstance(value, str))].append(row)
    most = max(_MOST // len(found), 1)
    return [row for one in found.values() for row in one[:: math.ceil(len(one) / most)]]


def drawn(name: str, rows: Sequence[Mapping[Any, Any]], **values: Any) -> Chart:
    """The declared chart of this name with these rows; `values` by the names that it has for them."""
    return _chart(_DECLARED[name], rows, values)


def _chart(declared: Mapping[str, Any], rows: Sequence[Mapping[Any, Any]], values: Mapping[str, Any]) -> Chart:
    shown = _as_json(rows)

    def filled(part: Any) -> Any:
        """The part with the given values, and with the fixed colours of its rows."""
        if isinstance(part, list):
            return [filled(each) for each in part]
        if isinstance(part, str) and part.startswith("$"):
            return _as_json(values[part[1:]])
        if not isinstance(part, dict):
            return part
        part = {name: filled(each) for name, each in part.items()}
        color = part.get("color")
        if isinstance(color, dict) and (look := _LOOKS.get(color.get("field", ""))):
            names = list(dict.fromkeys(row[color["field"]] for row in shown))
            part["color"] = color | {"scale": {"domain": names, "range": [look(name) for name in names]}}
        return part

    spec = {name: filled(part) for name, part in declared.items() if name != "query"}
    return Chart(spec["title"], spec | {"config": _CONFIG}, shown)


def _as_json(part: Any) -> Any:
    """The part of a chart as JSON has it, its texts printable: an image's XML cannot hold controls."""
    if isinstance(part, Mapping):
        return {name: _as_json(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_as_json(value) for value in part]
    if isinstance(part, datetime):
        return part.isoformat()
    if isinstance(part, Decimal):  # Postgres' numeric
        return float(part)
    return printable(part) if isinstance(part, str) else part


_LOOKS = {
    "implementation": lambda name: series.look(name).color,
    "branch": lambda name: _BRANCHES.get(name, series.GREY),
    "state": lambda name: _STATES.get(name, series.GREY),
}


def exponent_chart(fits: pd.DataFrame, quantities: Quantities) -> Chart:
    """Fitted exponents (`fits_frame`) with 95 % intervals, beside the lines of linear (1) and quadratic (2) growth."""
    rows = fits.loc[fits["exponent"].notna()].to_dict("records")  # no power law describes the others
    names, scales = _series(rows, quantities)
    # Intervals of few points can be very wide: the axis follows the exponents, and the intervals are clipped.
    domain = [min([0.5, *(r["exponent"] - 0.2 for r in rows)]), max([2.5, *(r["exponent"] + 0.2 for r in rows)])]
    shown: list[dict[str, Any]] = [
        {"series": name} | {column: row[column] for column in ("exponent", "ci_low", "ci_high")}
        for name, row in zip(names, rows, strict=True)
    ]
    return drawn("exponents", shown, domain=domain, **scales)


def local_chart(fits: pd.DataFrame, quantities: Quantities) -> Chart:
    """Local exponents, the slopes over about an octave, against S: of fits of one metric (`fits_frame`)."""
    rows = fits.to_dict("records")
    names, scales = _series(rows, quantities)
    shown: list[dict[str, Any]] = [
        {"series": name, "seq_len": math.sqrt(slope.low * slope.high), "exponent": slope.exponent}
        | {"range": f"{length_label(slope.low)} to {length_label(slope.high)}"}
        | {"low": slope.exponent - slope.error, "high": slope.exponent + slope.error}
        for name, row in zip(names, rows, strict=True)
        for slope in row["local"]
    ]
    exponents = [row["exponent"] for row in shown]
    domain = [min(0, *exponents) - 0.2, max(2.1, *exponents) + 0.2]  # no mark is cut
    title = f"local exponent of {quantities.of(rows[0]['metric']).legend}"
    return drawn("slopes", shown, domain=domain, title=title, **scales)


def _series(rows: Sequence[series.Row], quantities: Quantities) -> tuple[list[str], dict[str, list[Any]]]:
    """The name of each row's series, and the scales of these: names, colours, marks and dashes."""
    labels = series.labels(rows, quantities)
    names, looks = [labels[series.key(row)] for row in rows], [series.look(row["implementation"]) for row in rows]
    dashes = [list(dash) for dash in series.dashes(rows)]
    return names, {
        "names": names,
        "colors": [look.color for look in looks],
        "marks": [look.mark for look in looks],
        "dashes": dashes,
    }


def branch_chart(shares: Sequence[BranchShares]) -> Chart:
    """Each branch's share of one series' time, a bar per length, the compressed branch at the foot."""
    rows = [
        {"branch": branch, "milliseconds": time, "share": one.share(branch)}
        | {"length": length_label(one.seq_len), "place": list(Branch).index(branch)}
        for one in sorted(shares, key=lambda one: one.seq_len)
        for branch, time in one.milliseconds.items()
    ]
    return drawn("shares", rows)


def length_label(length: float) -> str:
    """A sequence length in short: 512, 1K, 64K, 1M; others in full."""
    length = int(length)
    for size, suffix in ((2**20, "M"), (2**10, "K")):
        if length >= size and length % (size // 2) == 0:
            return f"{length / size:g}{suffix}"
    return f"{length:,}"
