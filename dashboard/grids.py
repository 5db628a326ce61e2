"""Grids of runs and points that open what is clicked."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from dashboard import parts
from orchestrator.states import Origin


def runs(frame: pd.DataFrame, key: str) -> str | None:
    """A grid of runs (`queries.runs`); the id of the one that was clicked."""
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
    return _clicked(table, frame["run_id"], columns, key)


def points(frame: pd.DataFrame, key: str) -> str | None:
    """A grid of a run's points (`queries.points`); the id of the one that was clicked."""
    rows = frame.to_dict("records")
    table = pd.DataFrame(
        {
            "#": frame["number"],
            "Point": frame["label"],
            "State": [parts.sign(row["state"], parts.POINT_STATES) for row in rows],
            "Reason, or what it is doing": [row["reason"] or parts.phase(row) for row in rows],
            "Attempt": frame["attempt"],
            "Took": [parts.duration(row["started_at"], row["ended_at"]) for row in rows],
            "Estimate": [parts.size(row["estimate_bytes"]) for row in rows],
            "Route": [parts.route(row["route"]) for row in rows],
        }
    )
    columns = {
        "#": st.column_config.NumberColumn(width=50),
        "Attempt": st.column_config.NumberColumn(width="small"),
        "Reason, or what it is doing": st.column_config.TextColumn(width="large"),
    }
    return _clicked(table, frame["point_id"], columns, key)


def _took(run: dict) -> str:
    """How long a run took; of a reported one nobody knows."""
    measured = run["origin"] == Origin.MEASURED
    return parts.duration(run["created_at"], run["ended_at"]) if measured else "–"


def _clicked(table: pd.DataFrame, ids: pd.Series, columns: dict, key: str) -> str | None:
    event = st.dataframe(
        table, hide_index=True, on_select="rerun", selection_mode="single-row", key=key, column_config=columns
    )
    rows = event["selection"]["rows"]
    return str(ids.iloc[rows[0]]) if rows and rows[0] < len(ids) else None
