"""History page: a cell over commits and time, and the changes of all cells that runs of a name measured."""

from collections import Counter
from contextlib import suppress

import pandas as pd
import streamlit as st

from dashboard import data, grids, help_pages, parts
from dashboard.address import known_values, leave
from jobs.schema.quantities import Quantity
from jobs.schema.states import Origin
from orchestrator.errors import UserError
from orchestrator.report import series
from orchestrator.report.charts import drawn
from orchestrator.report.history import History, all_changes, changes_table, differing, readings_table, result
from orchestrator.store import Store


@data.explained
def page() -> None:
    st.title("History")
    store = data.open_store()
    runs = data.names(store, Origin.MEASURED)
    if len(runs) < 2:
        help_pages.nothing_yet()
        return
    counted = Counter(str(name) for name in runs["name"])  # the newest first
    names = [name for name, count in counted.items() if count > 1]
    known_values("name", names)
    left, right = st.columns([3, 2])
    name = left.selectbox("Runs named", names, index=_usual(store, names), key="name", bind="query-params")
    metrics = data.quantities(store, runs.loc[runs["name"] == name, "run_id"].tolist()).names() if name else []
    known_values("metric", metrics)
    usual = metrics.index("time") if "time" in metrics else 0
    metric = right.selectbox("Quantity", metrics, index=usual, key="metric", bind="query-params")
    if not (name and metric):
        st.info("No two runs of one name have results: there is no history yet.", icon=":material/timeline:")
        return
    quantity = data.quantities(store).of(metric)
    try:
        found = data.histories(store, metric, name)
    except UserError:
        st.info("No two of these runs measured the same cell: it has no history yet.", icon=":material/timeline:")
        return
    changes = all_changes(found)
    table = changes_table(found, quantity)
    st.subheader(parts.plain(table.note))
    clicked = None
    if table.rows:
        st.caption("Click a row for its cell; :material/compare_arrows: below compares the two runs of its change.")
        event = st.dataframe(
            grids.results_first(table),
            hide_index=True, on_select="rerun", selection_mode="single-row", key=f"changes-{name}-{metric}",
        )  # fmt: skip
        clicked = next((changes[row] for row in event["selection"]["rows"] if row < len(changes)), None)
    cells = [parts.named(history.label) for history in found]
    known_values("cell", cells)
    linked = next(
        (each for each in found if st.query_params.get("point") in {one.point_id for one in each.readings}), None
    )
    first = clicked[0] if clicked else linked or (changes[0][0] if changes else None)
    if clicked and st.session_state.get("shown") != (shown := (name, metric, clicked[1])):
        st.session_state["shown"], st.session_state["cell"] = shown, parts.named(clicked[0].label)
    index = cells.index(parts.named(first.label)) if first else 0
    cell = st.selectbox("Cell", cells, index=index, key="cell", bind="query-params")
    if cell:
        _cell(found[cells.index(cell)], quantity)


def _usual(store: Store, names: list[str]) -> int:
    """The place of the first name whose runs measured the time of a cell twice; 0 without."""
    for place, name in enumerate(names):
        with suppress(UserError):
            data.histories(store, "time", name)
            return place
    return 0


def _cell(history: History, quantity: Quantity) -> None:
    changes = {change.after.run_id: change for change in history.changes}
    rows = []
    for before, reading in zip((None, *history.readings), history.readings, strict=False):
        change = changes.get(reading.run_id)
        rows.append(
            {"reading": f"{reading.commit} · {parts.moment(reading.at, '%Y-%m-%d %H:%M:%S')}", "commit": reading.commit}
            | {"run": reading.run_id, "value": reading.value, "p10": reading.p10, "p90": reading.p90}
            | {"else": differing(before, reading) if before else "", "change": change and result(change, quantity)}
            | {"result": "" if change is None else "may be noise" if change.doubt else change.change.value}
        )
    color = series.look(dict(history.cell).get("implementation")).color
    title = f"{quantity.title}: {history.label}"
    order = [row["reading"] for row in rows]
    grids.chart(drawn("history", rows, title=title, unit=quantity.unit, color=color, order=order), height=420)
    st.caption(
        "Bars are p10 – p90; dashed lines mark another driver, toolchain, card or route. In the order of the commits."
    )
    for change in history.changes[::-1]:  # the newest first
        about = f"{change.before.commit} → {change.after.commit}: {change.ratio:.3f} {result(change, quantity)}"
        ids = (change.before.run_id, change.after.run_id)
        if st.button(
            about, icon=":material/compare_arrows:", key=f"compare-{'-'.join(ids)}", help="compare the two runs"
        ):
            leave("compare", before=ids[0], after=ids[1], metric=quantity.name)
    table = readings_table(history, quantity, parts.zone())
    st.dataframe(pd.DataFrame(table.rows, columns=list(table.columns)), hide_index=True)


if __name__ == "__main__":
    page()
