"""Scaling page: memory, time and throughput against sequence length, with fitted exponents; ours beside reported."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
import streamlit as st

from dashboard import data, grids, help_pages, parts
from dashboard.address import NONE, bound, leave
from jobs.schema import quantities as declared
from jobs.schema.quantities import AGAINST_LENGTH, Quantities, Quantity
from jobs.schema.states import FAILED, Origin, PointState, RunState
from orchestrator.judge.branches import BranchShares, take_overs
from orchestrator.judge.growth import MIN_LENGTHS
from orchestrator.report import charts, series
from orchestrator.store import Store

MEMORY = tuple(quantity.name for quantity in declared.MEMORY)  # a chart needs only one kind of memory
BESIDE, TOGETHER = "beside", "together"
_RECENT = 200  # complete runs among which the default is looked for
_ENOUGH = 5  # lengths that make a sweep worth opening with
CHART_HEIGHT = 470  # pixels, without the legend
GROWTH = (
    "The exponent p of value = overhead + c · S^p per sequence, on the longest range of lengths on which it holds; "
    "paler points are outside. Where overhead + linear + quadratic describes the values better than any power, the "
    "growth is given as these parts' shares. A local exponent is the slope between neighbouring lengths."
)
_WAITING = (PointState.PENDING, PointState.RUNNING)
NO_NUMBER = (*FAILED, PointState.SKIPPED, PointState.CANCELLED)


class Choice(NamedTuple):
    """The reader's selection; `filters` are the values to show, by column of points, metrics and fits; none: all."""

    run_ids: tuple[str, ...]
    filters: Mapping[str, Sequence[str]]
    layout: str

    def select(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Selected rows of a frame of points, metrics or fits."""
        frame = frame.assign(shape=[series.shape(row) for row in frame.to_dict("records")])
        for column, wanted in self.filters.items():
            if wanted and column in frame:
                frame = frame.loc[frame[column].map(series.text).isin(wanted)]
        return frame


def choose(store: Store, runs: pd.DataFrame) -> Choice:
    """Draw the controls. Returns the choice, which the address keeps."""
    names = {}
    for row in runs.sort_values("origin", kind="stable").to_dict("records"):
        started = parts.moment(row["created_at"], "%Y-%m-%d %H:%M")
        names[row["run_id"]] = f"{parts.ORIGINS[row['origin']].sign} {row['name']} · {started}"
    binding = bound("run", list(names), _usual_runs(store, runs), empty=NONE)
    run_ids = st.multiselect("Runs", list(names), format_func=names.__getitem__, placeholder="none", **binding)
    every = Choice(tuple(run_ids), {}, BESIDE)
    planned = every.select(data.states(store, run_ids=run_ids))  # filters also offer points that have not ended
    own = sorted(data.own_axes(store, run_ids).items())
    labels = {"pass": "Pass", "workload": "Workload", "device": "Device", "shape": "Shape"}
    labels |= {column: label for column, label in own if column in planned} | {"implementation": "Implementation"}
    usual, filters = _usual_filters(planned), {}
    for column, label in labels.items():
        options = sorted({text for value in planned[column] if (text := series.text(value))})
        if column == "shape" and len(options) < 2:
            continue
        binding, label = bound(column, options, usual.get(column, [])), parts.plain(label)
        if len(options) > 8:
            filters[column] = st.multiselect(label, options, format_func=parts.named, placeholder="all", **binding)
        else:
            pills = {
                "selection_mode": "multi",
                "format_func": lambda text: parts.plain(parts.named(text)),
                "help": "none chosen: all",
            }
            filters[column] = st.pills(label, options, **pills, **binding)
    layout = BESIDE
    if len(set(planned["origin"])) > 1:
        label, options = "Reported results, beside our charts or in them", [BESIDE, TOGETHER]
        layout = st.segmented_control(
            label, options, default=BESIDE, required=True, key="reported", bind="query-params"
        )
    return Choice(tuple(run_ids), filters, layout or BESIDE)


def _usual_runs(store: Store, runs: pd.DataFrame) -> list[str]:
    """Ids of the runs to open with: our newest complete sweep, and the reported curve from which this project started.

    That sweep has five lengths, or the most that any complete run has; a scaling sweep comes before other kinds.
    Without a complete run over three lengths: the newest with results, else the newest.
    """
    ours = [run for run in runs.to_dict("records") if run["origin"] == Origin.MEASURED]
    complete = [run for run in ours if run["state"] == RunState.DONE and run["ok"] >= MIN_LENGTHS][:_RECENT]
    lengths = data.lengths(store, [run["run_id"] for run in complete])
    least = max(MIN_LENGTHS, min(_ENOUGH, max(lengths.values(), default=0)))
    sweeps = [run for run in complete if lengths.get(run["run_id"], 0) >= least]
    sweeps.sort(key=lambda run: run["kind"] != "scaling")
    chosen = [run["run_id"] for run in (sweeps or [run for run in ours if run["ok"]] or ours)[:1]]
    fits = data.fits(store, runs.loc[runs["origin"] == Origin.REPORTED, "run_id"].tolist())
    curve = fits.loc[(fits["workload"] == "model") & fits["metric"].isin(MEMORY), "run_id"]
    return chosen + sorted(set(curve))


def _usual_filters(states: pd.DataFrame) -> dict[str, list[str]]:
    """Default values of the filters, by column; without one all are shown.

    Of passes forward+backward, and all of a run without it (decoding); of implementations all measured ones, and
    reported ones with at least three lengths (a curve); of a sweep over three or more shapes, whose lines would hide
    each other, the first.
    """
    passes: set[str] = set()
    for _, found in states.groupby("run_id")["pass"]:
        passes |= set(found.dropna()) & {"forward+backward"} or set(found.dropna())
    ours = states["origin"] == Origin.MEASURED
    lengths: Any = states[~ours & (states["state"] == PointState.OK)].groupby("implementation")["seq_len"].nunique()
    curves = set(states.loc[ours, "implementation"].dropna()) | set(lengths[lengths >= MIN_LENGTHS].index)
    sweeps = states[states["shape"] != ""].groupby(["run_id", "workload"])["shape"].unique().map(sorted)
    shapes = {shape for found in sweeps for shape in (found if len(found) < 3 else found[:1])}
    usual = {"pass": passes, "implementation": curves, "shape": shapes}
    return {name: sorted(found) for name, found in usual.items() if found < set(states[name].dropna()) - {""}}


@data.explained
def page() -> None:
    store = data.open_store()
    runs = data.runs(store)
    if runs.empty:
        st.title("Scaling")
        help_pages.nothing_yet()
        return
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.title("Scaling", width="content")
        with st.popover("Runs and filters", icon=":material/tune:", width="content"):
            choice = choose(store, runs)
    if not choice.run_ids:
        st.info("Choose a run under *Runs and filters*.", icon=":material/arrow_upward:")
        return
    states = data.states(store, run_ids=choice.run_ids)
    if waiting := len(states.loc[states["state"].isin(_WAITING)]):
        st.fragment(_follow, run_every=data.LIVE_SECONDS)(store, choice.run_ids, seen=waiting)
    _results(store, choice, states)


@data.explained
def _follow(store: Store, run_ids: Sequence[str], *, seen: int) -> None:
    """Show the progress of live runs, and redraw the page when a point has ended."""
    states = data.states(store, run_ids=run_ids)
    if len(states.loc[states["state"].isin(_WAITING)]) != seen:
        st.rerun()
    st.info(f"Still measuring, {parts.count(seen, 'point')} to go; this page follows.", icon=":material/autorenew:")
    for run_id in run_ids:
        for point in data.running(store, run_id):
            st.caption(parts.doing(point))


def _results(store: Store, choice: Choice, states: pd.DataFrame) -> None:
    rows = choice.select(data.scaling(store, run_ids=choice.run_ids))
    fits = choice.select(data.fits(store, choice.run_ids))
    if rows.empty:
        text = "No finished point fits this choice yet."
        if PointState.OK in set(choice.select(states)["state"]):
            text = (
                "The finished points of this choice have no numbers against a sequence length; see their runs' pages."
            )
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
    unfinished = choice.select(states)
    unfinished = unfinished.loc[unfinished["state"].isin(NO_NUMBER)]
    if not unfinished.empty:  # in a chart they would look like measurements
        st.header("Points without a number")
        st.caption("Click a row to open the point.")
        if (point := grids.unfinished(unfinished, key="unfinished")) is not None:
            leave("runs", run=point.rpartition("/")[0], point=point)
    if not rows.empty:
        with st.expander(f"The {len(rows)} numbers behind the charts", icon=":material/table:"):
            text = "Click a row to open the point. The file has all rows of the chosen runs, whatever the filters."
            st.caption(text)
            grids.rows_button(lambda: data.csv(store, list(choice.run_ids)), "scaling")
            if (point := grids.numbers(rows, key="numbers")) is not None:
                leave("runs", run=point.rpartition("/")[0], point=point)


def _panels(rows: pd.DataFrame, layout: str, quantities: Quantities) -> list[tuple[str, Quantity, pd.DataFrame]]:
    """Title, quantity and rows of each chart, one per quantity: memory and time first, ours before reported ones, or
    both in the same chart."""
    drawn = [quantity.name for quantity in quantities if quantity.plot in AGAINST_LENGTH]
    memory = [name for name in MEMORY if name in drawn]
    panels = []
    for origin in [None] if layout == TOGETHER else [Origin.MEASURED, Origin.REPORTED]:
        own = rows if origin is None else rows.loc[rows["origin"] == origin]
        for names in (memory, *([name] for name in drawn if name not in MEMORY)):
            stored = [quantities.of(name) for name in names if name in set(own["metric"])]
            if origin is None:
                panels += [(quantity.title, quantity, own) for quantity in stored[:2]]
            elif stored:
                panels.append((f"{'Memory' if names is memory else stored[0].title}, {origin}", stored[0], own))
    return panels


def _draw(panels: Sequence[tuple[str, Quantity, pd.DataFrame]], fits: pd.DataFrame) -> None:
    """Draw charts, two beside each other."""
    for first in range(0, len(panels), 2):
        pair = panels[first : first + 2]
        for column, (title, quantity, rows) in zip(st.columns(min(2, len(panels)), gap="medium"), pair, strict=False):
            with column:
                shown = charts.drawable(rows, quantity)
                if shown.empty:
                    st.caption(f"{parts.plain(title)}: a logarithmic axis can show none of the values, such as zero.")
                    continue
                common = []  # properties of the chart's points: run, workload, pass, dtype, hardware
                for name in ("run_name", "workload", "pass", "dtype", "gpu"):
                    found = sorted({value for value in shown[name] if isinstance(value, str)})
                    common += [", ".join(found)] if 0 < len(found) <= 3 else []
                common += ["CPU"] if set(shown["device"]) == {"cpu"} else []
                chart = charts.scaling_chart(shown, fits, quantity, [title, " · ".join(common)])
                height = CHART_HEIGHT + 26 * len(set(shown["implementation"]))
                grids.chart(chart, height=height, alt=f"{title}: {quantity.title} against sequence length")


def _growth(fits: pd.DataFrame, quantities: Quantities) -> None:
    """Show the fitted exponents as a grid and as charts, with the local ones between neighbouring lengths."""
    st.header("How fast cost grows", help=GROWTH)
    if fits.empty:
        st.caption("An exponent needs three sequence lengths of one implementation; there are not that many yet.")
        return
    ordered = fits.sort_values(["origin", "metric", "implementation", "run_id"])
    extra = ordered.loc[ordered["metric"] == MEMORY[0], "run_id"]  # the charts have one kind of memory per run
    shown = ordered.loc[~(ordered["metric"].isin(MEMORY[1:]) & ordered["run_id"].isin(extra))]
    left, right = st.columns(2, gap="medium")
    with left:
        if shown["exponent"].notna().any():
            grids.chart(charts.exponent_chart(shown, quantities))
        else:
            st.caption("No power law describes the growth; the grid has its parts.")
    with right:
        times = shown.loc[~shown["metric"].isin(MEMORY)]
        bends = times.loc[times["metric"] == times["metric"].iloc[0]] if len(times) else shown
        grids.chart(charts.local_chart(bends, quantities))
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
        with left:
            grids.chart(charts.branch_chart([share for share in shares if share.series == one.series]))
        right.subheader(parts.plain(title))
        right.markdown(parts.plain(one.sentence))


if __name__ == "__main__":
    page()
