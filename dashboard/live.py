"""Live series of a point on its page: when it ends, what was expected of it, and small charts that grow."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any, NamedTuple

import altair as alt
import pandas as pd
import streamlit as st
from pydantic import ValidationError

from dashboard import data, parts
from jobs.schema.quantities import LIVE, Quantities, written_unit
from jobs.schema.training_plan import TrainingPlan
from orchestrator.report.series import BLUE
from orchestrator.store import Store

_SHOWN = 400  # samples drawn of a series; the first and the last are always among them
_HEIGHT = 180
_FIRST = (
    *("loss", "throughput", "mfu", "rank_imbalance", "gpu_utilization", "cpu_utilization"),
    *("training_memory", "gpu_memory_used"),
)
_UTILIZATION = ("gpu_utilization", "cpu_utilization")
_BUSY = 80.0  # percent that a processor should be busy at least
_ESTIMATE = 1.1  # measured memory may be this much of the estimate


class Expectation(NamedTuple):
    """A row of the table "expected against actual"; `holds` is None where it cannot be told yet."""

    what: str
    expected: str
    actual: str
    holds: bool | None


def live_series(store: Store, point: Mapping[str, Any]) -> None:
    """Draw the series of a point's attempt that counts, or runs just now: then anew every two seconds."""
    st.fragment(_now, run_every=data.LIVE_SECONDS if point["running"] else None)(store, point["point_id"])


@data.explained
def _now(store: Store, point_id: str) -> None:
    point = data.point(store, point_id)
    if point is None:
        return
    frame = data.series(store, point_id, attempt=point["running"] or point["attempt"], most=_SHOWN)
    if left := remaining(point):
        st.markdown(f":material/timer: {left}")
    metrics = data.metrics(store, point_id)
    if not frame.empty and (rows := expectations(point, frame, metrics)):
        st.subheader("Expected against actual")
        _table(rows)
    if not frame.empty:
        st.subheader("Series")
        _charts(frame, Quantities([*data.quantities(store, [point["run_id"]]), *LIVE]))


def remaining(point: Mapping[str, Any]) -> str:
    """The rate of a running attempt, and when its phase ends at this rate (Markdown); empty where it is unknown."""
    told = [point[name] for name in ("done", "total", "rate")]
    if not point["running"] or not all(value and not pd.isna(value) for value in told):
        return ""
    done, total, rate = told
    seconds = max(0.0, total - done) / rate
    if seconds > timedelta(days=3650).total_seconds():
        return ""
    start = datetime.now(UTC)
    end = start + timedelta(seconds=seconds)
    return (
        f"{parts.plain(point['phase'])}: {done:,.0f} of {total:,.0f} at {parts.number(rate)} a second, "
        f"about **{parts.duration(start, end)}** left, until {parts.moment(end)}"
    )


def expectations(point: Mapping[str, Any], frame: pd.DataFrame, metrics: pd.DataFrame) -> list[Expectation]:
    """Rows of the plan and the memory estimate beside the measured values; none without plan and estimate."""
    measured, rows = dict(zip(metrics["name"], metrics["value"], strict=True)), []
    series = {str(name): [float(value) for value in of_name["value"]] for name, of_name in frame.groupby("name")}
    with suppress(ValidationError):  # without a plan, or of a kind that means something else by it
        plan = TrainingPlan.model_validate(point["config"].get("plan"))
        speed = measured.get("throughput", series["throughput"][-1] if "throughput" in series else None)
        hours = plan.hours_at(speed) if speed else None
        needed, most = f"≥ {parts.number(plan.needed, 'tok/s')}", f"≤ {parts.number(plan.hours, 'h')}"
        fast = None if speed is None else plan.needed <= speed
        rows.append(Expectation("Throughput", needed, parts.number(speed, "tok/s"), fast))
        in_time = None if hours is None else hours <= plan.hours
        rows.append(Expectation("Time of the planned run", most, parts.number(hours, "h"), in_time))
    estimate = point["estimate_bytes"]
    if estimate is not None and not pd.isna(estimate):
        memory = measured.get("peak_memory")
        if memory is None and "training_memory" in series and point["device"] == "cuda":
            memory = max(series["training_memory"])  # on a CPU the resident memory holds far more
        fits = None if memory is None else memory <= _ESTIMATE * estimate / 2**20
        actual = "measured after the training" if memory is None else parts.number(memory, "MiB")
        rows.append(Expectation("Memory", f"{parts.number(estimate / 2**20, 'MiB')} estimated", actual, fits))
    # Since a training's first sample; a process starts idle.
    begun = frame.loc[~frame["name"].isin([quantity.name for quantity in LIVE]), "at"].min()
    training = frame.loc[frame["name"].isin(_UTILIZATION) & (frame["at"] >= begun)]
    busy = min((median(mine["value"]) for _, mine in training.groupby("rank")), default=None)
    if rows and busy is not None:
        what, least = "Utilisation, median of the least busy rank", f"≥ {parts.number(_BUSY, '%')}"
        rows.append(Expectation(what, least, parts.number(busy, "%"), busy >= _BUSY))
    return rows


