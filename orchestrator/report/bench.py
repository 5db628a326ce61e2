"""Runs of kind `bench`: the operator beside dense attention and peers, its growth, branches and stages, as tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from jobs.schema.quantities import readable
from jobs.schema.states import Origin, PointState
from orchestrator.judge.branches import Branch, BranchShares, branch_shares, take_overs
from orchestrator.judge.growth import Growth, LocalSlope, fit_growth, local_slopes
from orchestrator.report.series import text
from orchestrator.report.table import Table
from orchestrator.store import Store, queries

KIND = "bench"
FORWARD, BOTH = "forward", "forward+backward"
TIME, MEMORY, STAGE = "time", "peak_extra_memory", "stage_"
UNMEASURED = "-"
GROWTH = (
    "Growth of the value per sequence: the exponent p of value = overhead + c · S^p with its 95 % interval; or, where "
    "overhead + linear + quadratic describes it better than any power, the shares of these at the longest length, the "
    "quadratic one's 95 % interval, and the S from which on it is the greater half. Local exponents: the slope of each "
    "octave on log-log axes, by the length at its end, with half of its 95 % "
    "interval from the values' spread if that is above 0.1."
)
_OPERATOR = (
    "Of the whole call; pairs are forward / forward+backward. Above 1 the row is faster: × dense is the "
    "time of the fastest dense attention over the row's, of this run or one of the same commit and card in this "
    "report; × peer that of the best figure reported for the same heads, dtype, length, batch and card, of any NSA "
    f"implementation; MiB × peer the same of extra memory. {UNMEASURED}: not measured."
)
_BRANCHES = (
    " Device milliseconds of a call by branch, and their part of all kernels. Compressed: with its scores and the "
    "choice of blocks; window: with the blocks that are always selected; rest: compression, merging, gates; other: "
    "PyTorch's own kernels. A stage of the compressed branch and the window is divided by a fit over the lengths: per "
    "token, the window costs a constant and the compressed branch a multiple of S. Compressed / dense: beside the time "
    "of the fastest dense attention. By design, with one compressed key every 16 tokens (cmp_stride; "
    "arXiv:2502.11089), the last query sees S/16 compressed keys and a query S/32 on average, where dense attention "
    "sees S/2: 1/16 of its work, and just as quadratic; the scores visit the same keys once more."
)
_STAGES = (
    "Milliseconds on the device by stage of the operator; other: PyTorch's own kernels. Gaps: the rest of the "
    "call's time, in which the device waits for the host, or for a kernel's last programs. Stages are timed in "
    "calls of their own: a gap below 0 is what these differ by from the call that was timed."
)
_NEEDED = ["implementation", "query_heads", "kv_heads", "head_dim", "seq_len", "batch"]  # a journal may lack them


class Place(NamedTuple):
    """Coordinates within which figures are comparable; heads as "12/2 d64"."""

    heads: str
    dtype: str
    seq_len: int
    batch: int
    pass_: str


class Figure(NamedTuple):
    """A value and its owner: an implementation or a kernel."""

    value: float
    owner: str


@dataclass(frozen=True)
class Bench:
    """One run of kind bench. Its figures are by place and implementation, with the environment and the interpreter of
    which the run has several."""

    name: str  # the run's name; its id if several runs of the report share the name
    fullest: str  # the pass of the rows and charts: forward+backward if planned, else forward
    states: Mapping[tuple[Place, str], str]  # of the timing points, in the order of the run
    values: Mapping[tuple[Place, str, str], float]  # by metric, too
    routes: Mapping[tuple[Place, str], str]  # the kernels of dense attention that ran
    shares: Mapping[tuple[Place, str], BranchShares]  # the time of each branch, shortest lengths first
    peers: Mapping[tuple[Place, str], Figure]  # best reported of other NSA on the same card, by place and metric
    rows: Sequence[tuple[Place, str]]  # of NSA in the fullest pass: by layout as in the run, implementation, length
    alike: Sequence[Bench] = ()  # the report's other runs with the same card and the same clean commit

    def dense(self, place: Place) -> Figure | None:
        """The fastest dense attention of this run and the runs in `alike`, with its kernel; None if not measured."""
        found = [
            Figure(value, bench.routes.get((at, name), name))
            for bench in (self, *self.alike)
            for (at, name, metric), value in bench.values.items()
            if at == place and metric == TIME and is_dense(name)
        ]
        return min(found, key=lambda figure: figure.value, default=None)


def is_dense(implementation: str) -> bool:
    return implementation.startswith("dense")


def run_names(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Display name of each run, by id: its name, or its id if the name occurs more than once."""
    count = Counter(str(run["name"]) for run in runs)
    return {run["run_id"]: str(run["name"]) if count[str(run["name"])] == 1 else run["run_id"] for run in runs}


