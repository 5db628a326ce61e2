"""Clickable grids of runs and points, and the button that downloads rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
import streamlit as st

from dashboard import parts
from jobs.schema.axes import AXES, MORE, more_columns
from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import Quantities, Role, heading, in_words
from jobs.schema.states import Origin, again_in_words
from orchestrator.report import series
from orchestrator.report.charts import length_label


def runs(frame: pd.DataFrame, key: str) -> str | None:
    """Draw a grid of runs (`queries.runs`). Returns the clicked run's id, or None."""
    rows = frame.to_dict("records")
    table = pd.DataFrame(
        {
            "Run": frame["name"],
            "State": [parts.sign(row["state"], parts.RUN_STATES) for row in rows],
            "Ended": [100 * parts.progress(row) for row in rows],
            "Points": [parts.tally(row) for row in rows],
            "Kind": frame["kind"],
            "Origin": [parts.sign(row["origin"], parts.ORIGINS) for row in rows],
            "Started": frame["created_at"],
            "Took": [took(row) for row in rows],
            "Device": [row["gpu"] or row["host"] or "–" for row in rows],
            "ID": frame["run_id"],
        }
    )
    columns = {
        "Ended": st.column_config.ProgressColumn(
            format="%.0f %%", min_value=0, max_value=100, width="small", help="share of the points that ended"
        ),
        "Started": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm", timezone="UTC", help="UTC"),
        "Points": st.column_config.TextColumn(width="medium"),
    }
    return _clicked(table, [row["run_id"] for row in rows], columns, key)


def points(frame: pd.DataFrame, numbers: pd.DataFrame, quantities: Quantities, key: str) -> str | None:
    """Draw a grid of a run's points with their headline quantities. Returns the clicked point's id, or None.

    Args:
        frame, numbers, quantities: results of `queries.points`, `queries.measurements`, `queries.quantities`.
    """
    rows = frame.to_dict("records")
    measured = {
        (row["point_id"], row["metric"]): parts.number(row["value"], row["unit"]) for row in numbers.to_dict("records")
    }
    stored = set(numbers["metric"])
    shown = {heading(q.legend): q.name for q in quantities if q.role is Role.HEADLINE and q.name in stored}
    own = {in_words(name.removeprefix(MORE)): frame[name] for name in more_columns(frame.columns)}
    table = pd.DataFrame(
        {
            "#": frame["number"],
            "Point": frame["label"],
            "State": [parts.sign(row["state"], parts.POINT_STATES) for row in rows],
            **own,
            **{title: [measured.get((row["point_id"], metric), "") for row in rows] for title, metric in shown.items()},
            "Reason or progress": [again_in_words(row) or row["reason"] or parts.phase(row) for row in rows],
            "Attempt": frame["attempt"],
            "Took": [parts.duration(row["started_at"], row["ended_at"]) for row in rows],
            "Estimate": [parts.size(row["estimate_bytes"]) for row in rows],
            "Route": [parts.route(row["route"]) for row in rows],
        }
    )
    columns = {
        "#": st.column_config.NumberColumn(width=50),
        "Attempt": st.column_config.NumberColumn(width="small"),
        "Reason or progress": st.column_config.TextColumn(width="medium"),
    }
    return _clicked(table, [row["point_id"] for row in rows], columns, key)


