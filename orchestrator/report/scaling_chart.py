"""The chart of a quantity against the sequence length, on log-log axes.

Reported results are hollow and dashed, measured ones filled. A fitted curve is drawn over the lengths on which it
rests; points at other lengths are paler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from jobs.schema.axes import MORE, more_columns
from jobs.schema.quantities import Plot, Quantities, Quantity
from orchestrator.report import series
from orchestrator.report.charts import length_label
from orchestrator.report.series import GREY, Row

Frame = Any  # a DataFrame: pandas' stubs refuse much of what it takes

_TITLE = 40  # characters of an axis title that fit in one line
_PALE = 0.35  # opacity of points that a fit leaves out
_MOST_SERIES, _MOST_POINTS = 60, 4000  # of a chart: more cannot be told apart, and Altair refuses 5,000 rows
_LEAST, _MOST = 1e-300, 1e300  # values that axes and guides around them can be computed for

_LINES = "split(replace(datum.label, '; ', '  ~ '), length(datum.label) > 60 ? '  ~ ' : '\\n')"  # of a legend's entry

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


def scaling_chart(
    rows: pd.DataFrame, fits: pd.DataFrame, quantity: Quantity, title: Sequence[str] = ()
) -> alt.LayerChart:
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
    order = ["origin", "implementation", "series"]
    entries = {
        row["series"]: series.look(row["implementation"]) for row in points.sort_values(order).to_dict("records")
    }
    # The guides begin at the shortest length, below the points if they grow, above if they fall.
    start = points.loc[points["seq_len"] == points["seq_len"].min(), "y"]
    grows = _GUIDES[quantity.plot or Plot.GROWTH][-1][0] > 0
    anchor = start.min() / 1.6 if grows else start.max() * 1.4
    x, y = _length_axis(points["seq_len"].tolist()), _value_axis(points, quantity, anchor)
    color, shape = _looks(entries)
    pale = alt.Opacity("opacity:Q", scale=None, legend=None)
    interval = alt.Chart(points).mark_rule(strokeWidth=2)
    marks = [  # filled for measured points, hollow for reported ones
        alt.Chart(own)
        .mark_point(size=70, strokeWidth=2, filled=origin != "reported")
        .encode(x=x, y=y, color=color, shape=shape, opacity=pale, tooltip=_tooltip(points, quantity))
        for origin, own in points.groupby("origin")
    ]
    layers = [
        *_guides(points, quantity, anchor, x, y),
        *_fit_lines(points, laws, x, y, color),
        interval.encode(x=x, y=_at(y, "low:Q"), y2="high:Q", color=color, opacity=pale),
        *marks,
    ]
    lines = list(title)
    if len(points) < len(every):
        drawn = f"{len(points):,} of {len(every):,} points, {points['key'].nunique():,} of {len(lengths):,} series"
        lines.append(f"drawn: {drawn}")
    chart = alt.LayerChart(layer=layers).properties(height=340)
    return (
        chart.properties(title=alt.Title(lines[0], subtitle=lines[1:], subtitleColor=GREY, anchor="start"))
        if lines
        else chart
    )


def _looks(entries: dict[str, series.Look]) -> tuple[alt.Color, alt.Shape]:
    """Colour and mark of each series, in one legend, where every name has the room that it needs."""
    columns = 2 if max(map(len, entries)) < 30 else 1
    legend = alt.Legend(
        title=None, orient="bottom", columns=columns, labelLimit=0, symbolSize=90, symbolOpacity=1, labelExpr=_LINES
    )
    colors = alt.Scale(domain=list(entries), range=[look.color for look in entries.values()])
    marks = alt.Scale(domain=list(entries), range=[look.mark for look in entries.values()])
    return alt.Color("series:N", scale=colors, legend=legend), alt.Shape("series:N", scale=marks, legend=legend)


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


def _value_axis(points: Frame, quantity: Quantity, anchor: float) -> alt.Y:
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
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    lines = title.split(" per sequence ") if len(title) > _TITLE else [title]
    title = [lines[0], f"per sequence {lines[1]}"] if len(lines) > 1 else title
    return alt.Y("y:Q", title=title, scale=scale, axis=alt.Axis(values=ticks, labelExpr=label, gridOpacity=0.35))


def _guides(points: Frame, quantity: Quantity, anchor: float, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Lines and labels of the quantity's guide slopes, starting beside the first point so that they cover no series."""
    first, last = points["seq_len"].min(), points["seq_len"].max()
    if first == last:
        return []
    low, high = min(anchor, points["y"].min()) / 1.25, max(anchor, points["y"].max()) * 1.25
    ends, labels = [], []
    for slope, text in _GUIDES[quantity.plot or Plot.GROWTH]:
        stop = last / first  # the factor of the length up to which the line stays inside the plot
        if slope:
            stop = max(1.0, min(stop, ((high if slope > 0 else low) / anchor) ** (1 / slope)))
        ends += [{"guide": text, "seq_len": first * at, "y": anchor * at**slope} for at in (1.0, stop)]
        labels.append({"text": text, "seq_len": first * stop, "y": anchor * stop**slope})
    line = alt.Chart(pd.DataFrame(ends)).mark_line(color=GREY, strokeDash=[2, 4], strokeWidth=1.5)
    text = alt.Chart(pd.DataFrame(labels)).mark_text(color=GREY, fontSize=12, fontWeight="bold", align="left", dx=5)
    return [line.encode(x=x, y=y, detail="guide:N"), text.encode(x=x, y=y, text="text:N")]