def collect(store: Store, run_ids: Iterable[str]) -> list[Bench]:
    """The runs of kind bench among `run_ids`. Raises StoreUnavailable."""
    runs = [run for run_id in run_ids if (run := queries.run(store, run_id)) is not None and run["kind"] == KIND]
    if not runs:
        return []
    reported, names = queries.scaling(store, origin=Origin.REPORTED), run_names(runs)
    benches = [_bench(store, run, reported, names[run["run_id"]]) for run in runs]
    # The card and the commit of each run; a run without them, or with changes, is like no other.
    sources = [(run["gpu"], run["git_commit"]) if not run["git_dirty"] else (None, None) for run in runs]
    return [
        replace(one, alike=[b for s, b in zip(sources, benches, strict=True) if b is not one and s == own and all(s)])
        for own, one in zip(sources, benches, strict=True)
    ]


def _bench(store: Store, run: Mapping[str, Any], reported: pd.DataFrame, name: str) -> Bench:
    points = queries.points(store, run["run_id"]).dropna(subset=_NEEDED).to_dict("records")
    several = [axis for axis in ("env", "python") if len({text(row[axis]) for row in points}) > 1]

    def at(row: Mapping[Any, Any]) -> tuple[Place, str]:
        """Place and implementation, with those of its environment and interpreter of which the run has several."""
        return place_of(row), row["implementation"] + "".join(
            f" [{text(row[axis])}]" for axis in several if text(row[axis])
        )

    states: dict[tuple[Place, str], str] = {}
    for row in points:
        states.setdefault(at(row), row["state"])  # the timing point precedes the point of stages
    dense = [row for row in points if is_dense(row["implementation"]) and row["route"]]
    routes = {at(row): row["route"].get("dense", "") for row in dense}
    measured = queries.measurements(store, run_ids=[run["run_id"]]).dropna(subset=_NEEDED)
    values = {(*at(row), row["metric"]): row["value"] for row in measured.to_dict("records")}
    shares = {at({**one.series, "seq_len": one.seq_len, "batch": one.batch}): one for one in branch_shares(measured)}
    peers: dict[tuple[Place, str], Figure] = {}
    for place, metric, figure in peer_figures(reported, run["gpu"]):
        peers[place, metric] = min(peers.get((place, metric), figure), figure, key=lambda one: one.value)
    fullest = BOTH if any(place.pass_ == BOTH for place, _ in states) else FORWARD
    layouts = list(dict.fromkeys(place[:2] for place, _ in states))  # heads and dtype
    rows = [one for one in states if one[0].pass_ == fullest and not is_dense(one[1])]
    rows.sort(key=lambda row: (layouts.index(row[0][:2]), row[1], row[0].seq_len))
    return Bench(name, fullest, states, values, routes, shares, peers, rows)


def place_of(row: Mapping[Any, Any]) -> Place:
    """The place of a row of the views that has all coordinates."""
    heads = f"{int(row['query_heads'])}/{int(row['kv_heads'])} d{int(row['head_dim'])}"
    return Place(heads, row["dtype"], int(row["seq_len"]), int(row["batch"]), row["pass"])


