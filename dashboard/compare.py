"""Compare page: two runs or commits, cell by cell: what got slower or faster, and how sure that is."""

import pandas as pd
import streamlit as st

from dashboard import data, grids, help_pages, parts
from dashboard.address import known_values
from jobs.schema.quantities import Better
from jobs.schema.states import Origin
from orchestrator.report.charts import drawn
from orchestrator.report.compare import Change, Comparison, summary, tables

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
    runs = data.names(store, Origin.MEASURED)
    if len(runs) < 2:
        help_pages.nothing_yet()
        return
    ids = runs["run_id"].tolist()
    usual_before, usual_after = _newest_pair(runs)
    known_values("before", ids)
    known_values("after", ids)
    left, middle, right = st.columns([3, 3, 2])
    before = left.selectbox("Before", ids, index=usual_before, key="before", bind="query-params")
    after = middle.selectbox("After", ids, index=usual_after, key="after", bind="query-params")
    metrics = data.quantities(store, [before]).names() if before else []
    known_values("metric", metrics)
    usual = metrics.index("time") if "time" in metrics else 0
    metric = right.selectbox("Quantity", metrics, index=usual, key="metric", bind="query-params")
    if not (before and after and metric):
        st.info("The run before has no results.", icon=":material/arrow_upward:")
        return
    _result(data.comparison(store, before, after, metric))


def _newest_pair(runs: pd.DataFrame) -> tuple[int, int]:
    """Places of two runs in a list, newest first, before and after: the newest of one spec, or else of one name."""
    for alike in ("spec_hash", "name"):
        for after, value in enumerate(runs[alike]):
            older = runs[alike].iloc[after + 1 :].tolist()
            if value in older:
                return after + 1 + older.index(value), after
    return 1, 0


def _result(comparison: Comparison) -> None:
    cells, quantity = comparison.cells, comparison.quantity
    if not cells:
        st.info(parts.plain(parts.named(summary(comparison))), icon=":material/help:")
        return
    color, icon = _LOOKS[min((cell.change for cell in cells), key=list(Change).index)]
    st.subheader(f":{color}[:material/{icon}:] {parts.plain(parts.named(summary(comparison)))}")
    table, others = tables(comparison)
    rows = pd.DataFrame(table.rows, columns=list(table.columns))
    where = rows[["implementation", "pass", "shape"]].agg(" ".join, axis=1).str.strip()
    heat = rows.assign(where=where, ratio=[cell.ratio for cell in cells])
    # Cells that differ in batch or dtype alone would lie on one another.
    drawable = heat.dropna(subset=["ratio"])
    if len(drawable) and not any(heat.duplicated(["where", "S"])):
        worst = -_WIDEST if quantity.better is Better.HIGHER else _WIDEST  # red is worse, green better
        lengths = sorted(rows["S"].unique(), key=lambda text: int(text or 0))
        title = f"{quantity.title}: after, divided by before"
        about = {"title": title, "lengths": lengths, "domain": [1 - worst, 1, 1 + worst]}
        grids.chart(drawn("ratios", drawable.to_dict("records"), **about))
    st.dataframe(grids.results_first(table), hide_index=True)
    if others.rows:
        st.subheader(others.title)
        st.dataframe(pd.DataFrame(others.rows, columns=["", "before", "after"]), hide_index=True)


if __name__ == "__main__":
    page()
