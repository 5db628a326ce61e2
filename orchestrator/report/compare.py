"""Comparison of runs or commits, cell by cell: which implementation got slower, where, and how sure that is.

A cell is a point's implementation, shape, length, pass and mode. Its ratio is the Hodges-Lehmann shift of the
logarithms of both sides' samples (the median of all quotients) with its interval. It is a difference if the Mann-
Whitney test finds it, among all cells at a false-discovery rate of 1 % (Benjamini and Hochberg 1995), *and* it is
worth speaking of and beyond the cell's noise floor: samples of one process lie closer together than those of two,
so the floor is how far runs of one commit and spec have been apart.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.schema.axes import AXES, more_columns
from jobs.schema.plain_text import shortened
from jobs.schema.quantities import PEAK_EXTRA_MEMORY, PEAK_MEMORY, Better, Quantity, readable
from jobs.schema.states import FAILED, PointState
from orchestrator.errors import UserError
from orchestrator.report.series import full_shape, named, text
from orchestrator.report.table import Table, flat
from orchestrator.store import Store, queries

FALSE_DISCOVERIES = 0.01
_FEWEST = 6  # samples of a side: fewer prove no difference over several cells
_REPEATED = {PEAK_MEMORY.name, PEAK_EXTRA_MEMORY.name}  # equal calls allocate alike: one value a side proves
_MOST = 200  # samples of a side whose quotients are all taken; of more, as many quantiles
_VALUE = 60  # characters of a value that differs
_NO_VALUE = "--metric: {!r}: {} has no positive value of it; `nsa show RUN --point N` lists them"
_OF_A_RUN = ("host", "spec.name", "variables.NSA_", "gpu.uuid", "gpu.index", "gpu.sm_clock_mhz")

Cell = tuple[tuple[str, Any], ...]
Samples = NDArray[np.float64]


class Change(StrEnum):
    """How a cell of one side stands to that of the first; what matters most comes first."""

    FAILED = "failed"  # it has no value where the first side has one
    WORSE = "worse"
    BETTER = "better"
    AMBIGUOUS = "ambiguous"
    SAME = "same"
    LACKING = "lacking"  # as FAILED, but for another reason: skipped, not ended


@dataclass(frozen=True)
class Side:
    """A run, or the runs of a commit, of which the newest with each cell counts; of turns (`pooled`) all count."""

    name: str
    run_ids: tuple[str, ...]
    pooled: bool = False


@dataclass(frozen=True)
class Measured:
    """A cell as one side measured it."""

    point_id: str
    samples: Samples
    gpu: str | None  # this and the route are what a ratio does not pass over in silence
    route: str
    apart: float = 0.0  # how far apart the turns of a pooled side are, as a share of the lowest

    @property
    def median(self) -> float:
        return float(np.median(self.samples))


_NOTHING = Measured("", np.array([math.nan]), None, "")


@dataclass(frozen=True)
class Compared:
    """A cell of two sides."""

    cell: Cell
    first: Measured
    other: Measured
    threshold: float  # a ratio beyond 1 ± this is a difference
    ratio: float = math.nan  # the other side's value divided by the first one's; NaN where they are not compared
    low: float = math.nan  # its 95 % interval; with fewer than 6 samples of a side the range of all quotients
    high: float = math.nan
    p: float = 1.0  # of the Mann-Whitney test; 1 with too few samples
    note: str = ""  # what is unlike between the sides, or why the other has no value (NaN)
    change: Change = Change.AMBIGUOUS


@dataclass(frozen=True)
class Comparison:
    """All cells of two sides."""

    first: Side
    other: Side
    quantity: Quantity
    cells: tuple[Compared, ...]
    missing: Mapping[str, Counter[str]]  # by the name of a side: why it has no such cells as the other, and how many
    differences: Mapping[str, tuple[str, str]]  # what differs in the environments, with the values of both


def compare(
    store: Store, first: Side, others: Sequence[Side], metric: str = "time", threshold: float = 0.02
) -> list[Comparison]:
    """Each of the others beside the first side, by a metric. Raises UserError if a side has no value of it.

    `threshold`: the smallest difference worth speaking of, as a share; larger where a cell's noise floor is.
    """
    # Not of turns, which are `apart`: those of a bisection's earlier steps would raise the threshold of the later ones.
    floors = {} if first.pooled else _noise(store, first, others, metric)
    quantity = queries.quantities(store, first.run_ids).of(metric)
    (base, before), comparisons = _measured(store, first, metric), []
    if not base:
        raise UserError(_NO_VALUE.format(metric, first.name))
    for other in others:
        beside, after = _measured(store, other, metric)
        pairs, failed, lacking, unplanned = [], [], [], Counter[str]()
        for cell, one in base.items():
            if cell in beside:
                floor = max(floors.get(cell, 0.0), one.apart, beside[cell].apart)
                pair = paired(cell, one, beside[cell], max(threshold, floor))
                pairs.append(replace(pair, p=0.0) if metric in _REPEATED and not math.isnan(pair.ratio) else pair)
                continue
            # Cells that ended out of memory were once only counted, and a commit with a quick rest passed.
            if (why := after.get(cell)) is None:  # most cells, where the one side is of few points
                unplanned["not planned"] += 1
                continue
            change = Change.FAILED if why in FAILED else Change.LACKING
            gone = Compared(cell, one, _NOTHING, threshold, note=why, change=change)
            (failed if change is Change.FAILED else lacking).append(gone)
        if not beside and not failed:
            raise UserError(_NO_VALUE.format(metric, other.name))
        cells = judged(pairs, quantity.better or Better.LOWER)
        ours = Counter(before.get(cell, "not planned") for cell in beside if cell not in base)
        missing = {first.name: ours, other.name: unplanned}
        differences = _differences(store, cells)
        comparisons.append(Comparison(first, other, quantity, (*failed, *cells, *lacking), missing, differences))
    return comparisons


def paired(cell: Cell, first: Measured, other: Measured, threshold: float) -> Compared:
    """A cell of two sides, its change not yet judged."""
    if first.gpu != other.gpu:
        note = f"not divided: {first.gpu or 'CPU'} and {other.gpu or 'CPU'}"
        return Compared(cell, first, other, threshold, note=note)
    from scipy.stats import mannwhitneyu  # takes long to import

    below, above = (
        np.log(side.samples if side.samples.size <= _MOST else np.quantile(side.samples, np.linspace(0, 1, _MOST)))
        for side in (first, other)
    )
    shifts = np.sort(np.subtract.outer(above, below), axis=None)
    number, total = below.size * above.size, below.size + above.size
    outside, p = 0, 1.0
    if min(below.size, above.size) >= _FEWEST:
        outside = max(0, math.floor(number / 2 - 1.96 * math.sqrt(number * (total + 1) / 12)))
        p = float(mannwhitneyu(below, above).pvalue)
    low, ratio, high = (float(np.exp(each)) for each in (shifts[outside], np.median(shifts), shifts[-1 - outside]))
    note = "" if first.route == other.route else f"another route: {first.route or 'none'}, then {other.route or 'none'}"
    return Compared(cell, first, other, threshold, ratio, low, high, p, note)


def judged(cells: Sequence[Compared], better: Better) -> tuple[Compared, ...]:
    """The cells with their changes, those that differ most first; the false alarms are held over all of them."""
    if not cells:
        return ()
    from scipy.stats import false_discovery_control

    found = false_discovery_control([cell.p for cell in cells]) <= FALSE_DISCOVERIES
    changed = []
    for cell, sure in zip(cells, found, strict=True):
        exact = cell.first.samples.size == cell.other.samples.size == 1 and cell.first.median == cell.other.median
        if exact or (cell.low > 1 - cell.threshold and cell.high < 1 + cell.threshold):
            change = Change.SAME
        elif not sure:
            change = Change.AMBIGUOUS
        elif abs(cell.ratio - 1) <= cell.threshold:
            change = Change.SAME
        else:
            change = Change.BETTER if (cell.ratio < 1) == (better is Better.LOWER) else Change.WORSE
        changed.append(replace(cell, change=change))
    order = list(Change)
    return tuple(sorted(changed, key=lambda cell: (order.index(cell.change), -abs(np.nan_to_num(np.log(cell.ratio))))))


def _measured(store: Store, side: Side, metric: str) -> tuple[dict[Cell, Measured], dict[Cell, str]]:
    """Cells of a side as it measured them, and why others have no value; of several runs the newest counts."""
    cells: dict[Cell, Measured] = {}
    lacking: dict[Cell, str] = {}
    turns: dict[Cell, list[Samples]] = defaultdict(list)
    for run_id in sorted(side.run_ids):
        rows = queries.points(store, run_id)
        values = queries.samples(store, metric, rows["point_id"].tolist())
        for row in rows.to_dict("records"):
            samples = np.array(values.get(row["point_id"], []), dtype=float)
            if samples.size and (samples > 0).all():
                cell = cell_of(row)
                turns[cell] = [*turns[cell], samples] if side.pooled else [samples]
                medians = [float(np.median(turn)) for turn in turns[cell]]
                pooled, apart = np.concatenate(turns[cell]), max(medians) / min(medians) - 1
                cells[cell] = Measured(row["point_id"], pooled, row["gpu"], route_of(row), apart)
            else:  # a logarithm has no 0
                ended = "no value" if row["state"] == PointState.OK else str(row["state"])
                lacking[cell_of(row)] = "0 or below" if samples.size else ended
    return cells, lacking


def cell_of(row: Mapping[Any, Any]) -> Cell:
    """The coordinates of a point, those that it has."""
    names = ["kind", *(axis.name for axis in AXES), *more_columns(row)]
    return tuple((name, value) for name in names if (value := text(row.get(name))))


def route_of(row: Mapping[Any, Any]) -> str:
    """The ways that a point's branches took, in words."""
    return ", ".join(f"{branch} {way}" for branch, way in sorted((row["route"] or {}).items()))