def peer_figures(reported: pd.DataFrame, gpu: str | None) -> Iterator[tuple[Place, str, Figure]]:
    """Place, metric and figure of what is reported of other NSA implementations on a card."""
    for row in reported.dropna(subset=[*_NEEDED, "dtype", "gpu"]).to_dict("records"):
        same_card = row["gpu"] in str(gpu or "")  # reports may shorten a card's name: H200 is NVIDIA H200
        if row["workload"] == "attention" and same_card and not is_dense(row["implementation"]):
            yield place_of(row), row["metric"], Figure(row["value"], row["implementation"])


def tables(benches: Sequence[Bench]) -> Iterable[Table]:
    """Tables of each run: the operator, its growth, the share of each branch, its stages."""
    explained = _BRANCHES  # said once
    for bench in benches:
        of = f", {bench.name}" if len(benches) > 1 else ""
        if bench.rows:  # a run of dense attention only has none; it appears in the rows of other runs
            yield Table.of(f"Operator{of}", _OPERATOR, [_operator(bench, *row) for row in bench.rows])
        yield Table.of(f"Growth{of}", f"Of {bench.fullest}. {GROWTH}", _growth(bench))
        for table in _branches(bench, of):
            yield replace(table, note=table.note + explained)
            explained = ""
        yield from _stages(bench, of)


def _operator(bench: Bench, place: Place, implementation: str) -> dict[str, str]:
    forward, both = places = [place._replace(pass_=pass_) for pass_ in (FORWARD, BOTH)]
    times = [bench.values.get((at, implementation, TIME)) for at in places]
    shown = []
    for at, time in zip(places, times, strict=True):
        state = str(bench.states.get((at, implementation), PointState.OK))
        shown.append(state if time is None and state != PointState.OK else _number(time))
    dense = [bench.dense(forward), bench.dense(both)]
    peers = [bench.peers.get((at, TIME)) for at in places]
    memory, peer_memory = bench.values.get((both, implementation, MEMORY)), bench.peers.get((both, MEMORY))
    return {
        "heads": place.heads,
        "S": f"{place.seq_len:,}",
        "batch": f"{place.batch}",
        "NSA": implementation,
        "forward ms": shown[0],
        "fwd+bwd ms": shown[1],
        "extra MiB": _number(memory),
        "× dense": _ratios(dense, times),
        "× peer": _ratios(peers, times),
        "MiB × peer": _ratios([peer_memory], [memory]),
        "dense ms": _owned(dense),
        "best peer ms": _owned(peers),
        "peer MiB": _number(peer_memory and peer_memory.value),
    }


def _growth(bench: Bench) -> list[dict[str, str]]:
    """A row per series and metric that has a fit: lengths enough, and no value without a logarithm."""
    series: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}
    for place, name in bench.states:
        if place.pass_ == bench.fullest:
            series.setdefault((place.heads, place.dtype, name), {TIME: {}, MEMORY: {}})
    for (place, name, metric), value in bench.values.items():
        if place.pass_ == bench.fullest and metric in (TIME, MEMORY):
            series[place.heads, place.dtype, name][metric][place.seq_len] = value / place.batch
    rows = []
    for (heads, _, name), metrics in series.items():
        for metric, values in metrics.items():
            points = list(values), list(values.values())
            if all(value > 0 for value in points[1]) and (law := fit_growth(*points)):
                cells = law_cells(law, local_slopes(*points))
                rows.append({"heads": heads, "implementation": name, "metric": metric, **cells})
    return rows


