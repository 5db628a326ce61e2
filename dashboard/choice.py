"""The Scaling page's choice: the runs that it shows, its default, and its filters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

import jobs.schema.quantities
from dashboard import data, parts
from dashboard.address import NONE, Address
from jobs.schema.states import Origin, PointState, RunState
from orchestrator.judge.growth import MIN_LENGTHS
from orchestrator.report import series
from orchestrator.store import Store

MEMORY = tuple(quantity.name for quantity in jobs.schema.quantities.MEMORY)  # a chart needs only one kind of memory
BESIDE, TOGETHER = "beside", "together"
_LAYOUTS = {BESIDE: "In charts of their own", TOGETHER: "In the charts of our own"}
_AT_ONCE = 50  # complete runs read in one step of the search for the default
_ENOUGH = 5  # lengths of one series that make a sweep worth opening with


@dataclass(frozen=True)
class Choice:
    """The reader's selection; an empty field selects all."""

    run_ids: tuple[str, ...]
    passes: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    more: tuple[tuple[str, tuple[str, ...]], ...] = ()  # kind-specific axes: column and values
    layout: str = BESIDE

    def select(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Selected rows of a frame of points, metrics or fits."""
        for column, wanted in (
            ("pass", self.passes),
            ("workload", self.workloads),
            ("implementation", self.implementations),
            ("device", self.devices),
        ):
            if wanted:
                frame = frame.loc[frame[column].isin(wanted)]
        for column, wanted in self.more:
            if wanted and column in frame:
                frame = frame.loc[frame[column].map(series.text).isin(wanted)]
        if self.shapes:
            frame = frame.loc[[series.shape(row) in self.shapes for row in frame.to_dict("records")]]
        return frame


def choose(store: Store, runs: pd.DataFrame, address: Address) -> Choice:
    """Draw the controls. Returns the choice, which the address keeps."""
    run_ids = _runs(store, runs, address)
    planned = data.states(store, run_ids=run_ids)  # filters also offer points that have not ended
    passes = _pick(address, "Pass", "pass", planned["pass"], _usual_passes(planned))
    workloads = _pick(address, "Workload", "workload", planned["workload"])
    devices = _pick(address, "Device", "device", planned["device"])
    shapes = _pick_shapes(address, planned)
    more = tuple(
        (column, _pick(address, label, column, planned[column]))
        for column, label in sorted(data.own_axes(store, run_ids).items())
        if column in planned
    )
    implementations = _pick(address, "Implementation", "implementation", planned["implementation"], _curves(planned))
    bound = address.one("reported", _LAYOUTS, BESIDE)
    layout = BESIDE
    if len(set(planned["origin"])) > 1:
        layout = st.segmented_control(
            "Reported results", list(_LAYOUTS), format_func=_LAYOUTS.__getitem__, required=True, **bound
        )
    return Choice(tuple(run_ids), passes, workloads, implementations, devices, shapes, more, layout or BESIDE)


def _runs(store: Store, runs: pd.DataFrame, address: Address) -> list[str]:
    """Ids of the runs to show; default: our newest complete sweep and the reported S² curve."""
    names = {
        row["run_id"]: f"{parts.ORIGINS[row['origin']].sign} {row['name']} · {row['created_at']:%Y-%m-%d %H:%M}"
        for row in runs.sort_values("origin", kind="stable").to_dict("records")
    }
    reported = runs[runs["origin"] == Origin.REPORTED]["run_id"].tolist()
    default = [*sweep(store, runs), *_curve_of_the_start(store, reported)]
    bound = address.many("run", list(names), default, empty=NONE)
    return st.multiselect("Runs", list(names), format_func=names.__getitem__, placeholder="none", **bound)


def sweep(store: Store, runs: pd.DataFrame) -> list[str]:
    """Id of the run to open with: our newest complete sweep over enough lengths, a scaling sweep before other kinds.

    Enough are five lengths of one series, or the most that any complete run has. Without a complete run over three
    lengths: the newest with results, else the newest.
    """
    ours = [run for run in runs.to_dict("records") if run["origin"] == Origin.MEASURED]
    # A run is complete if it is done, or was and some of its points are measured again.
    unended = ("running", "pending", "cancelled")
    complete = [
        run
        for run in ours
        if run["ok"] >= MIN_LENGTHS
        and (run["state"] == RunState.DONE or (run["resumed"] and not any(run[name] for name in unended)))
    ]
    lengths: dict[str, int] = {}
    for first in range(0, len(complete), _AT_ONCE):  # mostly, the newest runs have one
        batch = complete[first : first + _AT_ONCE]
        lengths |= data.lengths(store, [run["run_id"] for run in batch])
        if any(run["kind"] == "scaling" and lengths.get(run["run_id"], 0) >= _ENOUGH for run in batch):
            break
    most = max(lengths.values(), default=0)
    if most >= MIN_LENGTHS:
        sweeps = [run for run in complete if lengths.get(run["run_id"], 0) >= min(_ENOUGH, most)]
        return [min(sweeps, key=lambda run: run["kind"] != "scaling")["run_id"]]
    return [run["run_id"] for run in ([run for run in ours if run["ok"]] or ours)[:1]]


def _curve_of_the_start(store: Store, reported: Sequence[str]) -> list[str]:
    """Ids of reported runs with a fit of a whole model's memory: the curve from which this project started."""
    fits = data.fits(store, reported).to_dict("records")
    return sorted({fit["run_id"] for fit in fits if fit["workload"] == "model" and fit["metric"] in MEMORY})


def _usual_passes(states: pd.DataFrame) -> list[str]:
    """Default passes: forward+backward, and all passes of runs without it (decoding)."""
    usual: set[str] = set()
    for _, passes in states.groupby("run_id")["pass"]:
        named = set(passes.dropna())
        usual |= named & {"forward+backward"} or named
    return sorted(usual) if usual < set(states["pass"].dropna()) else []


def _curves(states: pd.DataFrame) -> list[str]:
    """Default implementations: all measured ones, and reported ones with at least three lengths (a curve)."""
    ours: set[str] = set()
    lengths: dict[str, set[float]] = defaultdict(set)
    for point in states.to_dict("records"):
        if point["origin"] == Origin.MEASURED and point["implementation"]:
            ours.add(point["implementation"])
        elif point["state"] == PointState.OK and point["implementation"]:
            lengths[point["implementation"]].add(point["seq_len"])
    shown = ours | {name for name, found in lengths.items() if len(found) >= MIN_LENGTHS}
    return sorted(shown) if shown < set(states["implementation"].dropna()) else []


def _pick_shapes(address: Address, states: pd.DataFrame) -> tuple[str, ...]:
    """Shapes to show; default: all, but one of a sweep over three or more, whose lines would hide each other."""
    sweeps: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in states.to_dict("records"):
        if shape := series.shape(row):
            sweeps[row["run_id"], row["workload"]].add(shape)
    options = set().union(*sweeps.values())
    if len(options) < 2:
        return ()
    shown = set().union(*(shapes if len(shapes) < 3 else sorted(shapes)[:1] for shapes in sweeps.values()))
    return _pick(address, "Shape", "shape", options, sorted(shown) if len(shown) < len(options) else [])


def _pick(
    address: Address, label: str, name: str, values: Iterable[Any], default: Sequence[str] = ()
) -> tuple[str, ...]:
    options = sorted({text for value in values if (text := series.text(value))})
    bound = address.many(name, options, default)
    label = parts.plain(label)
    if len(options) > 8:
        return tuple(st.multiselect(label, options, placeholder="all", **bound))
    pills = st.pills(label, options, selection_mode="multi", format_func=parts.plain, help="none chosen: all", **bound)
    return tuple(pills)
