"""Scaling page: memory, time and throughput against sequence length, with fitted exponents; ours beside reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

import jobs.quantities
from dashboard import data, help_pages, parts
from jobs.axes import AXES, more_columns
from jobs.quantities import AGAINST_LENGTH, Quantities, Quantity
from orchestrator.report import charts, series
from orchestrator.report.table import shape_of
from orchestrator.states import FAILED, Origin, PointState
from orchestrator.store import Store

MEMORY = tuple(quantity.name for quantity in jobs.quantities.MEMORY)  # a chart needs only one kind of memory
CHART_HEIGHT, LEGEND_ROW = 390, 26  # pixels; a chart grows with its legend
LOOKED_AT = 20  # newest runs to search for the default
BESIDE, TOGETHER = "Beside", "In one chart"
NO_NUMBER = (*FAILED, PointState.SKIPPED, PointState.CANCELLED)


@dataclass(frozen=True)
class Choice:
    """The reader's selection; an empty field selects all."""

    run_ids: tuple[str, ...]
    passes: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    more: tuple[tuple[str, tuple[str, ...]], ...] = ()  # kind-specific axes: column and values

    def select(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Selected rows of a frame of points, metrics or fits."""
        for column, wanted in (
            ("pass", self.passes),
            ("workload", self.workloads),
            ("implementation", self.implementations),
            ("device", self.devices),
        ):
            if wanted:
                frame = frame.loc[frame[column].isin(wanted)]
        for column, wanted in self.more:
            if wanted and column in frame:
                frame = frame.loc[frame[column].map(series.text).isin(wanted)]
        if self.shapes:
            frame = frame.loc[[series.shape(row) in self.shapes for row in _records(frame)]]
        return frame


@data.page
def page(store: Store) -> None:
    st.title("Scaling")
    runs = data.runs(store)
    if runs.empty:
        help_pages.nothing_yet()
        return
    choice, layout = _filters(store, runs)
    if not choice.run_ids:
        st.info("Choose a run above.", icon=":material/arrow_upward:")
        return
    states = data.states(store, run_ids=choice.run_ids)
    if _waiting(states):
        st.fragment(_follow, run_every=data.LIVE_SECONDS)(store, choice.run_ids, seen=_waiting(states))
    _results(store, choice, layout, states)


def _waiting(states: pd.DataFrame) -> int:
    """Number of pending and running points."""
    return len(states.loc[states["state"].isin([PointState.PENDING, PointState.RUNNING])])


@data.part
def _follow(store: Store, run_ids: Sequence[str], *, seen: int) -> None:
    """Show the progress of live runs, and redraw the page when a point has ended."""
    states = data.states(store, run_ids=run_ids)
    if _waiting(states) != seen:
        st.rerun()
    running = states.loc[states["state"] == PointState.RUNNING]
    st.info(f"Still measuring, {parts.count(seen, 'point')} to go; this page follows.", icon=":material/autorenew:")
    for point in running.to_dict("records"):
        st.caption(parts.doing(point))


def _filters(store: Store, runs: pd.DataFrame) -> tuple[Choice, str]:
    with st.container(border=True):
        run_ids = _choose_runs(store, runs)
        planned = data.states(store, run_ids=run_ids)  # filters also offer points that have not ended
        with st.container(horizontal=True, gap="medium"):
            passes = _pick("Pass", planned, "pass", _usual_passes(planned))
            workloads = _pick("Workload", planned, "workload")
            devices = _pick("Device", planned, "device")
            layout = BESIDE
            if len(set(planned["origin"])) > 1:
                layout = st.segmented_control("Reported results", [BESIDE, TOGETHER], default=BESIDE, required=True)
        shapes = _pick_shapes(planned)
        labels = data.own_axes(store, run_ids)
        more = tuple((column, _pick_values(label, planned, column)) for column, label in sorted(labels.items()))
        implementations = _pick("Implementation", planned, "implementation", _curves(planned))
    return Choice(tuple(run_ids), passes, workloads, implementations, devices, shapes, more), layout


def _choose_runs(store: Store, runs: pd.DataFrame) -> list[str]:
    """Ids of the runs to show; default: the runs in the address, else our latest sweep and the reported S² curve."""
    names = {row["run_id"]: f"{row['name']} · {row['created_at']:%Y-%m-%d %H:%M}" for row in runs.to_dict("records")}
    measured = runs[runs["origin"] == Origin.MEASURED]["run_id"].tolist()
    reported = runs[runs["origin"] == Origin.REPORTED]["run_id"].tolist()
    asked = [run_id for run_id in st.query_params.get_all("run") if run_id in names]
    default_measured = [run_id for run_id in asked if run_id in measured] if asked else _latest(store, runs)
    default_reported = [run_id for run_id in asked if run_id in reported] or _curve_of_the_start(store, reported)
    left, right = st.columns(2)
    ours = left.multiselect(
        "Measured here", measured, default_measured, format_func=names.__getitem__, placeholder="none"
    )
    theirs = right.multiselect(
        "Reported by others", reported, default_reported, format_func=names.__getitem__, placeholder="none"
    )
    return [*ours, *theirs]


def _latest(store: Store, runs: pd.DataFrame) -> list[str]:
    """Id of the newest measured run with fits; else the newest with results, else the newest."""
    ours = [run for run in runs.to_dict("records") if run["origin"] == Origin.MEASURED]
    with_results = [run for run in ours if run["ok"]]
    growing = (run for run in with_results[:LOOKED_AT] if not data.fits(store, (run["run_id"],)).empty)
    newest = next(growing, None)
    return [run["run_id"] for run in ([newest] if newest else with_results or ours)[:1]]


def _curve_of_the_start(store: Store, reported: Sequence[str]) -> list[str]:
    """Ids of reported runs with a fit of a whole model's memory: the curve from which this project started."""
    fits = data.fits(store, reported).to_dict("records")
    return sorted({fit["run_id"] for fit in fits if fit["workload"] == "model" and fit["metric"] in MEMORY})


def _usual_passes(states: pd.DataFrame) -> list[str]:
    """Default passes: forward+backward, and all passes of runs without it (decoding)."""
    usual: set[str] = set()
    for _, passes in states.groupby("run_id")["pass"]:
        named = set(passes.dropna())
        usual |= named & {"forward+backward"} or named
    return sorted(usual) if usual < set(states["pass"].dropna()) else []


def _curves(states: pd.DataFrame) -> list[str]:
    """Default implementations: all measured ones, and reported ones with at least three lengths (a curve)."""
    ours: set[str] = set()
    lengths: dict[str, set[float]] = defaultdict(set)
    for point in states.to_dict("records"):
        if point["origin"] == Origin.MEASURED and point["implementation"]:
            ours.add(point["implementation"])
        elif point["state"] == PointState.OK and point["implementation"]:
            lengths[point["implementation"]].add(point["seq_len"])
    return sorted(ours | {name for name, found in lengths.items() if len(found) >= 3})


def _pick_shapes(states: pd.DataFrame) -> tuple[str, ...]:
    """Shapes to show; default: all, but one of a sweep over three or more, whose lines would hide each other."""
    sweeps: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in _records(states):
        if shape := series.shape(row):
            sweeps[row["run_id"], row["workload"]].add(shape)
    options = sorted(set().union(*sweeps.values()))
    if len(options) < 2:
        return ()
    shown = set().union(*(shapes if len(shapes) < 3 else sorted(shapes)[:1] for shapes in sweeps.values()))
    default = sorted(shown) if len(shown) < len(options) else None
    return tuple(st.pills("Shape", options, selection_mode="multi", default=default, help="none chosen: all"))


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _pick(label: str, states: pd.DataFrame, column: str, default: list[str] | None = None) -> tuple[str, ...]:
    options = sorted({value for value in states[column] if isinstance(value, str)})
    if len(options) > 8:
        return tuple(st.multiselect(label, options, default, placeholder="all"))
    return tuple(st.pills(label, options, selection_mode="multi", default=default, help="none chosen: all"))


def _pick_values(label: str, states: pd.DataFrame, column: str) -> tuple[str, ...]:
    """Selected values of a kind-specific axis."""
    if column not in states:
        return ()
    options = sorted({text for value in states[column] if (text := series.text(value))})
    return tuple(st.pills(parts.plain(label), options, selection_mode="multi", help="none chosen: all"))


def _results(store: Store, choice: Choice, layout: str, states: pd.DataFrame) -> None:
    rows = choice.select(data.scaling(store, run_ids=choice.run_ids))
    fits = choice.select(data.fits(store, choice.run_ids))
    if rows.empty:
        st.info("No finished point fits this choice yet.", icon=":material/filter_alt_off:")
    else:
        quantities = data.quantities(store, choice.run_ids)
        _exponents(fits, quantities)
        _panels(rows, fits, layout, quantities)
        _fits_table(fits, quantities)
    _unfinished(choice.select(states))
    if not rows.empty:
        _rows(rows)


def _exponents(fits: pd.DataFrame, quantities: Quantities) -> None:
    st.header("How fast cost grows")
    if fits.empty:
        st.caption("An exponent needs three sequence lengths of one implementation; there are not that many yet.")
        return
    with_extra = list(fits.loc[fits["metric"] == MEMORY[0]]["run_id"])  # one kind of memory per run; the table has all
    shown = fits.loc[~(fits["metric"].isin(MEMORY[1:]) & fits["run_id"].isin(with_extra))]
    ordered = shown.sort_values(["origin", "metric", "implementation", "run_id"])
    st.altair_chart(
        charts.exponent_chart(ordered, quantities), alt="Fitted exponents beside linear and quadratic growth"
    )


def _panels(rows: pd.DataFrame, fits: pd.DataFrame, layout: str, quantities: Quantities) -> None:
    """Draw a grid of charts, one per quantity, with reported results beside ours or in the same chart."""
    drawn = [quantity.name for quantity in quantities if quantity.plot in AGAINST_LENGTH]
    others = [(name,) for name in drawn if name not in MEMORY]
    origins = [None] if layout == TOGETHER else [Origin.MEASURED, Origin.REPORTED]
    panels: list[tuple[str, Quantity, pd.DataFrame]] = []
    for names in ([name for name in MEMORY if name in drawn], *others):
        for origin in origins:
            own = rows if origin is None else rows.loc[rows["origin"] == origin]
            stored = [quantities.of(name) for name in names if name in set(own["metric"])]
            if origin is None:
                panels += [(quantity.title, quantity, own) for quantity in stored[:2]]
            elif stored:
                panels.append((f"{'Memory' if names[0] in MEMORY else stored[0].title}, {origin}", stored[0], own))
    for first in range(0, len(panels), 2):
        for column, panel in zip(st.columns(2, gap="medium"), panels[first : first + 2], strict=False):
            with column:
                title, quantity, shown = panel
                _panel(title, quantity, shown, fits)


def _panel(title: str, quantity: Quantity, rows: pd.DataFrame, fits: pd.DataFrame) -> None:
    st.subheader(parts.plain(title))
    named = (rows["metric"] == quantity.name) & (rows["unit"] == quantity.unit)
    shown = rows.loc[named & (rows["per_sequence"] > 0)]
    if shown.empty:
        st.caption("Every value is zero, which a logarithmic axis cannot show.")
        return
    st.caption(_what(shown))
    lines = len({series.key(row) for row in _records(shown)})
    chart = charts.scaling_chart(shown, fits, quantity, height=CHART_HEIGHT + LEGEND_ROW * lines)
    st.altair_chart(chart, alt=f"{title}: {quantity.title} against sequence length")


def _what(rows: pd.DataFrame) -> str:
    """Common properties of a chart's points: run, workload, pass, dtype, hardware."""
    texts = []
    for name in ("run_name", "workload", "pass", "dtype", "gpu"):
        found = sorted({value for value in rows[name] if isinstance(value, str)})
        texts += [", ".join(found)] if 0 < len(found) <= 3 else []
    on_cpu = set(rows["device"]) == {"cpu"}
    return parts.plain(" · ".join([*texts, "CPU"] if on_cpu else texts))


def _fits_table(fits: pd.DataFrame, quantities: Quantities) -> None:
    if fits.empty:
        return
    st.header(
        "Fitted exponents",
        help="Asymptotic exponent p of value = overhead + c · S^p per sequence, on the longest range of lengths, up to "
        "the longest, on which the law holds (one on which it is exact comes first)",
    )
    rows = fits.sort_values(["origin", "metric", "implementation"]).to_dict("records")
    table = pd.DataFrame(
        {
            "Origin": [parts.badge(row["origin"], parts.ORIGINS) for row in rows],
            "Metric": [parts.plain(quantities.of(row["metric"]).title) for row in rows],
            "Implementation": [parts.plain(row["implementation"]) for row in rows],
            "Pass": [parts.plain(row["pass"] or "–") for row in rows],
            "Shape": [parts.plain(shape_of(row) or "–") for row in rows],
            "Exponent": [f"**{row['exponent']:.2f}**" for row in rows],
            "95 % interval": [f"{row['ci_low']:.2f} to {row['ci_high']:.2f}" for row in rows],
            "Overhead": [_overhead(row, quantities) for row in rows],
            "Through all lengths": [f"{row['plain_exponent']:.2f}" for row in rows],
            "It rests on": [_lengths(row["lengths"]) for row in rows],
            "Run": [parts.run_link(row["run_id"], parts.plain(row["run_name"])) for row in rows],
        }
    )
    st.table(table, border="horizontal", hide_index=True)


def _overhead(fit: dict[str, Any], quantities: Quantities) -> str:
    return parts.number(fit["overhead"], quantities.of(fit["metric"]).unit) if fit["overhead"] else "–"


def _lengths(lengths: Sequence[Any]) -> str:
    return f"{len(lengths)}: {charts.length_label(lengths[0])} to {charts.length_label(lengths[-1])}"


def _unfinished(states: pd.DataFrame) -> None:
    """Show a table of points without metrics; in a chart they would look like measurements."""
    missing = states.loc[states["state"].isin(NO_NUMBER)]
    if missing.empty:
        return
    st.header("Points without a number")
    rows = missing.to_dict("records")
    table = pd.DataFrame(
        {
            "State": [parts.badge(row["state"], parts.POINT_STATES) for row in rows],
            "Point": [parts.point_link(row["point_id"], parts.plain(row["label"])) for row in rows],
            "Why": [parts.plain(row["reason"] or "–") for row in rows],
            "Run": [parts.plain(row["run_name"]) for row in rows],
        }
    )
    st.table(table, border="horizontal", hide_index=True)


def _rows(rows: pd.DataFrame) -> None:
    with st.expander(f"The {len(rows)} numbers behind the charts", icon=":material/table:"):
        axes = [axis.name for axis in AXES if axis.name in ("implementation", "workload", "pass", "seq_len", "batch")]
        names = ["origin", "run_name", *axes, *more_columns(rows.columns), "metric", "value", "unit"]
        st.dataframe(rows[[*names, "ci_low", "ci_high", "gpu", "point_id"]], hide_index=True)


if __name__ == "__main__":
    page()
