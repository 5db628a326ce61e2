"""Tables of runs of kind `bench`: the operator beside dense attention and peers, its growth, branches and stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jobs.schema.quantities import readable
from jobs.schema.states import PointState
from orchestrator.judge.branches import Branch, take_overs
from orchestrator.judge.growth import Growth, LocalSlope, fit_growth, local_slopes
from orchestrator.report.bench import BOTH, FORWARD, MEMORY, TIME, Bench, Figure, Layout, Place
from orchestrator.report.table import Table

UNMEASURED = "-"
GROWTH = (
    "Growth of the value per sequence: the exponent p of value = overhead + c · S^p with its 95 % interval; or, where "
    "overhead + linear + quadratic describes it better than any power, the shares of these at the longest length, the "
    "quadratic one's 95 % interval, and the S from which on it is the greater half. Local exponents: the slope of each "
    "octave on log-log axes, by the length at its end, with half of its 95 % "
    "interval from the values' spread if that is above 0.1."
)
LAW = ["growth", "S", "n", "overhead", "residual", "local exponents"]

_BRANCHES = (
    " Device milliseconds of a call by branch, and their part of all kernels. Compressed: with its scores and the "
    "choice of blocks; window: with the blocks that are always selected; rest: compression, merging, gates; other: "
    "PyTorch's own kernels. A stage of the compressed branch and the window is divided by a fit over the lengths: per "
    "token, the window costs a constant and the compressed branch a multiple of S. Compressed / dense: beside the time "
    "of the fastest dense attention. By design, with one compressed key every 16 tokens (cmp_stride; "
    "arXiv:2502.11089), the last query sees S/16 compressed keys and a query S/32 on average, where dense attention "
    "sees S/2: 1/16 of its work, and just as quadratic; the scores visit the same keys once more."
)


def tables(benches: Sequence[Bench]) -> Iterable[Table]:
    """Tables of each run: the operator, its growth, the share of each branch, its stages."""
    explained = _BRANCHES
    for bench in benches:
        of = f", {bench.name}" if len(benches) > 1 else ""
        if any(bench.rows()):  # a run of dense attention only has no rows; it appears in the rows of other runs
            yield _operator(bench, of)
        yield _growth(bench, of)
        for table in _branches(bench, of, explained):
            yield table
            explained = ""  # said once
        yield from _stages(bench, of)


def _operator(bench: Bench, of: str) -> Table:
    note = (
        "Of the whole call; pairs are forward / forward+backward. A ratio above 1 speaks for the row: × dense is the "
        "time of the fastest dense attention over the row's, of this run or one of the same commit and card in this "
        "report; × peer that of the best figure reported for the same heads, dtype, length, batch and card, of any NSA "
        f"implementation; MiB × peer the same of extra memory. {UNMEASURED}: not measured."
    )
    times = ["forward ms", "fwd+bwd ms", "extra MiB", "× dense", "× peer", "MiB × peer"]
    columns = ["heads", "S", "batch", "NSA", *times, "dense ms", "best peer ms", "peer MiB"]
    return Table(f"Operator{of}", note, columns, [_cells(bench, *row) for row in bench.rows()])


def _cells(bench: Bench, place: Place, implementation: str) -> list[str]:
    passes = [replace(place, pass_=pass_) for pass_ in (FORWARD, BOTH)]
    times = [bench.value(at, implementation, TIME) for at in passes]
    failed = [bench.states.get((at, implementation), PointState.OK) for at in passes]
    dense = [bench.dense(at) for at in passes]
    peers = [bench.peers.get((at, TIME)) for at in passes]
    memory, peer_memory = bench.value(passes[1], implementation, MEMORY), bench.peers.get((passes[1], MEMORY))
    return [
        *(str(place.layout), f"{place.seq_len:,}", f"{place.batch}", implementation),
        *(
            str(state) if time is None and state != PointState.OK else _number(time)
            for time, state in zip(times, failed, strict=True)
        ),
        _number(memory),
        _ratios(dense, times),
        _ratios(peers, times),
        _ratios([peer_memory], [memory]),
        _owned(dense),
        _owned(peers),
        _number(peer_memory and peer_memory.value),
    ]


def _growth(bench: Bench, of: str) -> Table:
    pass_ = bench.fullest
    series = dict.fromkeys((place.layout, name) for place, name in bench.states if place.pass_ == pass_)
    rows = [row for one in series for metric in (TIME, MEMORY) if (row := _fitted(bench, *one, metric))]
    return Table(f"Growth{of}", f"Of {pass_}. {GROWTH}", ["heads", "implementation", "metric", *LAW], rows)


def law_cells(law: Growth, local: Sequence[LocalSlope]) -> list[str]:
    """Cells of a fitted growth, in the order of LAW."""
    return [
        str(law),
        f"{law.lengths[0]:,} to {law.lengths[-1]:,}",
        f"{law.n}",
        f"{law.overhead:.3g}" if law.overhead else "",
        f"{law.residual:.1%}",
        ", ".join(map(str, local)),
    ]


def _fitted(bench: Bench, layout: Layout, implementation: str, metric: str) -> list[str] | None:
    """Table row of one series' fit; None if it has too few lengths, or a value that has no logarithm."""
    pass_ = bench.fullest
    found = {
        place.seq_len: value / place.batch
        for (place, name, what), value in bench.values.items()
        if (place.layout, place.pass_, name, what) == (layout, pass_, implementation, metric)
    }
    law = fit_growth(list(found), list(found.values())) if all(value > 0 for value in found.values()) else None
    if law is None:
        return None
    return [str(layout), implementation, metric, *law_cells(law, local_slopes(list(found), list(found.values())))]


