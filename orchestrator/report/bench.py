"""Facts of runs of kind `bench`: figures of the operator, dense attention and the best peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from jobs.schema.states import Origin
from orchestrator.judge.branches import BranchShares, branch_shares
from orchestrator.report.series import text
from orchestrator.store import Store, queries

KIND = "bench"
FORWARD, BOTH = "forward", "forward+backward"
TIME, MEMORY, STAGE = "time", "peak_extra_memory", "stage_"
# Columns without which a point has no line; an imported journal may lack them.
_PLACE = ["implementation", "query_heads", "kv_heads", "head_dim", "seq_len", "batch"]


@dataclass(frozen=True)
class Layout:
    """Heads and dtype of an operator."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.query_heads}/{self.kv_heads} d{self.head_dim}"


@dataclass(frozen=True)
class Place:
    """Coordinates within which figures are comparable: layout, length, batch and pass."""

    layout: Layout
    seq_len: int
    batch: int
    pass_: str


@dataclass(frozen=True)
class Figure:
    """The best value at a place, and its owner (implementation or kernel)."""

    value: float
    owner: str


@dataclass(frozen=True)
class Bench:
    """One run of kind bench.

    Attributes:
        name: the run's name; its id if several runs of the report share the name.
        states: state of each timing point, by place and implementation (with its environment and interpreter, where
            the run has several), in the order of the run.
        values: measured values, by place, implementation and metric.
        routes: the kernels of dense attention that ran, by place and implementation.
        shares: the time of each branch, by place and implementation, shortest lengths first.
        peers: the best reported figures of other NSA implementations on the same card, by place and metric.
        alike: the report's other runs with the same card and the same clean commit.
    """

    name: str
    states: Mapping[tuple[Place, str], str]
    values: Mapping[tuple[Place, str, str], float]
    routes: Mapping[tuple[Place, str], str]
    shares: Mapping[tuple[Place, str], BranchShares]
    peers: Mapping[tuple[Place, str], Figure]
    alike: Sequence[Bench] = ()

    @property
    def fullest(self) -> str:
        """The pass of the rows and charts: forward+backward if planned, else forward."""
        return fullest([place.pass_ for place, _ in self.states])

    def rows(self) -> Iterator[tuple[Place, str]]:
        """Rows (place in the fullest pass, NSA implementation), by layout as in the run, implementation, length."""
        layouts = list(dict.fromkeys(place.layout for place, _ in self.states))
        fullest = self.fullest
        rows = [row for row in self.states if row[0].pass_ == fullest and not is_dense(row[1])]
        yield from sorted(rows, key=lambda row: (layouts.index(row[0].layout), row[1], row[0].seq_len))

    def value(self, place: Place, implementation: str, metric: str) -> float | None:
        return self.values.get((place, implementation, metric))

    def stages(self, place: Place, implementation: str) -> dict[str, float]:
        """Milliseconds by stage; empty if no stages were measured."""
        return {
            metric.removeprefix(STAGE): value
            for (at, name, metric), value in self.values.items()
            if (at, name) == (place, implementation) and metric.startswith(STAGE)
        }

    def dense(self, place: Place) -> Figure | None:
        """The fastest dense attention of this run and the runs in `alike`, with its kernel; None if not measured."""
        found = [
            Figure(value, bench.routes.get((at, name), name))
            for bench in (self, *self.alike)
            for (at, name, metric), value in bench.values.items()
            if at == place and metric == TIME and is_dense(name)
        ]
        return min(found, key=lambda figure: figure.value, default=None)


def fullest(passes: Collection[str]) -> str:
    """The pass with the most work: forward+backward if present, else forward."""
    return BOTH if BOTH in passes else FORWARD


def is_dense(implementation: str) -> bool:
    return implementation.startswith("dense")


def collect(store: Store, run_ids: Sequence[str]) -> list[Bench]:
    """The runs of kind bench among `run_ids`. Raises StoreUnavailable."""
    runs = [run for run_id in run_ids if (run := queries.run(store, run_id)) is not None and run["kind"] == KIND]
    if not runs:
        return []
    reported = queries.scaling(store, origin=Origin.REPORTED)
    names = run_names(runs)
    benches = [_bench(store, run, reported, names[run["run_id"]]) for run in runs]
    pairs = list(zip(runs, benches, strict=True))
    return [replace(bench, alike=[b for r, b in pairs if b is not bench and _alike(run, r)]) for run, bench in pairs]


def run_names(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Display name of each run, by id: its name, or its id if the name occurs more than once."""
    count = Counter(str(run["name"]) for run in runs)
    return {run["run_id"]: str(run["name"]) if count[str(run["name"])] == 1 else run["run_id"] for run in runs}


def _alike(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both runs have the same known card and the same known commit, without changes."""
    known = all(x["gpu"] and x["git_commit"] and not x["git_dirty"] for x in (run, other))
    return known and (run["gpu"], run["git_commit"]) == (other["gpu"], other["git_commit"])


def _bench(store: Store, run: Mapping[str, Any], reported: pd.DataFrame, name: str) -> Bench:
    states: dict[tuple[Place, str], str] = {}
    routes: dict[tuple[Place, str], str] = {}
    points = queries.points(store, run["run_id"]).dropna(subset=_PLACE).to_dict("records")
    several = [axis for axis in ("env", "python") if len({text(row[axis]) for row in points}) > 1]
    for row in points:
        at = _place(row), _contender(row, several)
        states.setdefault(at, row["state"])  # the timing point precedes the point of stages
        if is_dense(row["implementation"]) and row["route"]:
            routes[at] = row["route"].get("dense", "")
    measured = queries.measurements(store, run_ids=[run["run_id"]]).dropna(subset=_PLACE)
    values = {
        (_place(row), _contender(row, several), row["metric"]): row["value"] for row in measured.to_dict("records")
    }
    shares = {
        (_place({**one.series, "seq_len": one.seq_len, "batch": one.batch}), _contender(one.series, several)): one
        for one in branch_shares(measured)
    }
    return Bench(name, states, values, routes, shares, _best_peers(reported, str(run["gpu"] or "")))


def _best_peers(reported: pd.DataFrame, gpu: str) -> dict[tuple[Place, str], Figure]:
    """Smallest reported value by place and metric, of NSA implementations on the card `gpu`.

    Reports may shorten a card's name: H200 matches NVIDIA H200.
    """
    best: dict[tuple[Place, str], Figure] = {}
    known = reported.dropna(subset=[*_PLACE, "dtype", "gpu"])
    for row in known.to_dict("records"):
        if is_dense(row["implementation"]) or row["workload"] != "attention" or row["gpu"] not in gpu:
            continue
        at = _place(row), row["metric"]
        if at not in best or row["value"] < best[at].value:
            best[at] = Figure(row["value"], row["implementation"])
    return best


def _contender(row: Mapping[Any, Any], several: Sequence[str]) -> str:
    """The implementation, with those of its environment and interpreter of which the run has several."""
    return row["implementation"] + "".join(f" [{text(row[axis])}]" for axis in several if text(row[axis]))


def _place(row: Mapping[Any, Any]) -> Place:
    layout = Layout(int(row["query_heads"]), int(row["kv_heads"]), int(row["head_dim"]), row["dtype"])
    return Place(layout, int(row["seq_len"]), int(row["batch"]), row["pass"])
