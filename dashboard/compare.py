"""Compare page: two runs or commits, cell by cell: what got slower or faster, and how sure that is."""

from __future__ import annotations

import math

import pandas as pd
import streamlit as st

from dashboard import data, grids, help_pages, parts
from dashboard.address import known_values
from jobs.schema.quantities import Better, Quantity
from jobs.schema.states import Origin
from orchestrator.report.charts import Chart, drawn
from orchestrator.report.compare import Change, Compared, Comparison, coordinates, summary, word

_LOOKS = {  # colour and icon
    Change.FAILED: ("red", "error"),
    Change.WORSE: ("red", "trending_down"),
    Change.BETTER: ("green", "trending_up"),
    Change.AMBIGUOUS: ("orange", "help"),
    Change.SAME: ("gray", "equal"),
    Change.LACKING: ("gray", "block"),
}
_WIDEST = 0.1  # a ratio this far from 1 has the full colour


@data.explained
def page() -> None:
    st.title("Compare")
    store = data.open_store()
    runs = data.runs(store, origin=Origin.MEASURED)
    if len(runs) < 2:
        help_pages.nothing_yet()
        return
    ids = runs["run_id"].tolist()
    newest = runs.iloc[0]
    alike = [row["run_id"] for row in runs.to_dict("records")[1:] if row["name"] == newest["name"]]
    known_values("before", ids)
    known_values("after", ids)
    left, middle, right = st.columns([3, 3, 2])
    before = left.selectbox("Before", ids, index=ids.index(alike[0]) if alike else 1, key="before", bind="query-params")
    after = middle.selectbox("After", ids, index=0, key="after", bind="query-params")
    metrics = data.quantities(store, [before]).names() if before else []
    known_values("metric", metrics)
    usual = metrics.index("time") if "time" in metrics else 0
    metric = right.selectbox("Quantity", metrics, index=usual, key="metric", bind="query-params")
    if not (before and after and metric):
        st.info("The run before has no results.", icon=":material/arrow_upward:")
        return
    _result(data.comparison(store, before, after, metric))


def _result(comparison: Comparison) -> None:
    cells, quantity = comparison.cells, comparison.quantity
    color, icon = _LOOKS[min((cell.change for cell in cells), key=list(Change).index)]
    st.subheader(f":{color}[:material/{icon}:] {parts.plain(summary(comparison))}")
    rows = pd.DataFrame([_row(cell, quantity) for cell in cells])
    # Cells that differ in batch or dtype alone would lie on one another.
    if any(not math.isnan(cell.ratio) for cell in cells) and not rows.duplicated(["where", "S"]).any():
        grids.chart(_heat(rows, f"{quantity.title}: after, divided by before", quantity.better))
    st.dataframe(
        rows.drop(columns=["where", "label"]),
        hide_index=True,
        column_config={
            "ratio": st.column_config.NumberColumn(format="%.3f"),
            "from": st.column_config.NumberColumn(format="%.3f", help="95 % interval of the ratio"),
            "to": st.column_config.NumberColumn(format="%.3f"),
        },
    )
    if comparison.differences:
        st.subheader("What else differs")
        table = [{"": name, "before": one, "after": two} for name, (one, two) in comparison.differences.items()]
        st.dataframe(pd.DataFrame(table), hide_index=True)


def _row(cell: Compared, quantity: Quantity) -> dict[str, object]:
    where = coordinates(cell.cell)
    ratio, low, high = (None if math.isnan(each) else each for each in (cell.ratio, cell.low, cell.high))
    return {
        **where,
        "where": " ".join(where[name] for name in ("implementation", "pass", "shape") if where[name]),
        "label": f"{cell.ratio:.2f}" if ratio else "",
        "before": parts.number(cell.first.median, quantity.unit),
        "after": parts.number(cell.other.median, quantity.unit),
        "ratio": ratio,
        "from": low,
        "to": high,
        "result": word(cell.change, quantity) + (f"; {cell.note}" if cell.note else ""),
    }


def _heat(rows: pd.DataFrame, title: str, better: Better | None) -> Chart:
    """Cells by implementation, pass and shape, and by length; red is worse, green better."""
    lengths = sorted(rows["S"].unique(), key=lambda text: int(text or 0))
    worst = -_WIDEST if better is Better.HIGHER else _WIDEST
    return drawn("ratios", rows.to_dict("records"), title=title, lengths=lengths, domain=[1 + worst, 1 - worst])


if __name__ == "__main__":
    page()