def _noise(store: Store, first: Side, others: Sequence[Side], metric: str) -> dict[Cell, float]:
    """The noise floor of each cell: how far apart medians of runs of one commit and spec have been, as a share."""
    compared = [run_id for other in others for run_id in other.run_ids]  # of the same commit, perhaps
    sources = queries.repeats(store, first.run_ids, without=compared)
    values: dict[tuple[Cell, Any, Any], list[float]] = defaultdict(list)
    for row in queries.measurements(store, run_ids=[*sources], metric=metric).to_dict("records"):
        if row["value"] > 0:
            values[cell_of(row), row["gpu"], sources[row["run_id"]]].append(row["value"])
    floors: dict[Cell, float] = {}
    for (cell, *_), found in values.items():
        floors[cell] = max(floors.get(cell, 0.0), max(found) / min(found) - 1)
    return floors


def _differences(store: Store, cells: Sequence[Compared]) -> dict[str, tuple[str, str]]:
    """Values that differ between the specs and the environments of the first cell's points, by name."""
    sides = []
    for side in (cells[0].first, cells[0].other) if cells else ():
        run, point = queries.run(store, side.point_id.rpartition("/")[0]), queries.point(store, side.point_id)
        assert run is not None
        assert point is not None
        commit = f"{run['git_commit']}, with changes that are not committed" if run["git_dirty"] else run["git_commit"]
        values = {"commit": commit, **flat(run["spec"] or {}, "spec."), **flat(point["environment"])}
        sides.append({k: shortened(str(v), _VALUE) for k, v in values.items() if not k.startswith(_OF_A_RUN)})
    names = [name for name in sides[0] | sides[1] if sides[0].get(name) != sides[1].get(name)] if sides else []
    return {name: (sides[0].get(name, "-"), sides[1].get(name, "-")) for name in names}


