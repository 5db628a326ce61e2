"""Scaling: memory, time and throughput against sequence length with fitted exponents, ours beside what others report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import charts, data, help_pages, parts
from orchestrator.states import FAILED, Origin, PointState
from orchestrator.store import Store

MEMORY = ("peak_extra_memory", "peak_memory", "peak_reserved")
CHART_HEIGHT = 460  # with its axes and legend
BESIDE, TOGETHER = "Beside", "In one chart"
NO_NUMBER = (*FAILED, PointState.SKIPPED, PointState.CANCELLED)


@dataclass(frozen=True)
class Choice:
    """What the reader wants to see. Empty means all."""

    run_ids: tuple[str, ...]
    passes: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def select(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows (of points, numbers or fits) that were chosen."""
        for column, wanted in (
            ("pass", self.passes),
            ("workload", self.workloads),
            ("implementation", self.implementations),
            ("device", self.devices),
        ):
            if wanted:
                frame = frame[frame[column].isin(wanted)]
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
    live = bool((runs[runs["run_id"].isin(choice.run_ids)]["state"] == "running").any())
    st.fragment(_results, run_every=data.LIVE_SECONDS if live else None)(store, choice, layout, live)


def _filters(store: Store, runs: pd.DataFrame) -> tuple[Choice, str]:
    with st.container(border=True):
        run_ids = _choose_runs(store, runs)
        rows = data.scaling(store, run_ids=run_ids)
        with st.container(horizontal=True, gap="large"):
            passes = _pick("Pass", rows["pass"], _usual_pass(rows))
            workloads = _pick("Workload", rows["workload"], None)
            devices = _pick("Device", rows["device"], None)
            layout = BESIDE
            if rows["origin"].nunique() > 1:
                layout = st.segmented_control("Reported results", [BESIDE, TOGETHER], default=BESIDE, required=True)
        implementations = _pick("Implementation", rows["implementation"], _curves(rows))
    return Choice(tuple(run_ids), passes, workloads, implementations, devices), layout


def _choose_runs(store: Store, runs: pd.DataFrame) -> list[str]:
    """The runs to show: those that the address names, else the latest sweep of ours and the reported S² curve."""
    names = {row["run_id"]: f"{row['name']} · {row['created_at']:%Y-%m-%d %H:%M}" for row in runs.to_dict("records")}
    measured = runs[runs["origin"] == Origin.MEASURED]["run_id"].tolist()
    reported = runs[runs["origin"] == Origin.REPORTED]["run_id"].tolist()
    asked = [run_id for run_id in st.query_params.get_all("run") if run_id in names]
    default_measured = [run_id for run_id in asked if run_id in measured] if asked else _latest(store, runs)
    default_reported = [run_id for run_id in asked if run_id in reported] or _curve_of_the_start(store, reported)
    left, right = st.columns(2)
    ours = left.multiselect("Measured here", measured, default_measured, format_func=names.get, placeholder="none")
    theirs = right.multiselect(
        "Reported by others", reported, default_reported, format_func=names.get, placeholder="none"
    )
    return [*ours, *theirs]


def _latest(store: Store, runs: pd.DataFrame) -> list[str]:
    """The newest measured sweep that has results; else the newest that is under way."""
    sweeps = runs[(runs["origin"] == Origin.MEASURED) & (runs["kind"] == "scaling")]
    finished = sweeps[sweeps["ok"] > 0]
    return (finished if len(finished) else sweeps)["run_id"].head(1).tolist()


def _curve_of_the_start(store: Store, reported: Sequence[str]) -> list[str]:
    """The reported runs whose memory of a whole model over three lengths shows where this project began."""
    fits = data.fits(store, reported)
    return sorted(fits[(fits["workload"] == "model") & fits["metric"].isin(MEMORY)]["run_id"].unique())


def _usual_pass(rows: pd.DataFrame) -> list[str]:
    return ["forward+backward"] if "forward+backward" in set(rows["pass"]) else []


def _curves(rows: pd.DataFrame) -> list[str]:
    """The implementations with three lengths or more; a single figure is no curve, but can be chosen."""
    lengths = rows.groupby("implementation")["seq_len"].nunique()
    return sorted(lengths[lengths >= 3].index)


def _pick(label: str, values: pd.Series, default: list[str] | None) -> tuple[str, ...]:
    options = sorted(values.dropna().unique())
    if len(options) > 8:
        return tuple(st.multiselect(label, options, default, placeholder="all"))
    return tuple(st.pills(label, options, selection_mode="multi", default=default, help="none chosen: all"))


