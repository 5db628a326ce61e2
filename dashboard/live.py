"""Live series of a point on its page: when it ends, what was expected of it, and small charts that grow."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import streamlit as st
from pydantic import ValidationError

from dashboard import data, grids, parts
from jobs.schema.quantities import LIVE, Quantities, written_unit
from jobs.schema.training_plan import TrainingPlan
from orchestrator.report.charts import Chart, drawn
from orchestrator.report.now import seconds_left
from orchestrator.store import Store

_SHOWN = 400  # samples drawn of a series; the first and the last are always among them
_HEIGHT = 230  # pixels
_FIRST = (
    *("loss", "throughput", "mfu", "rank_imbalance", "gpu_utilization", "cpu_utilization"),
    *("training_memory", "gpu_memory_used"),
)
_UTILIZATION = ("gpu_utilization", "cpu_utilization")
_BUSY = 80.0  # percent that a processor should be busy at least
_ESTIMATE = 1.1  # measured memory may be this much of the estimate


@data.explained
def live_series(store: Store, point_id: str) -> None:
    """Draw the series of a point's attempt that counts, or runs just now."""
    point = data.point(store, point_id)
    if point is None:
        return
    frame = data.series(store, point_id, attempt=point["running"] or point["attempt"], most=_SHOWN)
    if left := remaining(point):
        st.markdown(f":material/timer: {left}")
    if frame.empty:
        return
    if rows := _expectations(point, frame, data.metrics(store, point_id)):
        st.subheader("Expected against actual")
        grids.table(rows)
    st.subheader("Series")
    quantities = Quantities([*data.quantities(store, [point["run_id"]]), *LIVE])
    first = {name: index for index, name in enumerate(_FIRST)}
    by_name = {str(name): rows for name, rows in frame.groupby("name")}
    names = sorted(by_name, key=lambda name: (first.get(name, len(first)), *quantities.place(name)))
    for place in range(0, len(names), 2):  # two side by side
        for column, name in zip(st.columns(2), names[place : place + 2], strict=False):
            rows, unit = by_name[name], str(by_name[name]["unit"].iloc[-1])
            last = rows.groupby("rank")["value"].last().tolist()
            value = parts.number(max(last), unit)
            if len(last) > 1:
                value = f"{parts.number(min(last))} to {value}, {len(last)} ranks"
            title = f"{quantities.of(name, unit).title}: {value}"
            with column:
                chart = _chart(rows, (frame["at"].min(), frame["at"].max()), title, unit)
                grids.chart(chart, key=f"series {name}", height=_HEIGHT)


def remaining(point: Mapping[str, Any]) -> str:
    """The rate of a running attempt, and when its phase ends at this rate (Markdown); empty where it is unknown."""
    if (seconds := seconds_left(point)) is None:
        return ""
    done, total, rate = (point[name] for name in ("done", "total", "rate"))
    end = parts.moment(datetime.now(UTC) + timedelta(seconds=seconds))
    return (
        f"{parts.plain(point['phase'])}: {done:,.0f} of {total:,.0f} at {parts.number(rate)} a second, "
        f"about **{parts.number(seconds, 's')}** left, until {end}"
    )


def _expectations(point: Mapping[str, Any], frame: pd.DataFrame, metrics: pd.DataFrame) -> list[dict[str, str]]:
    """Rows of the plan and the memory estimate beside the measured values; none without plan and estimate."""
    measured = dict(zip(metrics["name"], metrics["value"], strict=True))
    live: Any = frame.groupby("name")["value"]
    rows: list[dict[str, str]] = []

    def expect(what: str, expected: str, actual: str, holds: bool | None) -> None:
        cells = {"Quantity": what, "Expected": parts.plain(expected), "Actual": parts.plain(actual)}
        rows.append(cells | {"Holds": "–" if holds is None else "✓ yes" if holds else "✗ no"})

    with suppress(ValidationError):  # without a plan, or of a kind that means something else by it
        plan = TrainingPlan.model_validate(point["config"].get("plan"))
        speed = measured.get("throughput", live.last().to_dict().get("throughput"))
        hours = plan.hours_at(speed) if speed else None
        fast, in_time = (
            (None if speed is None else plan.needed <= speed),
            (None if hours is None else hours <= plan.hours),
        )
        expect("Throughput", f"≥ {parts.number(plan.needed, 'tok/s')}", parts.number(speed, "tok/s"), fast)
        expect("Time of the planned run", f"≤ {parts.number(plan.hours, 'h')}", parts.number(hours, "h"), in_time)
    if (estimate := point["estimate_bytes"]) is not None and not pd.isna(estimate):
        estimate /= 2**20
        memory = measured.get("peak_memory")
        if memory is None and point["device"] == "cuda":
            memory = live.max().to_dict().get("training_memory")  # on a CPU the resident memory holds far more
        actual = "measured after the training" if memory is None else parts.number(memory, "MiB")
        fits = None if memory is None else memory <= _ESTIMATE * estimate
        expect("Memory", f"{parts.number(estimate, 'MiB')} estimated", actual, fits)
    # Since a training's first sample; a process starts idle.
    begun = frame.loc[~frame["name"].isin([quantity.name for quantity in LIVE]), "at"].min()
    training = frame.loc[frame["name"].isin(_UTILIZATION) & (frame["at"] >= begun)]
    if rows and not training.empty:
        busy = float(training.groupby("rank")["value"].median().min())
        what = "Utilisation, median of the least busy rank"
        expect(what, f"≥ {parts.number(_BUSY, '%')}", parts.number(busy, "%"), busy >= _BUSY)
    return rows


def _chart(rows: pd.DataFrame, span: tuple[Any, Any], title: str, unit: str) -> Chart:
    """Line chart of one series against the time since the first of two Timestamps, up to the second; a line a rank."""
    whole = max(1.0, (span[1] - span[0]).total_seconds())
    scale, name = next((s, n) for s, n in ((3600, "h"), (60, "min"), (1, "s")) if whole >= 2 * s or s == 1)
    shown: Any = rows[["value", "step"]].assign(
        elapsed=(rows["at"] - span[0]).dt.total_seconds() / scale, rank=rows["rank"].astype(str)
    )
    low, high = min(shown["value"]), max(shown["value"])
    far_from_zero = low > 0 and high - low < 0.5 * high  # an axis from zero would hide the changes
    return drawn(
        "live",
        shown.to_dict("records"),
        title=title,
        time=f"time [{name}]",
        unit=written_unit(unit) if unit != "1" else None,
        domain=[0, whole / scale],
        zero=unit == "%" or not far_from_zero,
        few=len(shown) < 3,
        legend={"columns": 8} if shown["rank"].nunique() > 1 else None,
    )