def law_cells(law: Growth, local: Sequence[LocalSlope]) -> dict[str, str]:
    """A fitted growth as cells of a table."""
    return {
        "growth": str(law),
        "S": f"{law.lengths[0]:,} to {law.lengths[-1]:,}",
        "n": f"{law.n}",
        "overhead": f"{law.overhead:.3g}" if law.overhead else "",
        "residual": f"{law.residual:.1%}",
        "local exponents": ", ".join(map(str, local)),
    }


def _branches(bench: Bench, of: str) -> Iterable[Table]:
    """One table of shares per layout, implementation and pass."""
    for taken in take_overs(list(bench.shares.values())):
        series = [(at, one) for at, one in bench.shares.items() if one.series == taken.series]
        series.sort(key=lambda each: each[0][0].seq_len)
        branches = [branch for branch in Branch if any(branch in one.milliseconds for _, one in series)]
        rows = []
        for (place, _), one in series:
            cells = {"S": f"{place.seq_len:,}"}
            for branch in branches:
                title = "compressed and window" if branch is Branch.SHARED else branch.value
                time, share = one.milliseconds.get(branch), f"{100 * one.share(branch):.0f} %"
                cells[title] = UNMEASURED if time is None else f"{readable(time)} ({share})"
            dense, compressed = bench.dense(place), one.milliseconds.get(Branch.COMPRESSED)
            part = None if dense is None or compressed is None else compressed / dense.value
            whole = readable(sum(one.milliseconds.values()))
            rows.append(cells | {"all kernels": whole, "compressed / dense": _number(part)})
        unknown = sorted({stage for _, one in series for stage in one.unknown})
        more = f" Stages of unknown names, which count as other: {', '.join(unknown)}." if unknown else ""
        first, name = series[0][0]
        yield Table.of(f"Share of each branch of {first.heads}, {name} {first.pass_}{of}", taken.sentence + more, rows)


def _stages(bench: Bench, of: str) -> Iterable[Table]:
    """One table per layout, implementation and pass: a row a stage, the slowest at the longest length first."""
    staged: dict[tuple[Place, str], dict[str, float]] = defaultdict(dict)
    for (place, name, metric), value in bench.values.items():
        if metric.startswith(STAGE):
            staged[place, name][metric.removeprefix(STAGE)] = value
    groups: dict[Any, list[Place]] = defaultdict(list)
    for place, name in bench.states:
        if (place, name) in staged:
            groups[place.heads, place.dtype, place.pass_, name].append(place)
    for (heads, _, pass_, name), places in groups.items():
        places.sort(key=lambda place: place.seq_len)
        spent = [staged[place, name] for place in places]
        names = sorted({stage for times in spent for stage in times}, key=lambda stage: -spent[-1].get(stage, 0.0))
        calls = [bench.values.get((place, name, TIME)) for place in places]
        sums = [sum(times.values()) for times in spent]
        gaps = [None if call is None else call - busy for call, busy in zip(calls, sums, strict=True)]
        lines = [(stage, [times.get(stage) for times in spent]) for stage in names]
        lines += [("all kernels", sums), ("gaps", gaps), ("call", calls)]
        rows = [[title, *map(_number, values)] for title, values in lines]
        columns = ["stage", *(f"{place.seq_len:,}" for place in places)]
        yield Table(f"Stages of {heads}, {name} {pass_}{of}", _STAGES, columns, rows)


def _number(value: float | None) -> str:
    return UNMEASURED if value is None else readable(value)


def _ratios(theirs: Sequence[Figure | None], ours: Sequence[float | None]) -> str:
    ratios = [one.value / value if one and value else None for one, value in zip(theirs, ours, strict=True)]
    return UNMEASURED if not any(ratios) else " / ".join(map(_number, ratios))


def _owned(figures: Sequence[Figure | None]) -> str:
    """The values with their owners in brackets."""
    owners = dict.fromkeys(figure.owner for figure in figures if figure is not None)
    values = " / ".join(_number(figure and figure.value) for figure in figures)
    return f"{values} ({', '.join(owners)})" if owners else UNMEASURED