@data.part
def _results(store: Store, choice: Choice, layout: str, live: bool) -> None:
    """Everything that changes while a run goes on."""
    rows = choice.select(data.scaling(store, run_ids=choice.run_ids))
    fits = choice.select(data.fits(store, choice.run_ids))
    states = choice.select(data.states(store, run_ids=choice.run_ids))
    waiting = states["state"].isin([PointState.PENDING, PointState.RUNNING]).sum()
    if live:
        st.info(
            f"Still measuring: {parts.count(int(waiting), 'point')} to go. This page follows.",
            icon=":material/autorenew:",
        )
        if not waiting and choice.run_ids:
            st.caption("The last points of this selection have ended.")
    if rows.empty:
        st.info("No finished point fits this choice yet.", icon=":material/filter_alt_off:")
    else:
        _exponents(fits)
        _panels(rows, fits, layout)
        _fits_table(fits)
    _unfinished(states)
    if not rows.empty:
        _rows(rows)


def _exponents(fits: pd.DataFrame) -> None:
    st.header("How fast cost grows")
    if fits.empty:
        st.caption("An exponent needs three sequence lengths of one implementation; there are not that many yet.")
        return
    ordered = fits.sort_values(["origin", "metric", "implementation", "run_id"])
    st.altair_chart(charts.exponent_chart(ordered), alt="Fitted exponents beside linear and quadratic growth")


def _panels(rows: pd.DataFrame, fits: pd.DataFrame, layout: str) -> None:
    """A grid of charts: memory, time, throughput; what others report beside ours, or in the same chart."""
    panels = []
    for title, metrics in (("Memory", MEMORY), ("Time", ("time",)), ("Throughput", ("throughput",))):
        if layout == TOGETHER:
            panels += [(title, metric, rows) for metric in metrics if metric in set(rows["metric"])][:2]
            continue
        for origin in (Origin.MEASURED, Origin.REPORTED):
            own = rows[rows["origin"] == origin]
            metric = next((metric for metric in metrics if metric in set(own["metric"])), None)
            panels += [(f"{title}, {origin}", metric, own)] if metric else []
    for first in range(0, len(panels), 2):
        for column, panel in zip(st.columns(2, gap="medium"), panels[first : first + 2], strict=False):
            with column:
                _panel(*panel, fits)


def _panel(title: str, metric: str, rows: pd.DataFrame, fits: pd.DataFrame) -> None:
    st.subheader(title)
    shown = rows[(rows["metric"] == metric) & (rows["per_sequence"] > 0)]
    if shown.empty:
        st.caption("Every value is zero, which a logarithmic axis cannot show.")
        return
    st.caption(_what(shown))
    chart = charts.scaling_chart(shown, fits, metric, height=CHART_HEIGHT)
    st.altair_chart(chart, alt=f"{title}: {charts.QUANTITIES[metric].title} against sequence length")


def _what(rows: pd.DataFrame) -> str:
    """What a chart's points have in common: run, workload, pass, hardware."""
    names = ("run_name", "workload", "pass", "dtype", "gpu")
    values = (sorted(rows[name].dropna().unique()) for name in names)
    texts = [", ".join(map(str, found)) for found in values if 0 < len(found) <= 3]
    return parts.plain(" · ".join(texts if rows["gpu"].notna().any() else [*texts, "CPU"]))


def _fits_table(fits: pd.DataFrame) -> None:
    if fits.empty:
        return
    st.header(
        "Fitted exponents", help="value = c · S^p per sequence, least squares on log-log axes; Student's t interval"
    )
    rows = fits.sort_values(["origin", "metric", "implementation"]).to_dict("records")
    table = pd.DataFrame(
        {
            "Origin": [parts.badge(row["origin"], parts.ORIGINS) for row in rows],
            "Metric": [charts.QUANTITIES[row["metric"]].title for row in rows],
            "Implementation": [parts.plain(row["implementation"]) for row in rows],
            "Pass": [
                parts.plain(row["pass_"] or "–") if "pass_" in row else parts.plain(row["pass"] or "–") for row in rows
            ],
            "Exponent": [f"**{row['exponent']:.2f}**" for row in rows],
            "95 % interval": [f"{row['ci_low']:.2f} to {row['ci_high']:.2f}" for row in rows],
            "R²": [f"{row['r2']:.3f}" for row in rows],
            "Lengths": [_lengths(row["lengths"]) for row in rows],
            "Run": [f"[{parts.plain(row['run_name'])}](runs?run={row['run_id']})" for row in rows],
        }
    )
    st.table(table, border="horizontal", hide_index=True)


def _lengths(lengths: Sequence[Any]) -> str:
    return f"{len(lengths)}: {charts.length_label(lengths[0])} to {charts.length_label(lengths[-1])}"


def _unfinished(states: pd.DataFrame) -> None:
    """Points without numbers are listed with their state; drawing them would make numbers of them."""
    missing = states[states["state"].isin(NO_NUMBER)]
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
        names = (
            "origin",
            "run_name",
            "implementation",
            "workload",
            "pass",
            "seq_len",
            "batch",
            "metric",
            "value",
            "unit",
        )
        st.dataframe(rows[[*names, "ci_low", "ci_high", "gpu", "point_id"]], hide_index=True)


if __name__ == "__main__":
    page()
