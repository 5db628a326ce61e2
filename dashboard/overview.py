"""Overview page: verdicts on the targets with their rules, running and latest runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pandas as pd
import streamlit as st

from dashboard import data, grids, help_pages, parts
from orchestrator.errors import UserError
from orchestrator.states import Origin, PointState, Result, RunState
from orchestrator.store import Store

if TYPE_CHECKING:
    from orchestrator.gates.verdicts import RuleVerdict, TargetVerdict

LATEST = 8


@data.page
def page(store: Store) -> None:
    st.title("Overview")
    counts = data.counts(store)
    if not counts["runs"]:
        help_pages.nothing_yet()
        return
    live = bool(counts["runs_running"])
    if live:
        st.fragment(_going_on, run_every=data.LIVE_SECONDS)(store, seen=counts)
    _verdicts(store)
    _latest_runs(store, live)
    _counts(counts)


@data.part
def _going_on(store: Store, *, seen: dict[str, int]) -> None:
    """Show the running runs and their activity; redraw the whole page when the counts change."""
    if data.counts(store) != seen:
        st.rerun()
    for row in data.runs(store, state=RunState.RUNNING).to_dict("records"):
        with st.container(border=True):
            st.markdown(
                f"{parts.badge('running', parts.RUN_STATES)} **{parts.plain(row['name'])}** {parts.code(row['run_id'])}"
            )
            st.progress(parts.progress(row), text=f"{parts.tally(row)} of {parts.count(row['points'], 'point')}")
            points = data.points(store, row["run_id"])
            for point in points.loc[points["state"] == PointState.RUNNING].to_dict("records"):
                st.caption(parts.doing(point))
            query = {"run": row["run_id"]}
            st.page_link("runs.py", label="Follow this run", icon=":material/open_in_full:", query_params=query)


def _verdicts(store: Store) -> None:
    st.header("Go or no-go", help="Judged on what is stored now. A rule without evidence is UNKNOWN, never a pass.")
    try:
        verdicts = data.verdicts(store)
    except UserError as err:
        help_pages.explain(err)
        return
    for verdict in verdicts:
        _target(verdict)


def _target(verdict: TargetVerdict) -> None:
    measured = any(rule.value is not None for rule in verdict.rules)
    with st.container(border=True):
        st.markdown(f"#### {parts.badge(verdict.result, parts.RESULTS)} {parts.plain(verdict.title)}")
        if len(verdict.commits) > 1:
            st.caption(parts.plain(f"The rules rest on different commits: {', '.join(verdict.commits)}"))
        with st.expander(_summary(verdict.rules), expanded=measured, icon=":material/rule:"):
            table = pd.DataFrame([_rule(rule) for rule in verdict.rules])
            st.table(table, border="horizontal", hide_index=True)


def _summary(rules: list[RuleVerdict]) -> str:
    found = Counter(rule.result for rule in rules)
    named = ((Result.NO_GO, "NO-GO"), (Result.UNKNOWN, "without evidence"), (Result.GO, "GO"))
    return f"{parts.count(len(rules), 'rule')}: " + ", ".join(f"{found[r]} {name}" for r, name in named if found[r])


def _rule(rule: RuleVerdict) -> dict[str, str]:
    return {
        "Result": parts.badge(rule.result, parts.RESULTS),
        "Rule": parts.plain(rule.title),
        "Value": parts.number(rule.value, rule.unit),
        "Bound": parts.bound(rule),
        "Margin": parts.number(rule.margin, rule.unit),
        "Why": parts.plain(rule.reason),
        "Evidence": parts.evidence(rule.evidence),
    }


def _latest_runs(store: Store, live: bool) -> None:
    st.header("Latest runs")
    st.fragment(_runs_table, run_every=data.refresh_seconds(live))(store, live)
    st.page_link("runs.py", label="All runs", icon=":material/list_alt:")


@data.part
def _runs_table(store: Store, live: bool) -> None:
    if bool(data.counts(store)["runs_running"]) != live:
        st.rerun()  # a run began or ended: redraw the whole page
    measured = data.runs(store, origin=Origin.MEASURED, limit=LATEST)
    frame = measured if len(measured) else data.runs(store, limit=LATEST)
    chosen = grids.runs(frame, key="latest-runs")
    if chosen is not None:
        st.switch_page("runs.py", query_params={"run": chosen})


def _counts(counts: dict[str, int]) -> None:
    st.header("In this database")
    failed = sum(counts[f"points_{state}"] for state in PointState if state.failed)
    with st.container(horizontal=True):
        st.metric("Measured runs", counts["runs_measured"], border=True)
        st.metric("Reported by others", counts["runs_reported"], border=True)
        st.metric("Points ok", counts["points_ok"], border=True)
        st.metric("Points failed", failed, border=True)
        st.metric("Points skipped", counts["points_skipped"], border=True, help="predicted not to fit")
        st.metric("Numbers stored", counts["metrics"], border=True)


if __name__ == "__main__":
    page()
