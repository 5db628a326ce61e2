"""Scaling page: memory, time and throughput against sequence length, with fitted exponents; ours beside reported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
import streamlit as st

from dashboard import choice as choosing
from dashboard import data, grids, help_pages, parts
from dashboard.address import Address, leave
from dashboard.choice import MEMORY, TOGETHER, Choice
from jobs.schema.plain_text import for_html
from jobs.schema.quantities import AGAINST_LENGTH, Quantities, Quantity
from jobs.schema.states import FAILED, Origin, PointState
from orchestrator.judge.branches import BranchShares, shares_frame, take_overs
from orchestrator.report import charts, series
from orchestrator.report.scaling_chart import drawable, scaling_chart
from orchestrator.store import Store

CHART_HEIGHT = 380  # pixels
GROWTH = (
    "Asymptotic exponent p of value = overhead + c · S^p per sequence, on the longest range of lengths, up to the "
    "longest, on which the law holds (one on which it is exact comes first). Paler points are outside of it. A local "
    "exponent is the slope between neighbouring lengths."
)
NO_NUMBER = (*FAILED, PointState.SKIPPED, PointState.CANCELLED)
_NAME = 300  # characters shown of a name in a legend
_LEGEND = "display: flex; flex-wrap: wrap; gap: 0.2rem 1.25rem; font-size: 0.875rem"
_ENTRY = "display: flex; align-items: baseline; gap: 0.4rem; overflow-wrap: anywhere"
_MARK = "width: 1rem; flex: none; text-align: center; font-size: 1.15rem; line-height: 1"


@data.explained
def page() -> None:
    store = data.open_store()
    runs = data.runs(store)
    if runs.empty:
        st.title("Scaling")
        help_pages.nothing_yet()
        return
    address = Address()
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.title("Scaling", width="content")
        with st.popover("Runs and filters", icon=":material/tune:", width="content"):
            choice = choosing.choose(store, runs, address)
    address.tell()
    if not choice.run_ids:
        st.info("Choose a run under *Runs and filters*.", icon=":material/arrow_upward:")
        return
    states = data.states(store, run_ids=choice.run_ids)
    if _waiting(states):
        st.fragment(_follow, run_every=data.LIVE_SECONDS)(store, choice.run_ids, seen=_waiting(states))
    _results(store, choice, states)


def _waiting(states: pd.DataFrame) -> int:
    """Number of pending and running points."""
    return len(states.loc[states["state"].isin([PointState.PENDING, PointState.RUNNING])])


@data.explained
def _follow(store: Store, run_ids: Sequence[str], *, seen: int) -> None:
    """Show the progress of live runs, and redraw the page when a point has ended."""
    if _waiting(data.states(store, run_ids=run_ids)) != seen:
        st.rerun()
    st.info(f"Still measuring, {parts.count(seen, 'point')} to go; this page follows.", icon=":material/autorenew:")
    for run_id in run_ids:
        points = data.points(store, run_id)
        for point in points.loc[points["running"] > 0].to_dict("records"):
            st.caption(parts.doing(point))


def _results(store: Store, choice: Choice, states: pd.DataFrame) -> None:
    rows = choice.select(data.scaling(store, run_ids=choice.run_ids))
    fits = choice.select(data.fits(store, choice.run_ids))
    if rows.empty:
        text = "No finished point fits this choice yet."
        if PointState.OK in set(choice.select(states)["state"]):
            text = "The finished points of this choice have no numbers against a sequence length; "
            text += "their runs' pages have all."
        st.info(text, icon=":material/filter_alt_off:")
    else:
        quantities = data.quantities(store, choice.run_ids)
        panels = _panels(rows, choice.layout, quantities)
        _draw(panels[:2], fits)
        _growth(fits, quantities)
        if shares := data.branches(store, choice.run_ids):
            selected = choice.select(pd.DataFrame([one.series for one in shares]))
            _branches([shares[index] for index in selected.index])
        _draw(panels[2:], fits)
    _unfinished(choice.select(states))
    if not rows.empty:
        _rows(store, choice.run_ids, rows)


Panel = tuple[str, Quantity, pd.DataFrame]  # title, quantity and rows of a chart


def _panels(rows: pd.DataFrame, layout: str, quantities: Quantities) -> list[Panel]:
    """Charts, one per quantity: memory and time first, ours before reported ones, or both in the same chart."""
    drawn = [quantity.name for quantity in quantities if quantity.plot in AGAINST_LENGTH]
    memory = [name for name in MEMORY if name in drawn]
    panels: list[Panel] = []
    for origin in [None] if layout == TOGETHER else [Origin.MEASURED, Origin.REPORTED]:
        own = rows if origin is None else rows.loc[rows["origin"] == origin]
        for names in (memory, *([name] for name in drawn if name not in MEMORY)):
            stored = [quantities.of(name) for name in names if name in set(own["metric"])]
            if origin is None:
                panels += [(quantity.title, quantity, own) for quantity in stored[:2]]
            elif stored:
                panels.append((f"{'Memory' if names is memory else stored[0].title}, {origin}", stored[0], own))
    return panels


def _draw(panels: Sequence[Panel], fits: pd.DataFrame) -> None:
    """Draw charts, two beside each other."""
    for first in range(0, len(panels), 2):
        pair = panels[first : first + 2]
        for column, panel in zip(st.columns(min(2, len(panels)), gap="medium"), pair, strict=False):
            with column:
                title, quantity, shown = panel
                _panel(title, quantity, shown, fits)


def _panel(title: str, quantity: Quantity, rows: pd.DataFrame, fits: pd.DataFrame) -> None:
    st.subheader(parts.plain(title))
    shown = drawable(rows, quantity)
    if shown.empty:
        st.caption("A logarithmic axis can show none of the values, such as zero.")
        return
    st.caption(_what(shown))
    chart, legend = scaling_chart(shown, fits, quantity, height=CHART_HEIGHT, legend=False)
    st.altair_chart(chart, alt=f"{title}: {quantity.title} against sequence length")
    show_legend(legend)


def show_legend(entries: Iterable[tuple[str, series.Look]]) -> None:
    """Draw each series' mark and name as text of the page, where no name is cut."""
    html = ""
    for name, look in entries:
        mark = f'<span style="{_MARK}; color: {look.color}">{look.sign}</span>'
        html += f'<span style="{_ENTRY}">{mark}<span style="opacity: 0.8">{for_html(name, _NAME)}</span></span>'
    st.html(f'<div class="legend" style="{_LEGEND}">{html}</div>')