def _branches(bench: Bench, of: str, explained: str) -> Iterable[Table]:
    """One table of shares per layout, implementation and pass; `explained`: ends the first one's note."""
    for taken in take_overs(list(bench.shares.values())):
        staged = {at: one for at, one in bench.shares.items() if one.series == taken.series}
        places = sorted(staged, key=lambda at: at[0].seq_len)
        (first, name), shares = places[0], [staged[at] for at in places]
        shown = [branch for branch in Branch if any(branch in one.milliseconds for one in shares)]
        rows = []
        for (place, _), one in zip(places, shares, strict=True):
            cells = [f"{place.seq_len:,}"]
            for branch in shown:
                time = one.milliseconds.get(branch)
                cells.append(UNMEASURED if time is None else f"{readable(time)} ({100 * one.share(branch):.0f} %)")
            dense, compressed = bench.dense(place), one.milliseconds.get(Branch.COMPRESSED)
            part = UNMEASURED if dense is None or compressed is None else readable(compressed / dense.value)
            rows.append([*cells, readable(one.total), part])
        unknown = sorted({stage for one in shares for stage in one.unknown})
        more = f" Stages of unknown names, which count as other: {', '.join(unknown)}." if unknown else ""
        columns = ["S", *(_TITLES.get(branch, branch.value) for branch in shown), "all kernels", "compressed / dense"]
        title = f"Share of each branch of {first.layout}, {name} {first.pass_}{of}"
        yield Table(title, f"{taken.sentence}{more}{explained}", columns, rows)
        explained = ""


_TITLES = {Branch.SHARED: "compressed and window"}


def _stages(bench: Bench, of: str) -> Iterable[Table]:
    """One table of stages per layout, implementation and pass."""
    staged = [(place, name) for place, name in bench.states if bench.stages(place, name)]
    for layout, pass_, name in dict.fromkeys((place.layout, place.pass_, name) for place, name in staged):
        places = [place for place, n in staged if (place.layout, place.pass_, n) == (layout, pass_, name)]
        places.sort(key=lambda place: place.seq_len)
        note = (
            "Milliseconds on the device by stage of the operator; other: PyTorch's own kernels. Gaps: the rest of the "
            "call's time, in which the device waits for the host, or for a kernel's last programs. Stages are timed in "
            "calls of their own: a gap below 0 is what these differ by from the call that was timed."
        )
        columns = ["stage", *(f"{place.seq_len:,}" for place in places)]
        rows = _stage_rows(bench, places, name)
        yield Table(f"Stages of {layout}, {name} {pass_}{of}", note, columns, rows)


def _stage_rows(bench: Bench, places: Sequence[Place], implementation: str) -> list[list[str]]:
    """One row per stage, the slowest at the last place first; then the rows of sums, gaps and calls."""
    spent = [bench.stages(place, implementation) for place in places]
    names = sorted({name for times in spent for name in times}, key=lambda name: -spent[-1].get(name, 0.0))
    calls = [bench.value(place, implementation, TIME) for place in places]
    sums = [sum(times.values()) for times in spent]
    gaps = [None if call is None else call - busy for call, busy in zip(calls, sums, strict=True)]
    rows = [[name, *(_number(times.get(name)) for times in spent)] for name in names]
    return rows + [
        [title, *map(_number, row)] for title, row in (("all kernels", sums), ("gaps", gaps), ("call", calls))
    ]


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