def coordinates(cell: Cell) -> dict[str, str]:
    """Where a cell is, by the headings of a table."""
    values = dict(cell)
    names = ("implementation", "pass", "seq_len", "batch", "dtype")
    implementation, pass_, length, batch, dtype = (values.get(name, "") for name in names)
    where = {"implementation": implementation, "pass": pass_, "shape": full_shape(values)}
    return where | {"S": length, "batch": batch, "dtype": dtype}


def word(change: Change, quantity: Quantity) -> str:
    """A change in a word: of times "slower" and "faster", of all else "worse" and "better"."""
    if quantity.unit in ("ms", "s", "tok/s"):
        return {Change.BETTER: "faster", Change.WORSE: "slower"}.get(change, change.value)
    return change.value


def tables(comparison: Comparison) -> tuple[Table, Table]:
    """The cells, with the result in a line as its note; and what else differs between the sides."""
    first, other, quantity = comparison.first.name, comparison.other.name, comparison.quantity
    rows = []
    for each in comparison.cells:
        sides = (each.first, each.other)
        medians = ["" if math.isnan(side.median) else readable(side.median, quantity.unit) for side in sides]
        ratio = "" if math.isnan(each.ratio) else f"{each.ratio:.3f} ({each.low:.3f} – {each.high:.3f})"
        result = word(each.change, quantity) + (f"; {each.note}" if each.note else "")
        rows.append([*coordinates(each.cell).values(), *medians, ratio, result])
    columns = [*coordinates(()), "before", "after", "ratio", "result"]
    cells = Table(f"{quantity.title}: {other} after {first}", summary(comparison), columns, rows)
    differences = [[name, *values] for name, values in comparison.differences.items()]
    return cells, Table("What else differs", "", ["", first, other], differences)


def summary(comparison: Comparison) -> str:
    """The result in a line: "12 cells: 2 slower, 1 faster, 9 same; mean ratios: dense 0.999, NSA (Triton) 1.011"."""
    counted = Counter(cell.change for cell in comparison.cells)
    parts = [f"{counted[change]} {word(change, comparison.quantity)}" for change in Change if counted[change]]
    logs: dict[str, list[float]] = defaultdict(list)
    for each in comparison.cells:
        if not math.isnan(each.ratio):
            logs[dict(each.cell).get("implementation", "")].append(math.log(each.ratio))
    means = [f"{named(name)} {math.exp(sum(some) / len(some)):.3f}" for name, some in sorted(logs.items())]
    lacking = [
        f"{side} lacks {reasons.total()} cells ({', '.join(f'{number} {why}' for why, number in reasons.items())})"
        for side, reasons in comparison.missing.items()
        if reasons
    ]
    counts = f"{len(comparison.cells)} cells: {', '.join(parts) or 'none in common'}"
    return "; ".join([counts, *([f"mean ratios: {', '.join(means)}"] if means else []), *lacking])
