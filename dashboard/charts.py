"""Charts from data frames, shared by the dashboard and the reports. Imports altair and pandas only.

Text and grid take their colour from whoever shows the chart (Streamlit's theme, or a report's); only series and guides
are coloured here. Series use the Okabe-Ito palette, which colour-blind readers can tell apart; reported results are
hollow and dashed as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import altair as alt
import pandas as pd

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a8f98",
)  # fmt: skip
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
IMPLEMENTATION_COLORS = {"chunked": BLUE, "naive": VERMILLION, "dense": GREEN, "reference": PURPLE, "nsa-vibe": ORANGE}

# Where a fit or a row names its series: rows that agree in all of these are one line of the chart.
SERIES = (
    *("run_id", "origin", "implementation", "workload", "pass", "query_heads", "kv_heads", "head_dim", "layers"),
    *("dtype", "device", "gpu", "metric"),
)


@dataclass(frozen=True)
class Quantity:
    """How a metric is shown. `guides`: slopes on log-log axes, and what each means."""

    title: str
    short: str
    unit: str
    guides: tuple[tuple[float, str], ...] = ((1.0, "~ S"), (2.0, "~ S²"))

    @property
    def grows(self) -> bool:
        return self.guides[-1][0] > 0


_RATE = ((0.0, "linear cost"), (-1.0, "S² cost"))
QUANTITIES = {
    "time": Quantity("Time", "time", "ms"),
    "throughput": Quantity("Throughput", "throughput", "tok/s", _RATE),
    "peak_extra_memory": Quantity("Peak memory beyond inputs", "extra memory", "MiB"),
    "peak_memory": Quantity("Peak memory allocated", "allocated memory", "MiB"),
    "peak_reserved": Quantity("Peak memory reserved", "reserved memory", "MiB"),
}


def scaling_chart(
    rows: pd.DataFrame, fits: Sequence[Any] | pd.DataFrame, metric: str, *, height: int = 340
) -> alt.LayerChart:
    """`metric` per sequence against sequence length, log-log: points with intervals, fitted lines, guide slopes.

    Args:
        rows: rows of `v_scaling`; other metrics are left out.
        fits: `orchestrator.analysis.Fit`s or a frame of their fields; those of other metrics and series are left out.
        metric: one of QUANTITIES.
        height: of the plot, in pixels.

    Raises:
        ValueError: no row has this metric (and a positive length and value).
    """
    points = _points(rows, metric)
    if points.empty:
        raise ValueError(f"metric: {metric!r} has no rows to draw")
    lines = _lines(points, fits_frame(fits), metric)
    names = _names(points, lines)
    points["series"] = points["series_key"].map(names)
    lines["series"] = lines["series_key"].map(names)
    domain = list(dict.fromkeys(points.sort_values(["origin", "implementation", "series"])["series"]))
    quantity = QUANTITIES[metric]
    x, y = _length_axis(points["seq_len"]), _value_axis(points, quantity)
    color = alt.Color(
        "series:N",
        scale=alt.Scale(domain=domain, range=_colors(points, domain)),
        legend=alt.Legend(title=None, orient="bottom", columns=_legend_columns(domain), labelLimit=420, symbolSize=90),
    )
    layers = [
        *_guides(points, quantity, x, y),
        *_fit_lines(points, lines, x, y, color),
        alt.Chart(points).mark_rule(strokeWidth=2).encode(x=x, y=_low(y), y2="high:Q", color=color),
        _marks(points, quantity, x, y, color),
    ]
    return alt.layer(*layers).resolve_scale(shape="independent").properties(height=height)


def exponent_chart(fits: Sequence[Any] | pd.DataFrame, *, row_height: int = 30) -> alt.LayerChart:
    """Each fitted exponent with its 95 % interval, beside the lines of linear (1) and quadratic (2) growth.

    Raises:
        ValueError: there is no fit.
    """
    frame = fits_frame(fits)
    if frame.empty:
        raise ValueError("fits: there is none to draw")
    colors = [_base_color(name) for name in frame["implementation"]]
    frame = frame[["exponent", "ci_low", "ci_high", "r2"]].assign(series=_labels(frame), color=colors)
    low, high = min(0.5, frame["ci_low"].min() - 0.1), max(2.5, frame["ci_high"].max() + 0.1)
    x = alt.X(
        "exponent:Q",
        title="growth with S: exponent and 95 % interval",
        scale=alt.Scale(domain=[low, high]),
        axis=alt.Axis(tickCount=6, grid=False),
    )
    y = alt.Y(
        "series:N", title=None, sort=list(frame["series"]), axis=alt.Axis(labelLimit=320, ticks=False, domain=False)
    )
    color = alt.Color("color:N", scale=None)
    marks = pd.DataFrame({"exponent": [1.0, 2.0], "text": ["linear", "S²"]})
    base = alt.Chart(frame)
    tooltip = [alt.Tooltip(f"{name}:Q", format=".3f") for name in ("exponent", "ci_low", "ci_high", "r2")]
    return alt.layer(
        alt.Chart(marks).mark_rule(color=GREY, strokeDash=[4, 4]).encode(x=x),
        alt.Chart(marks).mark_text(color=GREY, dy=-8, baseline="bottom").encode(x=x, y=alt.value(0), text="text:N"),
        base.mark_rule(strokeWidth=3, clip=True).encode(x=alt.X("ci_low:Q"), x2="ci_high:Q", y=y, color=color),
        base.mark_point(filled=True, size=90, opacity=1).encode(x=x, y=y, color=color, tooltip=["series:N", *tooltip]),
    ).properties(height=alt.Step(row_height), padding={"top": 22, "left": 5, "right": 5, "bottom": 5})


def samples_chart(samples: Sequence[float], unit: str, *, height: int = 120) -> alt.Chart:
    """Every timed repeat in the order taken: drift, outliers and warm-up show at once."""
    frame = pd.DataFrame({"repeat": range(1, len(samples) + 1), "value": list(samples)})
    return (
        alt.Chart(frame)
        .mark_line(point=alt.OverlayMarkDef(size=28, filled=True), color=BLUE, strokeWidth=1)
        .encode(
            x=alt.X("repeat:Q", title="repeat", axis=alt.Axis(tickMinStep=1, format="d", grid=False)),
            y=alt.Y("value:Q", title=unit, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(tickCount=4)),
            tooltip=["repeat:Q", alt.Tooltip("value:Q", format=",.4~g", title=unit)],
        )
        .properties(height=height)
    )


def fits_frame(fits: Sequence[Any] | pd.DataFrame) -> pd.DataFrame:
    """Fits as a frame with the columns of SERIES that they carry, `exponent`, `ci_low`, `ci_high`, `n`, `r2` ..."""
    if isinstance(fits, pd.DataFrame):
        frame = fits
    else:
        frame = pd.DataFrame([asdict(fit) if is_dataclass(fit) and not isinstance(fit, type) else fit for fit in fits])
    return frame.rename(columns={"pass_": "pass"}).reset_index(drop=True)


def length_label(length: float) -> str:
    """A sequence length as people say it: 512, 1K, 64K, 1M; others in full."""
    length = int(length)
    for size, suffix in ((2**20, "M"), (2**10, "K")):
        if length >= size and length % (size // 2) == 0:
            return f"{length / size:g}{suffix}"
    return f"{length:,}"


def _points(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of `metric` that a log axis can show, with `y`, `low`, `high` per sequence and their series' key."""
    keep = (rows["metric"] == metric) & (rows["seq_len"] > 0) & (rows["per_sequence"] > 0)
    points = rows[keep].copy()
    share = points["per_sequence"] / points["value"]
    points["y"] = points["per_sequence"]
    points["low"] = (points["ci_low"] * share).where(points["ci_low"] > 0, points["y"])
    points["high"] = (points["ci_high"] * share).where(points["ci_high"] > 0, points["y"])
    points["length"] = points["seq_len"].map(length_label)
    points["series_key"] = _keys(points, [name for name in SERIES if name in points])
    return points.sort_values(["series_key", "seq_len"]).reset_index(drop=True)


