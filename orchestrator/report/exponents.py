"""Charts of how fast cost grows: fitted and local exponents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from jobs.schema.quantities import Quantities
from orchestrator.judge.analysis import Fit
from orchestrator.judge.growth import LocalSlope
from orchestrator.report import series
from orchestrator.report.charts import at, fit_rows, layered, length_axis, length_label
from orchestrator.report.series import GREY

_LONG = 40  # characters of a name that in one line would leave no room for the exponents beside it
_GUIDES = pd.DataFrame({"exponent": [1.0, 2.0], "text": ["linear", "S²"]})  # for reference, in both charts
_TWO_LINES = (
    "indexof(datum.label, ' · ') < 0 ? datum.label : [slice(datum.label, 0, indexof(datum.label, ' · ')),"
    " slice(datum.label, indexof(datum.label, ' · ') + 3)]"
)


def exponent_chart(
    fits: Sequence[Fit] | pd.DataFrame, quantities: Quantities, *, row_height: int = 30
) -> alt.LayerChart:
    """Chart of fitted exponents with 95 % intervals, beside the lines of linear (1) and quadratic (2) growth.

    Raises:
        ValueError: there is no fit.
    """
    rows = fit_rows(fits)
    if not rows:
        raise ValueError("fits: there is none to draw")
    names = series.labels(rows, quantities)
    frame = pd.DataFrame([{name: row[name] for name in ("exponent", "ci_low", "ci_high", "overhead")} for row in rows])
    frame["series"] = [names[series.key(row)] for row in rows]
    looks = [series.look(row["implementation"]) for row in rows]
    frame["color"], frame["mark"] = [look.color for look in looks], [look.mark for look in looks]
    # Intervals of few points can be very wide: the axis follows the exponents, and the intervals are clipped.
    domain = [min([0.5, *(r["exponent"] - 0.2 for r in rows)]), max([2.5, *(r["exponent"] + 0.2 for r in rows)])]
    title, axis = "growth with S: exponent and 95 % interval", alt.Axis(tickCount=6, grid=False, titleAnchor="end")
    x = alt.X("exponent:Q", title=title, scale=alt.Scale(domain=domain), axis=axis)
    two = {"labelExpr": _TWO_LINES, "labelOffset": -6} if max(map(len, names.values())) > _LONG else {}
    axis = alt.Axis(labelLimit=320, ticks=False, domain=False, labelFlush=False, **two)
    y = alt.Y("series:N", title=None, sort=list(names.values()), axis=axis)
    color, shape = alt.Color("color:N", scale=None), alt.Shape("mark:N", scale=None)
    tooltip = [alt.Tooltip(f"{name}:Q", format=".3f") for name in ("exponent", "ci_low", "ci_high", "overhead")]
    layers = [
        alt.Chart(_GUIDES).mark_rule(color=GREY, strokeDash=[4, 4]).encode(x=x),
        alt.Chart(_GUIDES).mark_text(color=GREY, dy=-8, baseline="bottom").encode(x=x, y=alt.value(0), text="text:N"),
        alt.Chart(frame)
        .mark_rule(strokeWidth=3, clip=True)
        .encode(x=at(x, "ci_low:Q"), x2="ci_high:Q", y=y, color=color),
        alt.Chart(frame)
        .mark_point(filled=True, size=90, opacity=1)
        .encode(x=x, y=y, color=color, shape=shape, tooltip=["series:N", *tooltip]),
    ]
    room = {"top": 22, "left": 5, "right": 5, "bottom": 5}
    return layered(layers).properties(height=alt.Step(row_height + 3 * len(two)), padding=room)


def local_chart(fits: pd.DataFrame, quantities: Quantities, *, height: int = 260) -> alt.LayerChart:
    """Chart of local exponents, the slopes over about an octave, against the sequence length, for one quantity.

    Args:
        fits: fits of one metric (`fits_frame`), each with its `LocalSlope`s in a column `local`.

    Raises:
        ValueError: there is no fit.
    """
    rows = fit_rows(fits)
    if not rows:
        raise ValueError("fits: there is none to draw")
    names = series.labels(rows, quantities)
    frame = pd.DataFrame([_point(slope, row, names) for row in rows for slope in row["local"]])
    title = f"local exponent of {quantities.of(rows[0]['metric']).legend}"
    shown = [min(0, *frame["exponent"]) - 0.2, max(2.1, *frame["exponent"]) + 0.2]  # no mark is cut
    y = alt.Y("exponent:Q", title=title, scale=alt.Scale(domain=shown, nice=False), axis=alt.Axis(grid=False))
    lengths = [length for row in rows for slope in row["local"] for length in (slope.low, slope.high)]
    x = length_axis(lengths)
    color, shape = alt.Color("color:N", scale=None), alt.Shape("mark:N", scale=None)
    dashes = dict(zip(names, map(list, series.dashes(rows)), strict=True))
    lines = [
        alt.Chart(frame.loc[frame["series"] == names[key]])
        .mark_line(strokeWidth=2, strokeDash=dash, clip=True)
        .encode(x=x, y=y, color=color)
        for key, dash in dashes.items()
    ]
    tooltip = ["series:N", "range:N", *(alt.Tooltip(f"{name}:Q", format=".2f") for name in ("exponent", "low", "high"))]
    marks = alt.Chart(frame).mark_point(filled=True, size=60, opacity=1, clip=True)
    layers = [
        alt.Chart(_GUIDES).mark_rule(color=GREY, strokeDash=[4, 4]).encode(y=y),
        alt.Chart(_GUIDES).mark_text(color=GREY, align="left", dx=4, dy=-7).encode(x=alt.value(0), y=y, text="text:N"),
        alt.Chart(frame).mark_rule(clip=True).encode(x=x, y=at(y, "low:Q"), y2="high:Q", color=color),
        *lines,
        marks.encode(x=x, y=y, color=color, shape=shape, tooltip=tooltip),
    ]
    return layered(layers).properties(height=height)


def _point(slope: LocalSlope, row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A mark of the chart: one slope of a series, in the middle of its lengths."""
    look = series.look(row["implementation"])
    return {
        "series": names[series.key(row)],
        "color": look.color,
        "mark": look.mark,
        "seq_len": math.sqrt(slope.low * slope.high),
        "range": f"{length_label(slope.low)} to {length_label(slope.high)}",
        "exponent": slope.exponent,
        "low": slope.exponent - slope.error,
        "high": slope.exponent + slope.error,
    }


def local_legend(fits: pd.DataFrame, quantities: Quantities) -> list[tuple[str, series.Look]]:
    """Name and look of each series of the chart of local exponents; those that share a look have their dashes."""
    rows = fit_rows(fits)
    names = series.labels(rows, quantities)
    looks = [series.look(row["implementation"]) for row in rows]
    signs = [
        series.DASHES[dash] if looks.count(look) > 1 else ""
        for dash, look in zip(series.dashes(rows), looks, strict=True)
    ]
    return [
        (f"{names[series.key(row)]}  {sign}".rstrip(), look) for row, sign, look in zip(rows, signs, looks, strict=True)
    ]