def _fit_lines(points: Frame, laws: Mapping[str, Row], x: alt.X, y: alt.Y, color: alt.Color) -> list[alt.Chart]:
    """Fitted curves, thin lines through the points of series without one, and paler ones through points left out."""
    first = points["key"].map({key: fit["lengths"][0] for key, fit in laws.items()})
    identity = points.drop_duplicates("key").set_index("key")[["series", "dash"]]
    curves = [{"key": key, "seq_len": at, "y": value} for key, fit in laws.items() for at, value in fit["curve"]]
    curve: Frame = pd.DataFrame(curves, columns=["key", "seq_len", "y"]).join(identity, on="key")
    drawn = [
        (points.loc[first.isna()], {"strokeWidth": 1}),
        (points.loc[points["seq_len"] <= first], {"strokeWidth": 1, "opacity": _PALE}),
        (curve.assign(law=curve["series"]), {"strokeWidth": 2.5}),
    ]
    columns = ["key", "seq_len", "y", "series"]
    return [
        alt.Chart(own[[*columns, *(["law"] if "law" in own else [])]])
        .mark_line(**style, strokeDash=list(dash) if dash[1] else alt.Undefined)
        .encode(x=x, y=y, color=color, detail="key:N")
        for rows, style in drawn
        for dash, own in rows.groupby("dash")
    ]


def _tooltip(points: Frame, quantity: Quantity) -> list[alt.Tooltip]:
    """Six lines at most: series, length and value, then what the points differ in, the interval if all have one."""
    texts = {"pass": "pass", "batch": "batch", "workload": "workload", "dtype": "dtype", "gpu": "GPU", "run_id": "run"}
    # Vega's tooltip draws the picture at the address in a field "image": an axis may be called so.
    texts |= {name: f"axis {name.removeprefix(MORE)}" for name in more_columns(points.columns)}
    differ = {name: title for name, title in texts.items() if points[name].nunique(dropna=False) > 1}
    lines = [alt.Tooltip(f"{name}:N", title=title) for name, title in ({"series": "series", "length": "S"}).items()]
    numbers = {"value": f"{quantity.title.lower()} [{quantity.unit}]"}
    if points[["ci_low", "ci_high"]].notna().all(axis=None):
        numbers |= {"ci_low": "95 % from", "ci_high": "95 % to"}
    lines += [alt.Tooltip(f"{name}:Q", title=title, format=",.4~g") for name, title in numbers.items()]
    return (lines + [alt.Tooltip(f"{name}:N", title=title) for name, title in differ.items()])[:6]


def _length_axis(lengths: Sequence[float]) -> alt.X:
    """The axis of the sequence length, wide enough for the lengths."""
    first, last = math.floor(math.log2(min(lengths))), math.ceil(math.log2(max(lengths)))
    label = (
        "datum.value >= 1048576 ? datum.value / 1048576 + 'M' :"
        " datum.value >= 1024 ? datum.value / 1024 + 'K' : datum.value"
    )
    left, right = 2**0.25, 2**0.5  # room for the points, and for the names of the guides
    values = [2**k for k in range(first, last + 1, 1 if last - first <= 9 else 2)]
    return alt.X(
        "seq_len:Q",
        title="sequence length S [tokens]",
        scale=alt.Scale(type="log", base=2, domain=[min(lengths) / left, max(lengths) * right], nice=False),
        axis=alt.Axis(values=values, labelExpr=label, gridOpacity=0.35),
    )


def _at(axis: Any, field: str) -> Any:
    """A copy of the axis for another field."""
    other = axis.copy()
    other.shorthand = field
    return other