def _keys(frame: pd.DataFrame, columns: list[str]) -> list[str]:
    """One text a row from its identity columns; numbers as integers, gaps as nothing, so that frames agree."""

    def text(value: Any) -> str:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

    return ["|".join(text(value) for value in row) for row in frame[columns].itertuples(index=False)]


def _lines(points: pd.DataFrame, fits: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Two ends of each fitted line, with the key of the points' series that it belongs to."""
    columns = ["series_key", "exponent", "seq_len", "y"]
    if fits.empty:
        return pd.DataFrame(columns=columns)
    shared = [name for name in SERIES if name in fits and name in points]
    series = points.drop_duplicates("series_key").assign(shared_key=lambda frame: _keys(frame, shared))
    fits = fits[fits["metric"] == metric].assign(shared_key=lambda frame: _keys(frame, shared))
    matched = fits[["shared_key", "exponent", "coefficient"]].merge(
        series[["shared_key", "series_key"]], on="shared_key"
    )
    spans = points.groupby("series_key")["seq_len"].agg(["min", "max"])
    ends = [
        (key, exponent, length, 10**coefficient * length**exponent)
        for key, exponent, coefficient in matched[["series_key", "exponent", "coefficient"]].itertuples(index=False)
        for length in spans.loc[key]
    ]
    return pd.DataFrame(ends, columns=columns)


def _names(points: pd.DataFrame, lines: pd.DataFrame) -> dict[str, str]:
    """What each series is called in the legend: what tells it from the others, and its exponent."""
    series = points.drop_duplicates("series_key")
    exponents = dict(zip(lines["series_key"], lines["exponent"], strict=True))
    names = {}
    for key, label in zip(series["series_key"], _labels(series), strict=True):
        names[key] = f"{label}  ~ S^{exponents[key]:.2f}" if key in exponents else label
    return names


def _labels(series: pd.DataFrame) -> list[str]:
    """A name a row: its implementation and, where rows would share a name, the coordinates that tell them apart."""
    labels = series["implementation"].fillna("?").astype(str).reset_index(drop=True)
    if series["origin"].nunique() > 1:
        labels += pd.Series([" (reported)" if origin == "reported" else "" for origin in series["origin"]])
    for column in _coordinates(series):
        doubled = labels.duplicated(keep=False)
        longer = labels.where(~doubled | (column == ""), labels + " · " + column)
        labels = longer if longer.nunique() > labels.nunique() else labels
    return list(labels)


def _coordinates(series: pd.DataFrame) -> list[pd.Series]:
    """What can tell series apart, in the order of how much it tells."""
    names = ("metric", "pass", "workload", "shape", "dtype", "gpu", "device", "run_name", "run_id")
    frame = series.assign(
        shape=_shapes(series),
        metric=[QUANTITIES[name].short if name in QUANTITIES else name for name in series["metric"]],
    ).reset_index(drop=True)
    return [frame[name].fillna("").astype(str) for name in names if name in frame]


def _shapes(series: pd.DataFrame) -> list[str]:
    shapes = []
    for row in series[["query_heads", "kv_heads", "head_dim", "layers"]].itertuples(index=False):
        heads = (
            f"{row.query_heads:g}/{row.kv_heads:g} heads"
            if pd.notna(row.query_heads) and pd.notna(row.kv_heads)
            else ""
        )
        dim = f"d{row.head_dim:g}" if pd.notna(row.head_dim) else ""
        layers = f"{row.layers:g} layers" if pd.notna(row.layers) else ""
        shapes.append(" ".join(filter(None, [layers, heads, dim])))
    return shapes


def _base_color(implementation: object) -> str:
    """The colour that an implementation has in every chart; grey for those without one."""
    return IMPLEMENTATION_COLORS.get(str(implementation).split(" ")[0], GREY)


def _colors(points: pd.DataFrame, domain: list[str]) -> list[str]:
    """A colour a series: its implementation's own where no earlier series has it, else the next free one."""
    implementations = dict(zip(points["series"], points["implementation"], strict=True))
    taken: list[str] = []
    for name in domain:
        own = _base_color(implementations[name])
        free = [color for color in PALETTE if color not in taken]
        taken.append(
            own if own != GREY and own not in taken else (free[0] if free else PALETTE[len(taken) % len(PALETTE)])
        )
    return taken


def _legend_columns(domain: Sequence[str]) -> int:
    return 2 if max(map(len, domain)) < 30 else 1


def _length_axis(lengths: pd.Series) -> alt.X:
    low, high = math.floor(math.log2(lengths.min())), math.ceil(math.log2(lengths.max()))
    step = 1 if high - low <= 9 else 2
    label = (
        "datum.value >= 1048576 ? datum.value / 1048576 + 'M' :"
        " datum.value >= 1024 ? datum.value / 1024 + 'K' : datum.value"
    )
    room = 2**0.25
    return alt.X(
        "seq_len:Q",
        title="sequence length S [tokens]",
        scale=alt.Scale(type="log", base=2, domain=[lengths.min() / room, lengths.max() * room], nice=False),
        axis=alt.Axis(values=[2**k for k in range(low, high + 1, step)], labelExpr=label, gridOpacity=0.35),
    )


def _value_axis(points: pd.DataFrame, quantity: Quantity) -> alt.Y:
    low, high = points[["low", "y"]].min().min(), points[["high", "y"]].max().max()
    low, high = min(low, _anchor(points, quantity)) / 1.5, max(high, _anchor(points, quantity)) * 1.5
    title = f"{quantity.title} per sequence" if (points["batch"].fillna(1) != 1).any() else quantity.title
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
    return alt.Y(
        "y:Q",
        title=title,
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=alt.Axis(values=ticks, labelExpr=label, gridOpacity=0.35),
    )


def _binary_ticks(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / 7))
    return [2.0**k for k in range(first - first % step, last + 1, step) if 2.0**k >= low]