def _table(rows: list[Expectation]) -> None:
    signs = {True: "✓ yes", False: "✗ no", None: "–"}
    table = pd.DataFrame(
        {
            "Quantity": [row.what for row in rows],
            "Expected": [parts.plain(row.expected) for row in rows],
            "Actual": [parts.plain(row.actual) for row in rows],
            "Holds": [signs[row.holds] for row in rows],
        }
    )
    st.table(table, border="horizontal", hide_index=True)


def _charts(frame: pd.DataFrame, quantities: Quantities) -> None:
    """One small chart a series, two side by side, its ranks as lines."""
    by_name = {str(name): rows for name, rows in frame.groupby("name")}
    first = {name: index for index, name in enumerate(_FIRST)}
    names = sorted(by_name, key=lambda name: (first.get(name, len(first)), *quantities.place(name)))
    span = frame["at"].min(), frame["at"].max()
    for place in range(0, len(names), 2):
        for column, name in zip(st.columns(2), names[place : place + 2], strict=False):
            rows = by_name[name]
            unit = str(rows["unit"].iloc[-1])
            with column:
                st.caption(parts.plain(f"{quantities.of(name, unit).title}: {_present(rows, unit)}"))
                st.altair_chart(chart(rows, span, unit), key=f"series {name}")


def _present(rows: pd.DataFrame, unit: str) -> str:
    """The last value of a series; of several ranks, the lowest and the highest."""
    last = [float(mine["value"].iloc[-1]) for _, mine in rows.groupby("rank")]
    if len(last) == 1:
        return parts.number(last[0], unit)
    return f"{parts.number(min(last))} to {parts.number(max(last), unit)}, {len(last)} ranks"


def chart(rows: pd.DataFrame, span: tuple[Any, Any], unit: str) -> alt.Chart:
    """Line chart of one series against the time since the first of two Timestamps, up to the second; a line a rank."""
    seconds = [(at - span[0]).total_seconds() for at in rows["at"]]
    whole = max(1.0, (span[1] - span[0]).total_seconds())
    scale, name = next((s, n) for s, n in ((3600, "h"), (60, "min"), (1, "s")) if whole >= 2 * s or s == 1)
    shown = pd.DataFrame(
        {
            "elapsed": [second / scale for second in seconds],
            "value": rows["value"].tolist(),
            "rank": [str(rank) for rank in rows["rank"]],
            "step": rows["step"].tolist(),
        }
    )
    several = len(set(shown["rank"])) > 1
    color = (
        alt.Color("rank:N", legend=alt.Legend(title="rank", orient="bottom", columns=8)) if several else alt.value(BLUE)
    )
    low, high = shown["value"].min(), shown["value"].max()
    far_from_zero = low > 0 and high - low < 0.5 * high  # an axis from zero would hide the changes
    scale_y = alt.Scale(zero=unit == "%" or not bool(far_from_zero))
    return (
        alt.Chart(shown, height=_HEIGHT)
        .mark_line(point=len(shown) < 3)
        .encode(
            x=alt.X(
                "elapsed:Q",
                title=f"time [{name}]",
                scale=alt.Scale(domain=[0, whole / scale], nice=False),
                axis=alt.Axis(grid=False, tickCount=5),
            ),
            y=alt.Y(
                "value:Q",
                title=written_unit(unit) if unit != "1" else None,
                scale=scale_y,
                axis=alt.Axis(tickCount=4, format=",.6~r", labelFlush=False),
            ),
            color=color,
            tooltip=["step:Q", alt.Tooltip("value:Q", format=".4g"), "rank:N"],
        )
        .properties(width="container")
    )