def fits(frame: pd.DataFrame, quantities: Quantities, key: str) -> str | None:
    """Draw a grid of fits (`analysis.fits_frame`). Returns the id of the clicked one's run, or None."""
    rows = frame.to_dict("records")
    looks = [series.look(row["implementation"]) for row in rows]
    lengths = [row["lengths"] for row in rows]
    table = pd.DataFrame(
        {
            " ": [look.sign for look in looks],
            "Implementation": frame["implementation"].to_list(),
            "Quantity": [quantities.of(row["metric"]).title for row in rows],
            "Exponent": [row["exponent"] for row in rows],
            "Growth": [row["law"] for row in rows],
            "Rests on": [f"{len(s)}: {length_label(s[0])} to {length_label(s[-1])}" for s in lengths],
            "Local exponents": frame["local_text"].to_list(),
            "Overhead": [
                parts.number(row["overhead"], quantities.of(row["metric"]).unit) if row["overhead"] > 0 else "–"
                for row in rows
            ],
            "Pass": [row["pass"] or "–" for row in rows],
            "Shape": [series.full_shape(row) or "–" for row in rows],
            "Origin": [parts.sign(row["origin"], parts.ORIGINS) for row in rows],
            "Run": frame["run_name"].to_list(),
        }
    )
    columns = {
        " ": st.column_config.TextColumn(width=30, help="colour and mark in the charts"),
        "Exponent": st.column_config.NumberColumn(
            format="%.2f", help="1 is linear, 2 quadratic; none if no power law holds"
        ),
        "Growth": st.column_config.TextColumn(
            width="medium", help="with 95 % interval; in parts if no power law holds"
        ),
        "Local exponents": st.column_config.TextColumn(width="medium", help="slopes over about an octave, at its end"),
        "Overhead": st.column_config.TextColumn(help="constant part, as of launches"),
    }
    return _clicked(table, [row["run_id"] for row in rows], columns, key, looks)


def unfinished(frame: pd.DataFrame, key: str) -> str | None:
    """Draw a grid of points without metrics (`queries.states`). Returns the clicked point's id, or None."""
    rows = frame.to_dict("records")
    table = pd.DataFrame(
        {
            "State": [parts.sign(row["state"], parts.POINT_STATES) for row in rows],
            "Point": frame["label"].to_list(),
            "Why": [row["reason"] or "–" for row in rows],
            "Run": frame["run_name"].to_list(),
        }
    )
    return _clicked(table, [row["point_id"] for row in rows], {"Why": st.column_config.TextColumn(width="large")}, key)


def numbers(frame: pd.DataFrame, key: str) -> str | None:
    """Draw a grid of measurements (`queries.scaling`). Returns the clicked one's point's id, or None."""
    axes = [axis.name for axis in AXES if axis.name in ("implementation", "workload", "pass", "seq_len", "batch")]
    names = ["origin", "run_name", *axes, *more_columns(frame.columns), "metric", "value", "unit"]
    table = frame.loc[:, [*names, "ci_low", "ci_high", "gpu", "point_id"]].reset_index(drop=True)
    return _clicked(table, frame["point_id"].to_list(), {}, key)


def took(run: dict) -> str:
    """Duration of a run, pauses before a resume included and said; a dash for a reported one."""
    if run["origin"] != Origin.MEASURED:
        return "–"
    length = parts.duration(run["created_at"], run["ended_at"])
    return f"{length}, resumed" if run["resumed"] else length


def _clicked(
    table: pd.DataFrame, ids: list[str], columns: dict, key: str, looks: Sequence[series.Look] = ()
) -> str | None:
    """Draw a grid, with the looks' colours in its first column. Returns the id of the row that was clicked, or None."""
    for name in table.columns[[dtype.kind not in "biufM" for dtype in table.dtypes]]:
        table[name] = table[name].map(lambda cell: in_a_line(cell) if isinstance(cell, str) else cell)
    first = table.columns[:1]
    styled = table.style.apply(lambda _: [f"color: {look.color}" for look in looks], subset=first) if looks else table
    event = st.dataframe(
        styled, hide_index=True, on_select="rerun", selection_mode="single-cell", key=key, column_config=columns
    )
    cells = event["selection"]["cells"]
    return ids[cells[0][0]] if cells and cells[0][0] < len(ids) else None


def rows_button(load: Callable[[], str], name: str) -> None:
    """Draw the button that downloads rows as CSV without formulas; `load` makes the text once it is pressed."""
    st.download_button(
        "Rows as CSV",
        data=load,
        file_name=f"{name}.csv",
        mime="text/csv",
        icon=":material/download:",
        on_click="ignore",
    )