def _decimal_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    mantissas = (1,) if last - first > 4 else (1, 3) if last - first > 2 else (1, 2, 5)
    ticks = (m * 10.0**k for k in range(first, last + 1) for m in mantissas)
    return [float(f"{tick:.3g}") for tick in ticks if low <= tick <= high]


def _low(y: alt.Y) -> alt.Y:
    low = y.copy()
    low.shorthand = "low:Q"
    return low


def _guides(points: pd.DataFrame, quantity: Quantity, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Lines of the quantity's guide slopes, from beside the first point outwards, so that they cover no series."""
    first, last = points["seq_len"].min(), points["seq_len"].max()
    if first == last:
        return []
    anchor = _anchor(points, quantity)
    low, high = min(anchor, points["y"].min()), max(anchor, points["y"].max())
    ends, labels = [], []
    for slope, text in quantity.guides:
        stop = _within(anchor, slope, last / first, low, high)
        ends += [{"guide": text, "seq_len": first * at, "y": anchor * at**slope} for at in (1.0, stop)]
        labels.append({"text": text, "seq_len": first * stop, "y": anchor * stop**slope})
    line = alt.Chart(pd.DataFrame(ends)).mark_line(color=GREY, strokeDash=[2, 4], strokeWidth=1.5)
    style = {"align": "right", "dx": -2, "dy": 12 if quantity.grows else -10}
    text = alt.Chart(pd.DataFrame(labels)).mark_text(color=GREY, fontSize=12, fontWeight="bold", **style)
    return [line.encode(x=x, y=y, detail="guide:N"), text.encode(x=x, y=y, text="text:N")]


def _anchor(points: pd.DataFrame, quantity: Quantity) -> float:
    """Where the guides begin, at the shortest length: below what grows, above what falls."""
    start = points.loc[points["seq_len"] == points["seq_len"].min(), "y"]
    return start.min() / 1.6 if quantity.grows else start.max() * 1.4


def _within(anchor: float, slope: float, ratio: float, low: float, high: float) -> float:
    """How far (as a factor of the length) a line of `slope` from `anchor` stays inside the plot."""
    if slope == 0:
        return ratio
    edge = high if slope > 0 else low
    return max(1.0, min(ratio, (edge / anchor) ** (1 / slope)))


def _fit_lines(points: pd.DataFrame, lines: pd.DataFrame, x: alt.X, y: alt.Y, color: alt.Color) -> list[alt.Chart]:
    """Fitted lines (dashed where reported); a thin line through the points of a series without a fit."""
    origins = dict(zip(points["series_key"], points["origin"], strict=True))
    reported = lines["series_key"].map(origins) == "reported"
    unfitted = points[~points["series_key"].isin(lines["series_key"])]
    drawn = ((lines[~reported], {}), (lines[reported], {"strokeDash": [7, 4]}), (unfitted, {"strokeWidth": 1}))
    return [
        alt.Chart(frame).mark_line(**{"strokeWidth": 2.5, **style}).encode(x=x, y=y, color=color, detail="series_key:N")
        for frame, style in drawn
        if not frame.empty
    ]


def _marks(points: pd.DataFrame, quantity: Quantity, x: alt.X, y: alt.Y, color: alt.Color) -> alt.LayerChart:
    """The points: measured ones are filled circles, reported ones hollow diamonds."""
    names = {
        "series": "series", "length": "S", "value": f"{quantity.title.lower()} [{quantity.unit}]", "batch": "batch",
        "ci_low": "95 % from", "ci_high": "95 % to", "workload": "workload", "pass": "pass", "dtype": "dtype",
        "device": "device", "gpu": "GPU", "origin": "origin", "source": "source", "run_id": "run",
    }  # fmt: skip
    shown = [name for name in names if name in points and points[name].notna().any()]
    numbers = {"value", "ci_low", "ci_high"}
    tooltip = [
        alt.Tooltip(f"{name}:Q", title=names[name], format=",.4~g")
        if name in numbers
        else alt.Tooltip(f"{name}:N", title=names[name])
        for name in shown
    ]
    measured, reported = points[points["origin"] != "reported"], points[points["origin"] == "reported"]
    styles = [
        (measured, {"filled": True, "shape": "circle"}),
        (reported, {"filled": False, "shape": "diamond", "strokeWidth": 2}),
    ]
    return alt.layer(
        *(
            alt.Chart(frame).mark_point(size=80, opacity=1, **style).encode(x=x, y=y, color=color, tooltip=tooltip)
            for frame, style in styles
            if not frame.empty
        )
    )
