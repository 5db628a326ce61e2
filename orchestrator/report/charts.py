"""Charts as declared in charts.yaml, shared by the pages and the reports, and the rows of those over the lengths.

In the chart of growth reported results are hollow and dashed, measured ones filled. A fitted curve is drawn over the
lengths on which it rests; points at other lengths are paler. Text and grid take the colours of the theme that shows the
chart; only series, states and guides are coloured here.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from sqlalchemy import text

from jobs.schema.axes import MORE, more_columns
from jobs.schema.plain_text import printable
from jobs.schema.quantities import Plot, Quantities, Quantity
from jobs.schema.states import PointState
from orchestrator.judge.branches import Branch, BranchShares
from orchestrator.report import series
from orchestrator.report.series import Row
from orchestrator.store import Store
from orchestrator.store.models import UtcDateTime

Frame = Any  # a DataFrame: pandas' stubs refuse much of what it takes

_DECLARED: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_bytes())
_MOST_ROWS = 4000  # drawn of a kind's chart; of more, evenly spaced ones of each series
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
_LEGEND = {"orient": "bottom", "labelLimit": 0, "columns": 2, "symbolOpacity": 1, "symbolBaseFillColor": series.GREY}
_CONFIG = {
    "legend": _LEGEND,
    "axis": {"gridOpacity": 0.35, "labelLimit": 560},
    "axisDiscrete": {"labelFlush": False},
    "axisYDiscrete": {"labelOverlap": False},
    "header": {"labelLimit": 0},
    "view": {"continuousHeight": 230, "continuousWidth": 480},
    "title": {"anchor": "start", "fontSize": 14},
    "range": {"category": [series.BLUE, series.AMBER, series.GREEN, series.VIOLET, *series.OTHER_COLORS]},
}

_TITLE = 40  # characters of an axis title that fit in one line
_PALE = 0.35  # opacity of points that a fit leaves out
_MOST_SERIES, _MOST_POINTS = 60, 4000  # of a chart: more cannot be told apart, and browsers grow slow
_LEAST, _MOST = 1e-300, 1e300  # values that axes and guides around them can be computed for

# Guide slopes on log-log axes and their labels, by kind of plot.
_GUIDES = {
    Plot.GROWTH: ((1.0, "~ S"), (2.0, "~ S²")),
    Plot.RATE: ((0.0, "linear"), (-1.0, "S²")),
    Plot.STEP_RATE: ((0.0, "constant"), (-1.0, "~ 1/S")),  # decoding: a step makes the same number of tokens at every S
}
# Units named on the axis of values in this unit, and Vega's expression for a tick's label.
_SCALES = {
    "MiB": (
        "MiB, GiB",
        "datum.value >= 1024 ? format(datum.value / 1024, ',') + ' GiB' : "
        "datum.value >= 1 ? datum.value + ' MiB' : datum.value * 1024 + ' KiB'",
    ),
    "ms": (
        "s, ms, µs",
        "datum.value >= 1000 ? format(datum.value / 1000, ',') + ' s' : "
        "datum.value >= 1 ? datum.value + ' ms' : round(datum.value * 1000) + ' µs'",
    ),
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
    """At most about `_MOST_ROWS` rows, the last of each series, the rows of the same texts, too; short ones whole."""
    found = defaultdict(list)
    for row in rows:
        found[tuple(value for value in row.values() if isinstance(value, str))].append(row)
    most = max(_MOST_ROWS // len(found), 1)
    return [row for one in found.values() for row in (*one[: -1 : math.ceil(len(one) / most)], one[-1])]


def drawn(name: str, rows: Sequence[Mapping[Any, Any]], **values: Any) -> Chart:
    """The declared chart of this name with these rows; `values` by the names that it has for them."""
    return _chart(_DECLARED[name], rows, values)


def _chart(declared: Mapping[str, Any], rows: Sequence[Mapping[Any, Any]], values: Mapping[str, Any]) -> Chart:
    shown = _as_json(rows)

    def filled(part: Any) -> Any:
        """The part with the given values, the fixed colours of its rows, and ticks where these have lengths."""
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
        if part.get("field") == "seq_len" and "axis" in part:
            found = [row["seq_len"] for row in shown if row.get("seq_len")]
            ticks = [2**power for power in range(64) if found and min(found) <= 2**power <= max(found)]
            part["axis"] |= {"values": ticks or found}
        return part

    spec = {name: filled(part) for name, part in declared.items() if name != "query"}
    return Chart(spec["title"], spec | {"config": _CONFIG}, shown)


def _as_json(part: Any) -> Any:
    """The part of a chart as JSON has it, its names as people read them, its texts printable: XML holds no controls."""
    if isinstance(part, Mapping):
        return {name: _as_json(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_as_json(value) for value in part]
    if isinstance(part, datetime):
        return part.isoformat()
    if isinstance(part, Decimal):  # Postgres' numeric
        return float(part)
    return series.named(printable(part)) if isinstance(part, str) else part


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


def scaling_chart(rows: pd.DataFrame, fits: pd.DataFrame, quantity: Quantity, title: Sequence[str] = ()) -> Chart:
    """A quantity per sequence against the sequence length: points, intervals, fitted lines, guide slopes.

    Of many series, those with the most lengths are drawn, and a line above the chart says how many are not.

    Args:
        rows: rows of `v_scaling`, some of them `drawable`; other metrics are left out.
        fits: `orchestrator.judge.analysis.fits_frame`; those of other metrics and series are left out.
        title: the title, and lines below it.
    """
    every = _points(rows, quantity)
    lengths = every.groupby("key")["seq_len"].nunique().sort_values(ascending=False, kind="stable")
    points = every.loc[every["key"].isin(lengths.index[:_MOST_SERIES])].iloc[:_MOST_POINTS]
    laws = {key: fit for fit in fits.to_dict("records") if (key := series.key(fit)) in set(points["key"])}
    points = _named(points, laws)
    ordered = points.sort_values(["origin", "implementation", "series"]).drop_duplicates("series").to_dict("records")
    looks = [series.look(row["implementation"]) for row in ordered]
    # The guides begin at the shortest length, below the points if they grow, above if they fall.
    start = points.loc[points["seq_len"] == points["seq_len"].min(), "y"]
    grows = _GUIDES[quantity.plot or Plot.GROWTH][-1][0] > 0
    anchor = start.min() / 1.6 if grows else start.max() * 1.4
    guides, labels = _guides(points, quantity, anchor)
    lines = list(title)
    if len(points) < len(every):
        shown = f"{len(points):,} of {len(every):,} points, {points['key'].nunique():,} of {len(lengths):,} series"
        lines.append(f"drawn: {shown}")
    return drawn(
        "growth",
        points.astype(object).where(points.notna(), None).to_dict("records"),
        title={"text": lines[0], "subtitle": lines[1:], "subtitleColor": series.GREY} if lines else None,
        guides=guides,
        labels=labels,
        lines=_lines(points, laws),
        lengths=[points["seq_len"].min() / 2**0.25, points["seq_len"].max() * 2**0.5],  # room for the guides' names
        names=[row["series"] for row in ordered],
        colors=[look.color for look in looks],
        marks=[look.mark for look in looks],
        columns=2 if max(len(row["series"]) for row in ordered) < 30 else 1,
        tooltip=_tooltip(points, quantity),
        **_value_axis(points, quantity, anchor),
    )


def drawable(rows: pd.DataFrame, quantity: Quantity) -> pd.DataFrame:
    """The rows of a quantity that log-log axes can show."""
    own = (rows["metric"] == quantity.name) & (rows["unit"] == quantity.unit)
    return rows.loc[own & (rows["seq_len"] > 0) & rows["per_sequence"].between(_LEAST, _MOST)]


def _points(rows: pd.DataFrame, quantity: Quantity) -> Frame:
    """The rows to draw, plus `y`, `low`, `high` per sequence and their series' key."""
    shown: Frame = drawable(rows, quantity)
    share = shown["per_sequence"] / shown["value"]
    low, high = (  # without an interval, the value itself
        (shown[bound] * share).where(shown[bound] > 0, shown["per_sequence"]).clip(_LEAST, _MOST)
        for bound in ("ci_low", "ci_high")
    )
    length, key = shown["seq_len"].map(length_label), [series.key(row) for row in shown.to_dict("records")]
    shown = shown.assign(y=shown["per_sequence"], low=low, high=high, length=length, key=key, opacity=1.0)
    return shown.sort_values(["key", "seq_len"], kind="stable")


