"""The chart of a quantity against the sequence length, on log-log axes.

Reported results are hollow and dashed, measured ones filled. A fitted curve is drawn over the lengths on which it
rests; points at other lengths are paler.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import altair as alt
import pandas as pd

from jobs.schema.axes import MORE, more_columns
from jobs.schema.quantities import Plot, Quantities, Quantity
from orchestrator.report import series
from orchestrator.report.charts import Legend, at, layered, length_axis, length_label
from orchestrator.report.series import GREY

Row = dict[Any, Any]

_TITLE = 40  # characters of an axis title that fit in one line
_PALE = 0.35  # opacity of points that a fit leaves out
_MOST_SERIES, _MOST_POINTS = 60, 4000  # of a chart: more cannot be told apart, and Altair refuses 5,000 rows
_LEAST, _MOST = 1e-300, 1e300  # values that axes and guides around them can be computed for

# Guide slopes on log-log axes and their labels, by kind of plot.
_GUIDES = {
    Plot.GROWTH: ((1.0, "~ S"), (2.0, "~ S²")),
    Plot.RATE: ((0.0, "linear"), (-1.0, "S²")),
    Plot.STEP_RATE: ((0.0, "constant"), (-1.0, "~ 1/S")),  # decoding: a step makes the same number of tokens at every S
}


def scaling_chart(
    rows: pd.DataFrame, fits: pd.DataFrame, quantity: Quantity, *, height: int = 340, legend: bool = True
) -> tuple[alt.LayerChart, Legend]:
    """A quantity per sequence against the sequence length: points, intervals, fitted lines, guide slopes.

    Of many series, those with the most lengths are drawn, and a line above the chart says how many are not.

    Args:
        rows: rows of `v_scaling`, some of them `drawable`; other metrics are left out.
        fits: `orchestrator.judge.analysis.fits_frame`; those of other metrics and series are left out.
        quantity: the quantity to draw against S.
        height: height of the plot, in pixels.
        legend: whether the legend is in the chart itself, too.
    """
    points, omitted = _most_complete(_points(rows, quantity))
    lines = _lines(points, fits.to_dict("records"))
    dashes = _name(points, lines)
    ordered = sorted(points, key=_order)
    entries = {point["series"]: series.look(point["implementation"]) for point in ordered}
    x, y = length_axis([point["seq_len"] for point in points]), _value_axis(points, quantity)
    color, shape = _looks(entries, shown=legend)
    interval = alt.Chart(pd.DataFrame(points)).mark_rule(strokeWidth=2)
    pale = alt.Opacity("opacity:Q", scale=None, legend=None)
    layers = [
        *_guides(points, quantity, x, y),
        *_fit_lines(points, lines, dashes, x, y, color),
        interval.encode(x=x, y=at(y, "low:Q"), y2="high:Q", color=color, opacity=pale),
        *_marks(points, quantity, x=x, y=y, color=color, shape=shape, opacity=pale),
    ]
    chart = layered(layers).properties(height=height)
    if omitted:
        chart = chart.properties(title=alt.Title(omitted, fontSize=12, fontWeight="normal"))
    return chart, list(entries.items())


def _most_complete(points: list[Row]) -> tuple[list[Row], str]:
    """The points of the series with the most lengths, as many as a chart holds, and a line about the others, or ""."""
    lengths: dict[str, set[float]] = {}
    for point in points:
        lengths.setdefault(point["key"], set()).add(point["seq_len"])
    shown = set(sorted(lengths, key=lambda key: -len(lengths[key]))[:_MOST_SERIES])
    chosen = [point for point in points if point["key"] in shown][:_MOST_POINTS]
    if len(chosen) == len(points):
        return points, ""
    drawn = len({point["key"] for point in chosen})
    return chosen, f"drawn: {len(chosen):,} of {len(points):,} points, {drawn:,} of {len(lengths):,} series"


def _looks(entries: dict[str, series.Look], *, shown: bool) -> tuple[alt.Color, alt.Shape]:
    """Colour and mark of each series, in one legend, where every name has the room that it needs."""
    columns = 2 if max(map(len, entries)) < 30 else 1
    style = alt.Legend(title=None, orient="bottom", columns=columns, labelLimit=0, symbolSize=90, symbolOpacity=1)
    legend = style if shown else None
    colors = alt.Scale(domain=list(entries), range=[look.color for look in entries.values()])
    marks = alt.Scale(domain=list(entries), range=[look.mark for look in entries.values()])
    return alt.Color("series:N", scale=colors, legend=legend), alt.Shape("series:N", scale=marks, legend=legend)


def drawable(rows: pd.DataFrame, quantity: Quantity) -> pd.DataFrame:
    """The rows of a quantity that log-log axes can show."""
    own = (rows["metric"] == quantity.name) & (rows["unit"] == quantity.unit)
    return rows.loc[own & (rows["seq_len"] > 0) & rows["per_sequence"].between(_LEAST, _MOST)]


def _points(rows: pd.DataFrame, quantity: Quantity) -> list[Row]:
    """The rows to draw, plus `y`, `low`, `high` per sequence and their series' key."""
    points = []
    for row in drawable(rows, quantity).to_dict("records"):
        share = row["per_sequence"] / row["value"]
        bounds = (row["ci_low"], row["ci_high"])
        ends = (bound * share if bound > 0 else row["per_sequence"] for bound in bounds)  # NaN: no interval
        low, high = (min(max(end, _LEAST), _MOST) for end in ends)
        shown = {"y": row["per_sequence"], "low": low, "high": high, "opacity": 1.0}
        shown["length"] = length_label(row["seq_len"])
        points.append(row | shown | {"key": series.key(row)})
    return sorted(points, key=lambda point: (point["key"], point["seq_len"]))


