"""Results page: NSA's time over that of dense attention and of the best peer, by workload and length."""

import math
from collections.abc import Mapping, Sequence

import streamlit as st

from dashboard import data, grids, help_pages, parts
from dashboard.address import known_values, leave
from orchestrator.judge.growth import short
from orchestrator.report.charts import drawn
from orchestrator.report.results import Cell
from orchestrator.report.series import NSA
from orchestrator.store import Store

DENSE, PEER = "the fastest dense attention", "the best other NSA"


@data.explained
def page() -> None:
    st.title("Results")
    store = data.open_store()
    found = data.results(store)
    if not found:
        help_pages.nothing_yet("No run has measured NSA and dense attention side by side on a GPU yet.")
        return
    left, right = st.columns(2)
    cards = list(dict.fromkeys(cell.crossing.hardware.title for cell in found))
    card = left.segmented_control("Card", cards, default=cards[0], required=True, key="card", bind="query-params")
    found = [cell for cell in found if cell.crossing.hardware.title == card]
    against = right.segmented_control(
        "NSA's time, divided by that of",
        [DENSE, PEER],
        default=DENSE,
        required=True,
        key="against",
        bind="query-params",
    )
    _heat_map(found, to_peer=against == PEER)
    titles = {cell.title: cell for cell in found}
    known_values("cell", list(titles))
    label = "Click a cell, or choose one, for its curve, stages, rates and history"
    if chosen := st.selectbox(label, list(titles), index=None, key="cell", bind="query-params"):
        cell = titles[chosen]
        _behind(store, cell, [each for each in found if each.crossing == cell.crossing])


def _heat_map(found: Sequence[Cell], *, to_peer: bool) -> None:
    crossings = {cell.crossing.name: cell.crossing for cell in found}
    starts = [each.seq_len for each in crossings.values() if each.seq_len is not None]
    rows = []
    for cell in found:
        if (ratio := cell.ratio(to_peer)) is None:
            continue
        other = cell.peers[0] if to_peer else None
        against = f"{other.owner} {parts.number(other.value, 'ms')}" if other else ""
        workload = cell.crossing.title + f"; {cell.crossing.words}" * (not to_peer)
        rows.append(
            {"workload": workload, "S": short(cell.seq_len), "cell": cell.title}
            | {"ratio": ratio, "shade": math.log2(ratio), "nsa": parts.number(cell.nsa["value"], "ms")}
            | {"other": against or f"dense {parts.number(cell.dense['value'], 'ms')}"}
        )
    ratios = [row["ratio"] for row in rows]
    if not rows:
        st.info("No figure of another NSA implementation is known for these workloads.", icon=":material/info:")
        return
    if to_peer:
        span = " to ".join(f"{ratio:.2f}" for ratio in sorted({min(ratios), max(ratios)}))
        st.subheader(f"NSA takes {span} times as long as {PEER}, by workload and S")
    elif len(starts) == len(crossings):
        span = " to ".join(short(round(length)) for length in sorted({min(starts), max(starts)}))
        st.subheader(f"NSA pays from S = {span}, by workload: it takes less time than the fastest dense attention")
    lengths = [short(length) for length in sorted({cell.seq_len for cell in found})]
    title = f"NSA's time / that of {PEER if to_peer else DENSE} (below 1, green: NSA is faster; empty: not measured)"
    clicked = grids.chart(drawn("pays", rows, title=title, lengths=lengths), key=f"pays-{to_peer}", selects="cell")
    if clicked and st.session_state.get("clicked") != clicked:
        st.session_state["clicked"] = st.session_state["cell"] = clicked


def _behind(store: Store, cell: Cell, workload: Sequence[Cell]) -> None:
    curve, stages, roofline = data.behind(store, cell, workload, cell.title + cell.nsa["point_id"])
    st.subheader(f"{parts.plain(cell.title)}: {parts.number(cell.ratio(False))} times dense attention's time")
    rates = {row["implementation"]: row for row in roofline if row["seq_len"] == cell.seq_len}
    times = [(NSA, cell.nsa["value"]), ("dense", cell.dense["value"])]
    times += [(f"{peer.owner} (reported)", peer.value) for peer in cell.peers[:1]]
    grids.table(
        [
            {"": parts.plain(name), "Time": parts.number(time, "ms")} | _rates(rates.get(name, {}))
            for name, time in times
        ]
    )
    left, right = st.columns(2)
    with left:
        grids.chart(drawn("curve", curve, title="Time by length"), height=480)  # a legend of one column is high
    with right:
        if roofline:
            grids.chart(drawn("roofline", roofline, title="TFLOP/s under the card's roofline"), height=480)
    if stages:
        grids.chart(drawn("stages", stages, title="Stages of NSA's call"))
    run_id, point_id = cell.nsa["run_id"], cell.nsa["point_id"]
    with st.container(horizontal=True):
        if st.button("Its history", icon=":material/timeline:"):
            leave("history", name=cell.nsa["run_name"], metric="time", point=point_id)
        query = {"run": run_id, "point": point_id}
        st.page_link("runs.py", label="Its point", icon=":material/straighten:", query_params=query)
        st.page_link("runs.py", label="Its run", icon=":material/list_alt:", query_params={"run": run_id})


def _rates(row: Mapping[str, float]) -> dict[str, str]:
    """Rates that a call reached, beside the card's peaks."""
    cells = {}
    for rate, unit in (("tflops", "TFLOP/s"), ("gbs", "GB/s")) if row else ():
        peak = row[f"peak_{rate}"]
        cells[f"{unit} of the least work"] = f"{row[rate]:.4g}, {row[rate] / peak:.1%} of the card's {peak:,.0f}"
    return cells


if __name__ == "__main__":
    page()