def _named(points: Frame, laws: Mapping[str, Row]) -> Frame:
    """The points with the name of their series in the legend: label, dashes if its look is not its own, law. Those that
    their fit leaves out turn paler."""
    records = points.to_dict("records")
    labels = series.labels(records, Quantities())
    rows = {row["key"]: row for row in records}
    ordered = sorted(rows, key=lambda key: (str(rows[key]["origin"]), str(rows[key]["implementation"]), labels[key]))
    dashes = dict(zip(ordered, series.dashes([rows[key] for key in ordered]), strict=True))
    shared = Counter(series.look(rows[key]["implementation"]) for key in ordered)
    names = {}
    for key in ordered:
        alone = shared[series.look(rows[key]["implementation"])] == 1
        names[key] = labels[key] + ("" if alone else f"  {series.DASHES[dashes[key]]}".rstrip())
        if fit := laws.get(key):
            first, last = fit["lengths"][0], fit["lengths"][-1]
            names[key] += f"  ~ {fit['law']}, {length_label(first)}–{length_label(last)}"
            outside = (points["key"] == key) & ~points["seq_len"].between(first, last)
            points = points.assign(opacity=points["opacity"].mask(outside, _PALE))
    return points.assign(series=points["key"].map(names), dash=points["key"].map(dashes))