def _what(rows: pd.DataFrame) -> str:
    """Common properties of a chart's points: run, workload, pass, dtype, hardware."""
    texts = []
    for name in ("run_name", "workload", "pass", "dtype", "gpu"):
        found = sorted({value for value in rows[name] if isinstance(value, str)})
        texts += [", ".join(found)] if 0 < len(found) <= 3 else []
    on_cpu = set(rows["device"]) == {"cpu"}
    return parts.plain(" · ".join([*texts, "CPU"] if on_cpu else texts))


def _growth(fits: pd.DataFrame, quantities: Quantities) -> None:
    """Show the fitted exponents as a grid and as charts, with the local ones between neighbouring lengths."""
    st.header("How fast cost grows", help=GROWTH)
    if fits.empty:
        st.caption("An exponent needs three sequence lengths of one implementation; there are not that many yet.")
        return
    ordered = fits.sort_values(["origin", "metric", "implementation", "run_id"])
    with_extra = list(
        ordered.loc[ordered["metric"] == MEMORY[0], "run_id"]
    )  # one kind of memory per run; the grid: all
    shown = ordered.loc[~(ordered["metric"].isin(MEMORY[1:]) & ordered["run_id"].isin(with_extra))]
    left, right = st.columns(2, gap="medium")
    with left:
        chart = charts.exponent_chart(shown, quantities)
        st.altair_chart(chart, alt="Fitted exponents beside linear and quadratic growth")
    with right:
        times = shown.loc[~shown["metric"].isin(MEMORY)]
        bends = times.loc[times["metric"] == times["metric"].iloc[0]] if len(times) else shown
        chart, legend = charts.local_chart(bends, quantities)
        st.altair_chart(chart, alt="Local exponents against sequence length, beside linear and quadratic growth")
        show_legend(legend)
    st.subheader("Fitted exponents")
    st.caption("Click a row to open its run.")
    others = ordered.loc[~ordered.index.isin(shown.index)]  # further kinds of memory
    chosen = grids.fits(pd.concat([shown, others]), quantities, key="fits")
    if chosen is not None:
        leave("runs", run=chosen)


def _branches(shares: Sequence[BranchShares]) -> None:
    """Show each branch's share of the sparse attention's time, and where the compressed branch takes over."""
    if not shares:
        return
    st.header("Share of each branch", help="Device time of the operator's stages, forward and backward")
    taken = take_overs(shares)
    identities = [{**one.series, "metric": "stages"} for one in taken]
    names = series.labels(identities, Quantities())
    for one, identity in zip(taken, identities, strict=True):
        title = names[series.key(identity)]
        left, right = st.columns(2, gap="medium")
        own = shares_frame([share for share in shares if share.series == one.series])
        with left:
            chart, legend = charts.branch_chart(own)
            st.altair_chart(chart, alt=f"{title}: share of each branch against sequence length")
            show_legend(legend)
        right.subheader(parts.plain(title))
        right.markdown(parts.plain(one.sentence))


def _unfinished(states: pd.DataFrame) -> None:
    """Show a grid of points without metrics; in a chart they would look like measurements."""
    missing = states.loc[states["state"].isin(NO_NUMBER)]
    if missing.empty:
        return
    st.header("Points without a number")
    st.caption("Click a row to open the point.")
    _open_point(grids.unfinished(missing, key="unfinished"))


def _rows(store: Store, run_ids: Sequence[str], rows: pd.DataFrame) -> None:
    with st.expander(f"The {len(rows)} numbers behind the charts", icon=":material/table:"):
        st.caption("Click a row to open the point. The file has all rows of the chosen runs, whatever the filters.")
        grids.rows_button(lambda: data.csv(store, list(run_ids)), "scaling")
        _open_point(grids.numbers(rows, key="numbers"))


def _open_point(point_id: str | None) -> None:
    if point_id is not None:
        leave("runs", run=point_id.rpartition("/")[0], point=point_id)


if __name__ == "__main__":
    page()
