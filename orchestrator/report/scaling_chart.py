"""The chart of a quantity against the sequence length, on log-log axes.

Reported results are hollow and dashed, measured ones filled. A fitted curve is drawn over the lengths on which it
rests; points at other lengths are paler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from jobs.schema.axes import MORE, more_columns
from jobs.schema.quantities import Plot, Quantities, Quantity
from orchestrator.report import series
from orchestrator.report.charts import Chart, drawn, length_label
from orchestrator.report.series import GREY, Row

Frame = Any  # a DataFrame: pandas' stubs refuse much of what it takes

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
        title={"text": lines[0], "subtitle": lines[1:], "subtitleColor": GREY} if lines else None,
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
    for slope, text in _GUIDES[quantity.plot or Plot.GROWTH] if first < last else ():
        stop = last / first  # the factor of the length up to which the line stays inside the plot
        if slope:
            stop = max(1.0, min(stop, ((high if slope > 0 else low) / anchor) ** (1 / slope)))
        ends += [{"guide": text, "seq_len": first * at, "y": anchor * at**slope} for at in (1.0, stop)]
        labels.append({"text": text, "seq_len": first * stop, "y": anchor * stop**slope})
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
