"""Clickable grids of runs and points."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from dashboard import parts
from jobs.axes import MORE, more_columns
from jobs.quantities import Quantities, Role
from orchestrator.states import Origin


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
            "Took": [_took(row) for row in rows],
            "Device": [row["gpu"] or row["host"] or "–" for row in rows],
            "Id": frame["run_id"],
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
    shown = {q.legend.capitalize(): q.name for q in quantities if q.role is Role.HEADLINE and q.name in stored}
    own = {name.removeprefix(MORE).capitalize(): frame[name] for name in more_columns(frame.columns)}
    table = pd.DataFrame(
        {
            "#": frame["number"],
            "Point": frame["label"],
            "State": [parts.sign(row["state"], parts.POINT_STATES) for row in rows],
            **own,
            **{title: [measured.get((row["point_id"], metric), "") for row in rows] for title, metric in shown.items()},
            "Reason or progress": [row["reason"] or parts.phase(row) for row in rows],
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


def _took(run: dict) -> str:
    """Duration of a run; a dash for a reported one."""
    measured = run["origin"] == Origin.MEASURED
    return parts.duration(run["created_at"], run["ended_at"]) if measured else "–"


def _clicked(table: pd.DataFrame, ids: list[str], columns: dict, key: str) -> str | None:
    event = st.dataframe(
        table, hide_index=True, on_select="rerun", selection_mode="single-row", key=key, column_config=columns
    )
    rows = event["selection"]["rows"]
    return ids[rows[0]] if rows and rows[0] < len(ids) else None