def _value_axis(points: Frame, quantity: Quantity, anchor: float) -> dict[str, Any]:
    """Domain, ticks, their labels and the title of the axis of values."""
    low = float(min(anchor, points[["low", "y"]].min(axis=None))) / 1.5
    high = float(max(anchor, points[["high", "y"]].max(axis=None))) * 1.5
    batched = (points["y"] != points["value"]).any()
    title = f"{quantity.title} per sequence" if batched else quantity.title
    if quantity.unit == "MiB":
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
        step = max(1, math.ceil((last - first) / 7))
        ticks = [2.0**k for k in range(first - first % step, last + 1, step) if 2.0**k >= low]
    else:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        mantissas = (1,) if last - first > 4 else (1, 3) if last - first > 2 else (1, 2, 5)
        decimals = (mantissa * 10.0**k for k in range(first, last + 1) for mantissa in mantissas)
        ticks = [float(f"{tick:.3g}") for tick in decimals if low <= tick <= high]
    units, label = _SCALES.get(quantity.unit, (quantity.unit, "format(datum.value, ',')"))
    title = f"{title} [{units}]"
    lines = title.split(" per sequence ") if len(title) > _TITLE else [title]
    title = [lines[0], f"per sequence {lines[1]}"] if len(lines) > 1 else title
    return {"domain": [low, high], "ticks": ticks, "label": label, "unit": title}


def _guides(points: Frame, quantity: Quantity, anchor: float) -> tuple[list[Row], list[Row]]:
    """Lines and labels of the quantity's guide slopes, starting beside the first point so that they cover no series."""
    first, last = points["seq_len"].min(), points["seq_len"].max()
    low, high = min(anchor, points["y"].min()) / 1.25, max(anchor, points["y"].max()) * 1.25
    ends, labels = [], []
    for slope, name in _GUIDES[quantity.plot or Plot.GROWTH] if first < last else ():
        stop = last / first  # the factor of the length up to which the line stays inside the plot
        if slope:
            stop = max(1.0, min(stop, ((high if slope > 0 else low) / anchor) ** (1 / slope)))
        ends += [{"guide": name, "seq_len": first * at, "y": anchor * at**slope} for at in (1.0, stop)]
        labels.append({"text": name, "seq_len": first * stop, "y": anchor * stop**slope})
    return ends, labels


def _lines(points: Frame, laws: Mapping[str, Row]) -> list[Row]:
    """Fitted curves, thin lines through the points of series without one, and paler ones through points left out."""
    columns = ["key", "series", "dash", "seq_len", "y"]
    first = points["key"].map({key: fit["lengths"][0] for key, fit in laws.items()})
    curves = [
        (*of_series, at, value)
        for of_series in points.drop_duplicates("key")[columns[:3]].itertuples(index=False)
        for at, value in (laws[of_series.key]["curve"] if of_series.key in laws else ())
    ]
    parts = (
        (points.loc[first.isna()], "points", 1, 1.0),
        (points.loc[points["seq_len"] <= first], "left out", 1, _PALE),
        (pd.DataFrame(curves, columns=columns), "law", 2.5, 1.0),
    )
    return [
        row
        for frame, line, width, opacity in parts
        for row in frame[columns].assign(line=line, width=width, opacity=opacity).to_dict("records")
    ]


def _tooltip(points: Frame, quantity: Quantity) -> list[dict[str, str]]:
    """Six lines at most: series, length and value, then what the points differ in, the interval if all have one."""
    texts = {"pass": "pass", "batch": "batch", "workload": "workload", "dtype": "dtype", "gpu": "GPU", "run_id": "run"}
    # Vega's tooltip draws the picture at the address in a field "image": an axis may be called so.
    texts |= {name: f"axis {name.removeprefix(MORE)}" for name in more_columns(points.columns)}
    differ = {name: title for name, title in texts.items() if points[name].nunique(dropna=False) > 1}
    numbers = {"value": f"{quantity.title.lower()} [{quantity.unit}]"}
    if points[["ci_low", "ci_high"]].notna().all(axis=None):
        numbers |= {"ci_low": "95 % from", "ci_high": "95 % to"}
    lines = [{"field": name, "title": title} for name, title in {"series": "series", "length": "S"}.items()]
    lines += [{"field": name, "title": title, "format": ",.4~g"} for name, title in numbers.items()]
    return (lines + [{"field": name, "title": title} for name, title in differ.items()])[:6]


def length_label(length: float) -> str:
    """A sequence length in short: 512, 1K, 64K, 1M; others in full."""
    length = int(length)
    for size, suffix in ((2**20, "M"), (2**10, "K")):
        if length >= size and length % (size // 2) == 0:
            return f"{length / size:g}{suffix}"
    return f"{length:,}"