def _lines(points: list[Row], fits: list[Row]) -> list[Row]:
    """Points of each fitted curve of the points' series, over the lengths that it rests on; the others turn paler."""
    by_key = {series.key(fit): fit for fit in fits}
    lines = []
    for key in dict.fromkeys(point["key"] for point in points):
        if key not in by_key:
            continue
        fit = by_key[key]
        first, last = fit["lengths"][0], fit["lengths"][-1]
        law = f"{fit['law']}, {length_label(first)}–{length_label(last)}"
        lines += [{"key": key, "law": law, "seq_len": length, "y": value} for length, value in fit["curve"]]
        for point in points:
            if point["key"] == key:
                point["opacity"] = 1.0 if first <= point["seq_len"] <= last else _PALE
    return lines


def _name(points: list[Row], lines: list[Row]) -> dict[str, tuple[int, ...]]:
    """Set the legend name of points and lines: label, dashes if its look is not its own, law. Returns the dashes."""
    names = series.labels(points, Quantities())
    laws = {line["key"]: f"  ~ {line['law']}" for line in lines}
    for point in points:
        point["series"] = names[point["key"]]
    ordered = {point["key"]: point for point in sorted(points, key=_order)}
    dashes = dict(zip(ordered, series.dashes(list(ordered.values())), strict=True))
    looks = {key: series.look(point["implementation"]) for key, point in ordered.items()}
    shared = Counter(looks.values())
    for row in (*points, *lines):
        key = row["key"]
        sign = f"  {series.DASHES[dashes[key]]}".rstrip() if shared[looks[key]] > 1 else ""
        row["series"] = names[key] + sign + laws.get(key, "")
    return dashes


def _order(point: Row) -> tuple[str, str, str]:
    return str(point["origin"]), str(point["implementation"]), point["series"]


def _value_axis(points: list[Row], quantity: Quantity) -> alt.Y:
    anchor = _anchor(points, quantity)
    low = min([anchor, *(min(point["low"], point["y"]) for point in points)]) / 1.5
    high = max([anchor, *(max(point["high"], point["y"]) for point in points)]) * 1.5
    batched = any(point["y"] != point["value"] for point in points)
    title = f"{quantity.title} per sequence" if batched else quantity.title
    if quantity.unit == "MiB":
        title, ticks = f"{title} [MiB, GiB]", _binary_ticks(low, high)
        label = (
            "datum.value >= 1024 ? format(datum.value / 1024, ',') + ' GiB' : "
            "datum.value >= 1 ? datum.value + ' MiB' : datum.value * 1024 + ' KiB'"
        )
    elif quantity.unit == "ms":
        title, ticks = f"{title} [s, ms, µs]", _decimal_ticks(low, high)
        label = (
            "datum.value >= 1000 ? format(datum.value / 1000, ',') + ' s' : "
            "datum.value >= 1 ? datum.value + ' ms' : round(datum.value * 1000) + ' µs'"
        )
    else:
        title, ticks, label = f"{title} [{quantity.unit}]", _decimal_ticks(low, high), "format(datum.value, ',')"
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    lines = title.split(" per sequence ") if len(title) > _TITLE else [title]
    title = [lines[0], f"per sequence {lines[1]}"] if len(lines) > 1 else title
    return alt.Y("y:Q", title=title, scale=scale, axis=alt.Axis(values=ticks, labelExpr=label, gridOpacity=0.35))


def _binary_ticks(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / 7))
    return [2.0**k for k in range(first - first % step, last + 1, step) if 2.0**k >= low]


