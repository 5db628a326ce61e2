"""Clickable grids of runs and points, and the button that downloads rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import parts
from jobs.schema.axes import AXES, MORE, more_columns
from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import Quantities, Role, in_words
from jobs.schema.states import Origin, again_in_words, phase_in_words, reason_in_words, run_in_words
from orchestrator.report import series
from orchestrator.report.charts import Chart, length_label
from orchestrator.report.runs import Note
from orchestrator.report.series import NSA, named
from orchestrator.report.table import Table

_ROWS = 20  # of a grid that are seen at once


def runs(frame: pd.DataFrame, notes: Mapping[str, Note], key: str) -> str | None:
    """Draw a grid of runs (`queries.runs`) with the notes on them, by id. Returns the clicked run's id, or None."""
    rows = frame.to_dict("records")
    cells = [
        {
            "Run": row["name"],
            "State": parts.sign(row["state"], parts.RUN_STATES) + run_in_words(row).removeprefix(row["state"]),
            "Ended": 100 * parts.progress(row),
            "Points": parts.tally(row),
            "Headline figure": (note := notes[row["run_id"]]).figure,
            "Differs from the one below": note.differs,
            "Started": row["created_at"],
            "Took": took(row),
            "Commit": note.commit,
            "Device": row["gpu"] or row["host"] or "–",
            "Person": row["person"] or "",
            "Kind": row["kind"],
            "Origin": parts.sign(row["origin"], parts.ORIGINS),
            "ID": row["run_id"],
        }
        for row in rows
    ]
    ended = st.column_config.ProgressColumn(
        format="%.0f %%", min_value=0, max_value=100, width="small", help="share of the points that ended"
    )
    zone = str(parts.zone())
    started = st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm", timezone=zone, help=zone)
    columns: dict[str, Any] = {"Ended": ended, "Started": started}
    columns |= {"Run": st.column_config.TextColumn(width=130), "State": st.column_config.TextColumn(width=150)}
    columns["Headline figure"] = st.column_config.TextColumn(width=330)
    return _clicked(cells, [row["run_id"] for row in rows], columns, key)


def results_first(table: Table) -> pd.DataFrame:
    """Rows of a table of results with these first: long shapes would push them out of sight."""
    frame = pd.DataFrame(table.rows, columns=list(table.columns)).replace("nsa", NSA)
    first = [name for name in ("result", "ratio", "before", "after") if name in frame]
    return frame.reindex(columns=[*first, *frame.columns.drop(first)])


def points(frame: pd.DataFrame, numbers: pd.DataFrame, quantities: Quantities, key: str) -> str | None:
    """Draw a grid of a run's points (`queries.points`) with their headline quantities (`queries.measurements`).
    Returns the clicked point's id, or None."""
    rows, stored = frame.to_dict("records"), set(numbers["metric"])
    measured = {
        (row["point_id"], row["metric"]): parts.number(row["value"], row["unit"]) for row in numbers.to_dict("records")
    }
    headlines = [quantity for quantity in quantities if quantity.role is Role.HEADLINE and quantity.name in stored]
    shown = {each.legend[:1].upper() + each.legend[1:]: each.name for each in headlines}
    own = {in_words(name.removeprefix(MORE)): name for name in more_columns(frame.columns)}
    cells = [
        {
            "#": row["number"],
            "Point": named(row["label"]),
            "State": parts.sign(row["state"], parts.POINT_STATES),
            **{title: row[name] for title, name in own.items()},
            **{title: measured.get((row["point_id"], metric), "") for title, metric in shown.items()},
            "Reason or progress": again_in_words(row) or reason_in_words(row) or phase_in_words(row),
            "Attempt": row["attempt"],
            "Took": parts.duration(row["started_at"], row["ended_at"]),
            "Estimate": parts.size(row["estimate_bytes"]),
            "Route": parts.route(row["route"]),
        }
        for row in rows
    ]
    # A column that says nothing of any point takes no room from the others.
    blank = [name for name in cells[0] if all(cell[name] in ("", "–", None) for cell in cells)]
    cells = [{name: value for name, value in cell.items() if name not in blank} for cell in cells]
    columns = {
        "#": st.column_config.NumberColumn(width=50),
        "Attempt": st.column_config.NumberColumn(width="small"),
        "Reason or progress": st.column_config.TextColumn(width="large"),
    }
    return _clicked(cells, [row["point_id"] for row in rows], columns, key)


