"""Overview page: the running runs, a decision card for each target, the latest runs."""

from __future__ import annotations

import streamlit as st

from dashboard import data, decision, grids, help_pages, parts
from dashboard.address import leave
from jobs.schema.states import Origin, RunState
from orchestrator.errors import UserError
from orchestrator.store import Store

LATEST = 5


@data.explained
def page() -> None:
    store = data.open_store()
    st.title("Overview")
    st.html("<style>[data-testid=stMainBlockContainer] { padding-bottom: 3rem; }</style>")
    counts = data.counts(store)
    if not counts["runs"]:
        help_pages.nothing_yet()
        return
    live = bool(counts["runs_running"])
    if live:
        st.fragment(_going_on, run_every=data.LIVE_SECONDS)(store, seen=counts)
    _decisions(store)
    st.header("Latest runs")
    st.fragment(_runs_table, run_every=data.LIVE_SECONDS if live else data.IDLE_SECONDS)(store, live)
    st.page_link("runs.py", label="All runs", icon=":material/list_alt:")


@data.explained
def _going_on(store: Store, *, seen: dict[str, int]) -> None:
    """Show the running runs and their activity; redraw the whole page when the counts change."""
    if data.counts(store) != seen:
        st.rerun()
    for row in data.runs(store, state=RunState.RUNNING).to_dict("records"):
        with st.container(border=True, gap="xsmall"):
            with st.container(horizontal=True, vertical_alignment="center"):
                st.markdown(
                    f"{parts.badge('running', parts.RUN_STATES)} **{parts.plain(row['name'])}** "
                    f"{parts.code(row['run_id'])}",
                    width="stretch",
                )
                query = {"run": row["run_id"]}
                st.page_link("runs.py", label="Follow this run", icon=":material/open_in_full:", query_params=query)
            st.progress(parts.progress(row), text=f"{parts.tally(row)} of {parts.count(row['points'], 'point')}")
            points = data.points(store, row["run_id"])
            for point in points.loc[points["running"] > 0].to_dict("records"):
                st.caption(parts.doing(point))


def _decisions(store: Store) -> None:
    """Draw a card for each target; wrong rules leave the rest of the page."""
    try:
        decisions, crossings = data.judged(store)
    except UserError as err:
        help_pages.explain(err)
        return
    if crossings:
        decision.pays(crossings)
    for each in decisions:
        decision.show(each)


@data.explained
def _runs_table(store: Store, live: bool) -> None:
    if bool(data.counts(store)["runs_running"]) != live:
        st.rerun()  # a run began or ended: redraw the whole page
    measured = data.runs(store, origin=Origin.MEASURED, limit=LATEST)
    frame = measured if len(measured) else data.runs(store, limit=LATEST)
    chosen = grids.runs(frame, key="latest-runs")
    if chosen is not None:
        leave("runs", run=chosen)


if __name__ == "__main__":
    page()
