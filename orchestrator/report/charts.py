"""Charts from data frames, shared by the dashboard and the reports; the largest one is in `scaling_chart.py`.

Text and grid take the colours of the theme that shows the chart (Streamlit's or a report's); only series and guides
are coloured here. A chart with series comes with its legend, which a page draws below it, where long names can break.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from jobs.schema.quantities import Quantities, written_unit
from orchestrator.judge.branches import Branch, BranchShares
from orchestrator.report import series
from orchestrator.report.series import AMBER, BLUE, BROWN, GREY, PERIWINKLE, PINK, TEAL, Look

Legend = list[tuple[str, Look]]
"""Name and look of each series of a chart."""

_LONG = 40  # characters of a name that in one line would leave no room for the exponents beside it
_GUIDES = pd.DataFrame({"exponent": [1.0, 2.0], "text": ["linear", "S²"]})  # for reference, in both charts
_MARK: Any = {"filled": True, "opacity": 1}
_TWO_LINES = (
    "indexof(datum.label, ' · ') < 0 ? datum.label : [slice(datum.label, 0, indexof(datum.label, ' · ')),"
    " slice(datum.label, indexof(datum.label, ' · ') + 3)]"
)
_BRANCHES = {
    Branch.COMPRESSED: AMBER,
    Branch.SELECTED: PERIWINKLE,
    Branch.WINDOW: TEAL,
    Branch.REST: GREY,
    Branch.OTHER: BROWN,
    Branch.SHARED: PINK,
}


def exponent_chart(fits: pd.DataFrame, quantities: Quantities) -> alt.LayerChart:
    """Fitted exponents (`fits_frame`) with 95 % intervals, beside the lines of linear (1) and quadratic (2) growth."""
    fits = fits.loc[fits["exponent"].notna()]  # the others have none: no power law describes them
    rows = fits.to_dict("records")
    names = series.labels(rows, quantities)
    marks = [_mark(row, names) for row in rows]
    frame = fits[["exponent", "ci_low", "ci_high", "overhead"]].reset_index(drop=True).join(pd.DataFrame(marks))
    # Intervals of few points can be very wide: the axis follows the exponents, and the intervals are clipped.
    domain = [min([0.5, *(r["exponent"] - 0.2 for r in rows)]), max([2.5, *(r["exponent"] + 0.2 for r in rows)])]
    title, axis = "growth with S: exponent and 95 % interval", alt.Axis(tickCount=6, grid=False, titleAnchor="end")
    x = alt.X("exponent:Q", title=title, scale=alt.Scale(domain=domain), axis=axis)
    two = {"labelExpr": _TWO_LINES, "labelOffset": -6} if max(map(len, names.values())) > _LONG else {}
    axis = alt.Axis(labelLimit=320, ticks=False, domain=False, labelFlush=False, **two)
    y = alt.Y("series:N", title=None, sort=list(names.values()), axis=axis)
    color, shape = alt.Color("color:N", scale=None), alt.Shape("mark:N", scale=None)
    tooltip = [alt.Tooltip(f"{name}:Q", format=".3f") for name in ("exponent", "ci_low", "ci_high", "overhead")]
    interval = alt.Chart(frame).mark_rule(strokeWidth=3, clip=True)
    point = alt.Chart(frame).mark_point(size=90, **_MARK)
    layers = [
        alt.Chart(_GUIDES).mark_rule(color=GREY, strokeDash=[4, 4]).encode(x=x),
        alt.Chart(_GUIDES).mark_text(color=GREY, dy=-8, baseline="bottom").encode(x=x, y=alt.value(0), text="text:N"),
        interval.encode(x=at(x, "ci_low:Q"), x2="ci_high:Q", y=y, color=color),
        point.encode(x=x, y=y, color=color, shape=shape, tooltip=["series:N", *tooltip]),
    ]
    room = {"top": 22, "left": 5, "right": 5, "bottom": 5}
    return alt.LayerChart(layer=layers).properties(height=alt.Step(30 + 3 * len(two)), padding=room)


def local_chart(fits: pd.DataFrame, quantities: Quantities) -> tuple[alt.LayerChart, Legend]:
    """Local exponents, the slopes over about an octave, against S: of fits of one metric (`fits_frame`)."""
    rows = fits.to_dict("records")
    names = series.labels(rows, quantities)
    slopes = [(row, slope) for row in rows for slope in row["local"]]
    drawn = []
    for row, slope in slopes:
        exponent, length = slope.exponent, math.sqrt(slope.low * slope.high)
        where = {"seq_len": length, "range": f"{length_label(slope.low)} to {length_label(slope.high)}"}
        interval = {"exponent": exponent, "low": exponent - slope.error, "high": exponent + slope.error}
        drawn.append(_mark(row, names) | where | interval)
    frame = pd.DataFrame(drawn)
    title = f"local exponent of {quantities.of(rows[0]['metric']).legend}"
    shown = [min(0, *frame["exponent"]) - 0.2, max(2.1, *frame["exponent"]) + 0.2]  # no mark is cut
    y = alt.Y("exponent:Q", title=title, scale=alt.Scale(domain=shown, nice=False), axis=alt.Axis(grid=False))
    x = length_axis([length for _, slope in slopes for length in (slope.low, slope.high)])
    color, shape = alt.Color("color:N", scale=None), alt.Shape("mark:N", scale=None)
    dashes = series.dashes(rows)
    lines = [
        alt.Chart(frame.loc[frame["series"] == name])
        .mark_line(strokeWidth=2, strokeDash=list(dash), clip=True)
        .encode(x=x, y=y, color=color)
        for name, dash in zip(names.values(), dashes, strict=True)
    ]
    tooltip = ["series:N", "range:N", *(alt.Tooltip(f"{name}:Q", format=".2f") for name in ("exponent", "low", "high"))]
    marks = alt.Chart(frame).mark_point(**_MARK, size=60, clip=True)
    layers = [
        alt.Chart(_GUIDES).mark_rule(color=GREY, strokeDash=[4, 4]).encode(y=y),
        alt.Chart(_GUIDES).mark_text(color=GREY, align="left", dx=4, dy=-7).encode(x=alt.value(0), y=y, text="text:N"),
        alt.Chart(frame).mark_rule(clip=True).encode(x=x, y=at(y, "low:Q"), y2="high:Q", color=color),
        *lines,
        marks.encode(x=x, y=y, color=color, shape=shape, tooltip=tooltip),
    ]
    looks = [series.look(row["implementation"]) for row in rows]
    legend = [
        (f"{name}  {series.DASHES[dash]}".rstrip() if looks.count(look) > 1 else name, look)
        for name, look, dash in zip(names.values(), looks, dashes, strict=True)
    ]
    return alt.LayerChart(layer=layers).properties(height=260), legend


def _mark(row: Mapping[Any, Any], names: Mapping[str, str]) -> dict[str, Any]:
    look = series.look(row["implementation"])
    return {"series": names[series.key(row)], "color": look.color, "mark": look.mark}


def branch_chart(shares: Sequence[BranchShares]) -> tuple[alt.Chart, Legend]:
    """Each branch's share of one series' time, a bar per length, the compressed branch at the foot."""
    order = [branch for branch in Branch if any(branch in one.milliseconds for one in shares)]
    legend = [(branch.value, Look(_BRANCHES[branch], "square")) for branch in order]
    shown = pd.DataFrame(
        {"branch": branch.value, "milliseconds": time, "share": one.share(branch)}
        | {"length": length_label(one.seq_len), "place": order.index(branch)}
        for one in shares
        for branch, time in one.milliseconds.items()
    )
    lengths = [length_label(length) for length in sorted({one.seq_len for one in shares})]
    x = alt.X("length:N", title="sequence length S [tokens]", sort=lengths, axis=alt.Axis(labelAngle=0))
    axis = alt.Axis(format="%", tickCount=5, gridOpacity=0.35)
    y = alt.Y("share:Q", title="share of the time", axis=axis, scale=alt.Scale(domain=[0, 1]))
    colors = alt.Scale(domain=[name for name, _ in legend], range=[look.color for _, look in legend])
    color = alt.Color("branch:N", scale=colors, legend=None)
    share, time = alt.Tooltip("share:Q", format=".1%"), alt.Tooltip("milliseconds:Q", title="ms", format=",.4~g")
    tooltip = ["branch:N", alt.Tooltip("length:N", title="S"), share, time]
    bars = alt.Chart(shown).mark_bar(stroke="transparent", strokeWidth=1)
    return bars.encode(x=x, y=y, color=color, order="place:Q", tooltip=tooltip).properties(height=320), legend


def samples_chart(samples: Sequence[float], unit: str) -> alt.Chart:
    """All samples in order, to show drift, outliers and warm-up."""
    title = written_unit(unit)
    frame = pd.DataFrame({"sample": range(1, len(samples) + 1), "value": list(samples)})
    axis = alt.Axis(tickMinStep=1, format="d", grid=False)
    x = alt.X("sample:Q", title="sample", scale=alt.Scale(zero=False, nice=False), axis=axis)
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(tickCount=4))
    tooltip = ["sample:Q", alt.Tooltip("value:Q", format=",.4~g", title=title)]
    line = alt.Chart(frame).mark_line(point=alt.OverlayMarkDef(size=28, filled=True), color=BLUE, strokeWidth=1)
    return line.encode(x=x, y=y, tooltip=tooltip).properties(height=170)


def length_label(length: float) -> str:
    """A sequence length in short: 512, 1K, 64K, 1M; others in full."""
    length = int(length)
    for size, suffix in ((2**20, "M"), (2**10, "K")):
        if length >= size and length % (size // 2) == 0:
            return f"{length / size:g}{suffix}"
    return f"{length:,}"


def length_axis(lengths: Sequence[float]) -> alt.X:
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


def at(axis: Any, field: str) -> Any:
    """A copy of the axis for another field."""
    other = axis.copy()
    other.shorthand = field
    return other