def fits(frame: pd.DataFrame, quantities: Quantities, key: str) -> str | None:
    """Draw a grid of fits (`analysis.fits_frame`). Returns the id of the clicked one's run, or None."""
    rows = frame.to_dict("records")
    looks = [series.look(row["implementation"]) for row in rows]
    cells = []
    for row, look in zip(rows, looks, strict=True):
        quantity, lengths = quantities.of(row["metric"]), row["lengths"]
        cells.append(
            {
                " ": look.sign,
                "Implementation": named(row["implementation"]),
                "Quantity": quantity.title,
                "Exponent": row["exponent"],
                "Growth": row["law"],
                "Rests on": f"{len(lengths)}: {length_label(lengths[0])} to {length_label(lengths[-1])}",
                "Local exponents": ", ".join(map(str, row["local"])),
                "Overhead": parts.number(row["overhead"], quantity.unit) if row["overhead"] > 0 else "–",
                "Pass": row["pass"] or "–",
                "Shape": series.full_shape(row) or "–",
                "Origin": parts.sign(row["origin"], parts.ORIGINS),
                "Run": row["run_name"],
            }
        )
    text, law = st.column_config.TextColumn, "1 is linear, 2 quadratic; none if no power law holds"
    columns = {
        " ": text(width=30, help="colour and mark in the charts"),
        "Exponent": st.column_config.NumberColumn(format="%.2f", help=law),
        "Growth": text(width="medium", help="with 95 % interval; in parts if no power law holds"),
        "Local exponents": text(width="medium", help="slopes over about an octave, at its end"),
        "Overhead": text(help="constant part, as of launches"),
    }
    return _clicked(cells, [row["run_id"] for row in rows], columns, key, looks)


def unfinished(frame: pd.DataFrame, key: str) -> str | None:
    """Draw a grid of points without metrics (`queries.states`). Returns the clicked point's id, or None."""
    cells = [
        {"State": parts.sign(row["state"], parts.POINT_STATES), "Point": named(row["label"])}
        | {"Why": row["reason"] or "–", "Run": row["run_name"]}
        for row in frame.to_dict("records")
    ]
    return _clicked(cells, frame["point_id"].to_list(), {"Why": st.column_config.TextColumn(width="large")}, key)


def numbers(frame: pd.DataFrame, key: str) -> str | None:
    """Draw a grid of measurements (`queries.scaling`). Returns the clicked one's point's id, or None."""
    axes = [axis.name for axis in AXES if axis.name in ("implementation", "workload", "pass", "seq_len", "batch")]
    names = ["origin", "run_name", *axes, *more_columns(frame.columns), "metric", "value", "unit"]
    table = frame.loc[:, [*names, "ci_low", "ci_high", "gpu", "point_id"]].reset_index(drop=True).replace("nsa", NSA)
    return _clicked(table, frame["point_id"].to_list(), {}, key)


def table(rows: Sequence[Mapping[str, object]]) -> None:
    """Draw a table whose cells are Markdown."""
    st.table(pd.DataFrame(rows), border="horizontal", hide_index=True)


def facts(values: Mapping[str, str]) -> None:
    """Draw names with their values, which are Markdown."""
    rows = [{"": name, " ": value} for name, value in values.items()]
    st.table(pd.DataFrame(rows), border="horizontal", hide_index=True, hide_header=True)


def chart(
    chart: Chart, key: str | None = None, height: int = 330, alt: str | None = None, selects: str | None = None
) -> Any:
    """Draw a chart with its title and legend, so high in pixels unless it has a height of its own.

    Returns the clicked row's value in the field `selects`, after which the chart's selection is called, or None.
    """
    shown = "content" if chart.spec.keys() & {"facet", "height"} else height
    rows, alt = pd.DataFrame(chart.rows), alt or chart.title
    if selects is None:
        st.vega_lite_chart(rows, chart.spec, height=shown, key=key, alt=alt)
        return None
    event = st.vega_lite_chart(rows, chart.spec, height=shown, key=key, alt=alt, on_select="rerun")
    return next((row.get(selects) for row in event["selection"].get(selects, ())), None)


def took(run: dict) -> str:
    """Duration of a run, pauses before a resume included and said; a dash for a reported one."""
    if run["origin"] != Origin.MEASURED:
        return "–"
    length = parts.duration(run["created_at"], run["ended_at"])
    return f"{length}, resumed" if run["resumed"] else length


def _clicked(
    cells: list[dict[str, Any]] | pd.DataFrame,
    ids: list[str],
    columns: dict,
    key: str,
    looks: Sequence[series.Look] = (),
) -> str | None:
    """Draw a grid, with the looks' colours in its first column. Returns the id of the row that was clicked, or None."""
    table = pd.DataFrame(cells)
    for name in table.columns[[dtype.kind not in "biufM" for dtype in table.dtypes]]:
        table[name] = table[name].map(lambda cell: in_a_line(cell) if isinstance(cell, str) else cell)
    first = table.columns[:1]
    styled = table.style.apply(lambda _: [f"color: {look.color}" for look in looks], subset=first) if looks else table
    event = st.dataframe(
        styled, height=38 + 35 * min(len(table), _ROWS), hide_index=True, on_select="rerun",
        selection_mode="single-cell", key=key, column_config=columns,
    )  # fmt: skip
    clicked = event["selection"]["cells"]
    return ids[clicked[0][0]] if clicked and clicked[0][0] < len(ids) else None


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
