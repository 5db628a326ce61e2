"""The facts of runs of kind `bench`: figures of the operator, of dense attention and of the best peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from orchestrator.report.table import shape
from orchestrator.states import Origin
from orchestrator.store import Store, queries

KIND = "bench"
FORWARD, BOTH = "forward", "forward+backward"
TIME, MEMORY, STAGE = "time", "peak_extra_memory", "stage_"


@dataclass(frozen=True)
class Layout:
    """Heads and dtype of an operator."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return shape(self.query_heads, self.kv_heads, self.head_dim, None)


@dataclass(frozen=True)
class Place:
    """Where figures are comparable: the same layout, length and batch, in the same pass."""

    layout: Layout
    seq_len: int
    batch: int
    pass_: str

    def of(self, pass_: str) -> Place:
        """The same in another pass."""
        return replace(self, pass_=pass_)


@dataclass(frozen=True)
class Figure:
    """The best of several at a place, and whose it is."""

    value: float
    owner: str


@dataclass(frozen=True)
class Bench:
    """One run.

    Attributes:
        name: of the run; its id where the report has several of the name.
        states: of its points of times, by place and implementation, in the order of the run.
        values: of its points, by place, implementation and metric.
        routes: the kernels that ran, by place and implementation.
        peers: the best reported figures of other NSA implementations on the same card, by place and metric.
        alike: other runs of the report on the same card, of the same commit and nothing beyond it.
    """

    name: str
    states: Mapping[tuple[Place, str], str]
    values: Mapping[tuple[Place, str, str], float]
    routes: Mapping[tuple[Place, str], str]
    peers: Mapping[tuple[Place, str], Figure]
    alike: Sequence[Bench] = ()

    @property
    def fullest(self) -> str:
        """The pass of its rows and charts: forward+backward, if that was measured."""
        return fullest([place.pass_ for place, _ in self.states])

    def rows(self) -> Iterator[tuple[Place, str]]:
        """A row a layout, length and NSA implementation, its pass the fullest: layouts as in the run, then lengths."""
        layouts = list(dict.fromkeys(place.layout for place, _ in self.states))
        fullest = self.fullest
        rows = [row for row in self.states if row[0].pass_ == fullest and not is_dense(row[1])]
        yield from sorted(rows, key=lambda row: (layouts.index(row[0].layout), row[1], row[0].seq_len))

    def value(self, place: Place, implementation: str, metric: str) -> float | None:
        return self.values.get((place, implementation, metric))

    def stages(self, place: Place, implementation: str) -> dict[str, float]:
        """Milliseconds by stage; empty where none was told."""
        return {
            metric.removeprefix(STAGE): value
            for (at, name, metric), value in self.values.items()
            if (at, name) == (place, implementation) and metric.startswith(STAGE)
        }

    def dense(self, place: Place) -> Figure | None:
        """The fastest dense attention of the run and those alike, and the kernel that it was."""
        found = [
            Figure(value, bench.routes.get((at, name), name))
            for bench in (self, *self.alike)
            for (at, name, metric), value in bench.values.items()
            if at == place and metric == TIME and is_dense(name)
        ]
        return min(found, key=lambda figure: figure.value, default=None)


def fullest(passes: Collection[str]) -> str:
    """Of the passes of a bench, that in which most is done."""
    return BOTH if BOTH in passes else FORWARD


def is_dense(implementation: str) -> bool:
    return implementation.startswith("dense")


def collect(store: Store, run_ids: Sequence[str]) -> list[Bench]:
    """Those of the runs that are of kind bench. Raises StoreUnavailable."""
    runs = [run for run_id in run_ids if (run := queries.run(store, run_id)) is not None and run["kind"] == KIND]
    if not runs:
        return []
    reported = queries.scaling(store, origin=Origin.REPORTED)
    names = run_names(runs)
    benches = [_bench(store, run, reported, names[run["run_id"]]) for run in runs]
    pairs = list(zip(runs, benches, strict=True))
    return [replace(bench, alike=[b for r, b in pairs if b is not bench and _alike(run, r)]) for run, bench in pairs]


def run_names(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a report calls each of its runs, by id: its name, or the id where two have the same name."""
    count = Counter(str(run["name"]) for run in runs)
    return {run["run_id"]: str(run["name"]) if count[str(run["name"])] == 1 else run["run_id"] for run in runs}


def _alike(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both are known to be of one commit, without changes, on one kind of card."""
    known = all(x["gpu"] and x["git_commit"] and not x["git_dirty"] for x in (run, other))
    return known and (run["gpu"], run["git_commit"]) == (other["gpu"], other["git_commit"])


def _bench(store: Store, run: Mapping[str, Any], reported: pd.DataFrame, name: str) -> Bench:
    states: dict[tuple[Place, str], str] = {}
    routes: dict[tuple[Place, str], str] = {}
    for row in queries.points(store, run["run_id"]).to_dict("records"):
        at = _place(row), row["implementation"]
        states.setdefault(at, row["state"])  # a point of stages comes after the one of times
        if is_dense(row["implementation"]) and row["route"]:
            routes[at] = row["route"].get("dense", "")
    measured = queries.measurements(store, run_ids=[run["run_id"]]).to_dict("records")
    values = {(_place(row), row["implementation"], row["metric"]): row["value"] for row in measured}
    return Bench(name, states, values, routes, _best_peers(reported, str(run["gpu"] or "")))


def _best_peers(reported: pd.DataFrame, gpu: str) -> dict[tuple[Place, str], Figure]:
    """Of the card that `gpu` names, e.g. H200 and NVIDIA H200."""
    best: dict[tuple[Place, str], Figure] = {}
    known = reported.dropna(subset=["query_heads", "kv_heads", "head_dim", "batch", "seq_len", "dtype", "gpu"])
    for row in known.to_dict("records"):
        if is_dense(row["implementation"]) or row["workload"] != "attention" or row["gpu"] not in gpu:
            continue
        at = _place(row), row["metric"]
        if at not in best or row["value"] < best[at].value:
            best[at] = Figure(row["value"], row["implementation"])
    return best


def _place(row: Mapping[Any, Any]) -> Place:
    layout = Layout(int(row["query_heads"]), int(row["kv_heads"]), int(row["head_dim"]), row["dtype"])
    return Place(layout, int(row["seq_len"]), int(row["batch"]), row["pass"])