def _decimal_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    mantissas = (1,) if last - first > 4 else (1, 3) if last - first > 2 else (1, 2, 5)
    ticks = (m * 10.0**k for k in range(first, last + 1) for m in mantissas)
    return [float(f"{tick:.3g}") for tick in ticks if low <= tick <= high]


def _guides(points: list[Row], quantity: Quantity, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Lines and labels of the quantity's guide slopes, starting beside the first point so that they cover no series."""
    lengths, values = [point["seq_len"] for point in points], [point["y"] for point in points]
    first, last = min(lengths), max(lengths)
    if first == last:
        return []
    anchor = _anchor(points, quantity)
    low, high = min(anchor, *values) / 1.25, max(anchor, *values) * 1.25
    ends, labels = [], []
    for slope, text in _GUIDES[quantity.plot or Plot.GROWTH]:
        stop = _within(anchor, slope, last / first, low, high)
        ends += [{"guide": text, "seq_len": first * at, "y": anchor * at**slope} for at in (1.0, stop)]
        labels.append({"text": text, "seq_len": first * stop, "y": anchor * stop**slope})
    line = alt.Chart(pd.DataFrame(ends)).mark_line(color=GREY, strokeDash=[2, 4], strokeWidth=1.5)
    text = alt.Chart(pd.DataFrame(labels)).mark_text(color=GREY, fontSize=12, fontWeight="bold", align="left", dx=5)
    return [line.encode(x=x, y=y, detail="guide:N"), text.encode(x=x, y=y, text="text:N")]


def _anchor(points: list[Row], quantity: Quantity) -> float:
    """Start value of the guides at the shortest length: below the points if they grow, above if they fall."""
    first = min(point["seq_len"] for point in points)
    start = [point["y"] for point in points if point["seq_len"] == first]
    grows = _GUIDES[quantity.plot or Plot.GROWTH][-1][0] > 0
    return min(start) / 1.6 if grows else max(start) * 1.4


def _within(anchor: float, slope: float, ratio: float, low: float, high: float) -> float:
    """Factor of the length up to which a line of `slope` from `anchor` stays inside the plot."""
    if slope == 0:
        return ratio
    edge = high if slope > 0 else low
    return max(1.0, min(ratio, (edge / anchor) ** (1 / slope)))


def _fit_lines(
    points: list[Row], lines: list[Row], dashes: dict[str, tuple[int, ...]], x: alt.X, y: alt.Y, color: alt.Color
) -> list[alt.Chart]:
    """Fitted curves, thin lines through the points of series without one, and paler ones through points left out."""
    fitted = {line["key"]: line["seq_len"] for line in reversed(lines)}  # their first lengths
    drawn: list[tuple[list[Row], dict[str, Any]]] = [
        ([point for point in points if point["key"] not in fitted], {"strokeWidth": 1}),
        (
            [point for point in points if point["seq_len"] <= fitted.get(point["key"], 0)],
            {"strokeWidth": 1, "opacity": _PALE},
        ),
        (lines, {"strokeWidth": 2.5}),
    ]
    return [
        alt.Chart(pd.DataFrame(own))
        .mark_line(**style, strokeDash=list(dash) if dash[1] else alt.Undefined)
        .encode(x=x, y=y, color=color, detail="key:N")
        for rows, style in drawn
        for dash in sorted(set(dashes.values()))
        if (own := [row for row in rows if dashes[row["key"]] == dash])
    ]


def _marks(points: list[Row], quantity: Quantity, **channels: Any) -> list[alt.Chart]:
    """Point marks: filled for measured points, hollow for reported ones."""
    numbers = {"value": f"{quantity.title.lower()} [{quantity.unit}]", "ci_low": "95 % from", "ci_high": "95 % to"}
    texts = {"series": "series", "length": "S", "batch": "batch", "workload": "workload", "pass": "pass"}
    texts |= {name: name for name in ("dtype", "device", "gpu", "origin", "source")} | {"gpu": "GPU", "run_id": "run"}
    # Vega's tooltip draws the picture at the address in a field "image": an axis may be called so.
    texts |= {name: f"axis {name.removeprefix(MORE)}" for point in points for name in more_columns(point)}
    tooltip = [alt.Tooltip(f"{name}:N", title=title) for name, title in texts.items()]
    tooltip += [alt.Tooltip(f"{name}:Q", title=title, format=",.4~g") for name, title in numbers.items()]
    by_fill = {
        filled: [point for point in points if (point["origin"] != "reported") is filled] for filled in (True, False)
    }
    return [
        alt.Chart(pd.DataFrame(rows))
        .mark_point(size=70, strokeWidth=2, filled=filled)
        .encode(**channels, tooltip=tooltip)
        for filled, rows in by_fill.items()
        if rows
    ]
