"""History of cells over commits and time: when one changed, between which commits, and how sure that is.

A cell is that of `compare`, on one model of card and with the same settings of NSA, as far as its runs say them. It
changed for sure where E-divisive finds it among all of its runs. Few runs are too few for that: two of them that follow
each other and differ as `compare` asks may also have changed, but a process may be slower than the next one by chance,
so these are said to be perhaps noise, with what speaks for it.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, tzinfo
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy import Row

from jobs.schema.axes import AXES, MORE, RESULTS_NAME
from jobs.schema.quantities import Better, Quantity, readable
from orchestrator.errors import UserError
from orchestrator.git import git
from orchestrator.judge.change_points import Shift, shifts
from orchestrator.report import compare, series
from orchestrator.report.table import Table, flat
from orchestrator.settings import SOURCES
from orchestrator.store import Store, queries

_SETTING = re.compile(r"(?:.*\.)?nsa\.")
_TOOL = re.compile(
    r"packages\.(?!nvidia-ml-py|numpy)|gpu\.(?=driver$|power_limit_w$|ecc$|uuid$)|(?=(?:cuda|cudnn|python)$)"
)
_COMMIT = re.compile("[0-9a-f]{7,64}")
_PLACE = ("kind", *(axis.name for axis in AXES), "gpu")  # what cells differ in, with the axes of their kind
_MANY = 6  # runs whose scatter says how far two of them are apart by chance
_SCATTER = 6.3  # times the median deviation: three standard deviations of a difference
Place = tuple[Any, ...]  # the values of _PLACE, then names and values of the kind's own axes


@dataclass(frozen=True)
class Reading:
    """A cell as one run measured it."""

    run_id: str
    point_id: str
    at: datetime
    commit: str  # 7 digits, with a "+" if the sources had changes that the commit does not hold
    value: float
    p10: float
    p90: float
    route: str
    tools: Mapping[str, str]  # driver, toolchain and card, by name


@dataclass(frozen=True)
class Changed:
    """A change between two readings: the last before it, and the first after it."""

    before: Reading
    after: Reading
    ratio: float  # the level after it, divided by that before it
    change: compare.Change
    creeping: bool = False  # it came bit by bit, over all readings between the two
    doubt: str = ""  # why it may be noise; empty if it is sure


@dataclass(frozen=True)
class History:
    """All readings of a cell, by the date of their commits; `settings` are those that others of the cell have not."""

    cell: compare.Cell
    gpu: str | None
    settings: str
    readings: tuple[Reading, ...]
    changes: tuple[Changed, ...] = ()

    @property
    def label(self) -> str:
        """The cell in words: "NSA (Triton) forward 12/2 d64 S=2048 batch=16 bfloat16 bench NVIDIA H200"."""
        where = {"settings": self.settings, "kind": dict(self.cell)["kind"], "card": self.gpu or "CPU"}
        named = {"S", "batch"}
        parts = {**compare.coordinates(self.cell), **where}
        parts["implementation"] = series.named(parts["implementation"])
        return " ".join(f"{name}={value}" if name in named else value for name, value in parts.items() if value)


def histories(
    store: Store, metric: str = "time", name: str | None = None, words: Sequence[str] = (), threshold: float = 0.02
) -> list[History]:
    """The cells that more than one run measured, those with changes first. Raises UserError if there are none.

    Args:
        name: only runs of this name, that of their spec.
        words: only cells whose label has all of these words, as "forward", "2048".
        threshold: the smallest change worth speaking of, as a share.
    """
    better = queries.quantities(store).of(metric).better or Better.LOWER
    found = [each for each in _series(store, metric, name, words) if _words(each.label).issuperset(words)]
    if not found:
        every = words and any(_series(store, metric, name, ()))
        field, value = ("WORDS", " ".join(words)) if every else ("--metric", metric)
        problem = "no cell that two runs measured has these words" if every else "no cell was measured by two runs"
        raise UserError(f"{field}: {value!r}: {problem}; `nsa history` without words lists those of its time")
    sure = [shifts(np.log([reading.value for reading in each.readings]), math.log1p(threshold)) for each in found]
    doubtful = _doubtful(store, metric, found, sure, threshold, better)
    changed = []
    for place, each in enumerate(found):
        changes = doubtful[place]
        for shift in sure[place]:
            sides = each.readings[shift.last], each.readings[shift.first]
            changes[shift.last] = Changed(
                *sides, math.exp(shift.size), _direction(shift.size, better), creeping=shift.creeping
            )
        changed.append(replace(each, changes=tuple(changes[at] for at in sorted(changes))))
    return sorted(changed, key=lambda each: (not each.changes, all(change.doubt for change in each.changes)))


def _series(store: Store, metric: str, name: str | None, words: Sequence[str]) -> Iterator[History]:
    """Cells with two or more readings, those that may have the words; their changes not looked for yet."""
    cells = _rows(store, metric, name, words)
    rows = [row for of_cell in cells.values() for row in of_cell]
    contents = queries.environments(store, list({row.environment_id for row in rows if row.environment_id}))
    tools = {
        each: {_TOOL.sub("", name): str(value) for name, value in flat(content).items() if _TOOL.match(name)}
        for each, content in contents.items()
    }
    dates = _commit_dates(list({row.git_commit for row in rows if row.git_commit}))
    ways = cache(lambda route: compare.route_of({"route": json.loads(route or "{}")}))
    for cell, of_cell in cells.items():
        alike: list[tuple[dict[str, Any], list[Row]]] = []
        for row in of_cell[::-1]:  # older runs lack the settings that came later
            found = _settings(row.config)
            for known, group in alike:
                if all(known.get(key, value) == value for key, value in found.items()):
                    known.update(found)
                    group.append(row)
                    break
            else:
                alike.append((dict(found), [row]))
        unlike = {key for known, _ in alike for key in known if len({str(each.get(key)) for each, _ in alike}) > 1}
        for known, group in alike:
            if len(group) > 1:
                readings = []
                for row in group:
                    commit = (row.git_commit or "unknown")[:7] + "+" * bool(row.git_dirty)
                    p10, p90 = (math.nan if each is None else each for each in (row.p10, row.p90))
                    ids, about = (row.run_id, row.point_id), (ways(row.route), tools.get(row.environment_id, {}))
                    readings.append(Reading(*ids, row.created_at, commit, row.value, p10, p90, *about))
                readings.sort(key=lambda reading: (dates.get(reading.commit, reading.at), reading.at))
                settings_of = ", ".join(f"{key}={known[key]}" for key in sorted(unlike & known.keys()))
                yield History(*_cell(cell), settings_of, tuple(readings))


def _rows(store: Store, metric: str, name: str | None, words: Sequence[str]) -> dict[Place, list[Row]]:
    """The readings of each cell that may have the words: of very many all others are left in the database."""
    wanted: dict[Place, set[str]] = {}
    for row in queries.coordinates(store, metric, name) if words else ():
        if (place := _place(row)) not in wanted:
            wanted[place] = _words(History(*_cell(place), "", ()).label)
        wanted[place] |= {word for key, value in _settings(row.config).items() for word in _words(f"{key}={value}")}
    wanted = {place: said for place, said in wanted.items() if said.issuperset(words)}
    axes = {axis.name: {place[_PLACE.index(axis.name)] for place in wanted} for axis in AXES}
    found: dict[Place, list[Row]] = defaultdict(list)
    for row in queries.readings(store, metric, name, axes if words else None):
        found[_place(row)].append(row)
    return {place: rows for place, rows in found.items() if place in wanted or not words}


def _place(row: Row) -> Place:
    """The place of a reading."""
    if row.more_axes in (None, "{}", "null"):  # most have none of their kind
        return tuple(row[: len(_PLACE)])
    own = {MORE + name: value for name, value in json.loads(row.more_axes).items() if value is not None}
    return (*row[: len(_PLACE)], *sorted(own.items()))


def _cell(place: Place) -> tuple[compare.Cell, str | None]:
    """The cell at a place, and its card."""
    values = dict(zip(_PLACE, place, strict=False)) | dict(place[len(_PLACE) :])
    return compare.cell_of(values), values["gpu"]


@lru_cache(10_000)  # many points share a text
def _settings(config: str) -> Mapping[str, Any]:
    """The settings of NSA in a configuration, by their names."""
    values = flat(json.loads(config)).items()
    return {_SETTING.sub("", name): value for name, value in values if _SETTING.match(name)}


def _words(label: str) -> set[str]:
    said = {*re.split("[ ,=]+", label), *label.split()}
    return said | {*RESULTS_NAME, *RESULTS_NAME.values()} if series.NSA in label else said


def _commit_dates(commits: Sequence[str]) -> dict[str, datetime]:
    """When commits were made, by their first 7 digits, those that the checkout of these sources has: a commit that is
    measured later than its successors belongs before them."""
    known = [commit for commit in commits if _COMMIT.fullmatch(commit)]
    done = git(SOURCES, "rev-list", "--no-walk=unsorted", "--timestamp", "--ignore-missing", *known)
    lines = done.stdout.decode().split() if known and not done.returncode else []
    return {
        commit[:7]: datetime.fromtimestamp(int(at), UTC) for at, commit in zip(lines[::2], lines[1::2], strict=True)
    }


def _direction(size: float, better: Better) -> compare.Change:
    return compare.Change.BETTER if (size < 0) == (better is Better.LOWER) else compare.Change.WORSE


def _doubtful(
    store: Store,
    metric: str,
    found: Sequence[History],
    sure: Sequence[Sequence[Shift]],
    threshold: float,
    better: Better,
) -> dict[int, dict[int, Changed]]:
    """Changes between two readings in a row that are no sure ones, by the places of history and reading before."""
    pairs: list[tuple[int, int, float]] = []  # these places, and the smallest difference
    for place, each in enumerate(found):
        values = np.log([reading.value for reading in each.readings])
        crossed = {at for shift in sure[place] for at in range(shift.last, shift.first)}
        least = math.log1p(max(threshold, _chance(each.readings, values, sure[place])))
        beyond = np.flatnonzero(np.abs(np.diff(values)) > least).tolist()
        pairs += [(place, at, least) for at in beyond if at not in crossed]
    ids = {found[place].readings[at + side].point_id for place, at, _ in pairs for side in (0, 1)}
    samples = queries.samples(store, metric, sorted(ids))
    cells = []
    for place, at, least in pairs:
        before, after = (
            compare.Measured(one.point_id, np.array(samples[one.point_id], float), found[place].gpu, one.route)
            for one in found[place].readings[at : at + 2]
        )
        if (before.samples > 0).all() and (after.samples > 0).all():  # a logarithm has no 0
            cells.append(compare.paired((("place", place), ("at", at)), before, after, math.expm1(least)))
    changes: dict[int, dict[int, Changed]] = defaultdict(dict)
    for cell in compare.judged(cells, better):
        (_, place), (_, at) = cell.cell
        readings, sides = found[place].readings, [cell.first.samples, cell.other.samples]
        single = max(side.size for side in sides) == 1  # such as of memory, which no test can tell apart
        if single or cell.change in (compare.Change.BETTER, compare.Change.WORSE):
            bounds = [0, *(shift.first for shift in sure[place]), len(readings)]
            low, high = next((low, high) for low, high in pairwise(bounds) if low <= at < high)
            doubts = [f"{at + 1 - low} run{'s' * (at > low)} before it and {high - at - 1} after"]
            doubts += _signs_of_noise(readings, at, sides, threshold, better)
            changes[place][at] = Changed(
                readings[at], readings[at + 1], cell.ratio, _direction(math.log(cell.ratio), better),
                doubt=f"may be noise: {', '.join(doubts)}",
            )  # fmt: skip
    return changes


def _chance(readings: Sequence[Reading], values: compare.Samples, sure: Sequence[Shift]) -> float:
    """How far apart readings are without a change, as a share: of one commit with the same tools, and of many."""
    repeats: dict[Any, list[float]] = defaultdict(list)
    for reading in readings:
        repeats[reading.commit, tuple(sorted(reading.tools.items()))].append(reading.value)
    apart = [max(some) / min(some) - 1 for (commit, _), some in repeats.items() if not commit.endswith("+")]
    for part in np.split(values, [shift.first for shift in sure]):
        if len(part) >= _MANY:
            apart.append(math.expm1(_SCATTER * float(np.median(np.abs(part - np.median(part))))))
    return max(apart, default=0.0)


def _signs_of_noise(
    readings: Sequence[Reading], at: int, samples: Sequence[compare.Samples], threshold: float, better: Better
) -> Iterator[str]:
    """Reasons to take the change after a reading for noise."""
    best = [float(np.quantile(side, 0.1 if better is Better.LOWER else 0.9)) for side in samples]
    if samples[0].size > 1 and abs(best[1] / best[0] - 1) <= threshold:
        yield "its best tenth did not change"
    if at + 2 < len(readings) and abs(readings[at + 2].value / readings[at].value - 1) <= threshold:
        yield f"{readings[at + 2].commit} took it back"
    if at > 0 and abs(readings[at + 1].value / readings[at - 1].value - 1) <= threshold:
        yield f"{readings[at - 1].commit} had it before"


def differing(before: Reading, after: Reading) -> str:
    """Other differences between two readings: "driver 580 → 590, another card, another route"."""
    both = [name for name in before.tools if before.tools[name] != after.tools.get(name, before.tools[name])]
    parts = [
        "another card" if name == "uuid" else f"{name} {before.tools[name]} → {after.tools[name]}" for name in both
    ]
    return ", ".join([*parts, *(["another route"] if before.route != after.route else [])])


def result(change: Changed, quantity: Quantity) -> str:
    """A change in words: "slower, creeping", "slower; may be noise: 1 run before it and 2 after"."""
    return (
        compare.word(change.change, quantity)
        + ", creeping" * change.creeping
        + (f"; {change.doubt}" if change.doubt else "")
    )


def all_changes(found: Sequence[History]) -> list[tuple[History, Changed]]:
    """The changes of all cells: sure ones before others, then the newest and largest first."""
    changes = [(history, change) for history in found for change in history.changes]

    def place(one: tuple[History, Changed]) -> tuple[bool, datetime, float]:
        change = one[1]
        return not change.doubt, change.after.at, abs(math.log(change.ratio))

    return sorted(changes, key=place, reverse=True)


def changes_table(found: Sequence[History], quantity: Quantity, most: int | None = None) -> Table:
    """The changes, `most` of them at the most, with the result in a line as its note."""
    changes, rows = all_changes(found), []
    for history, each in changes[:most]:
        where = compare.coordinates(history.cell)
        where["shape"] = ", ".join(filter(None, (where["shape"], history.settings)))
        sides = {
            heading: f"{readable(side.value, quantity.unit)} ({side.commit})"
            for heading, side in (("before", each.before), ("after", each.after))
        }
        about = {"ratio": f"{each.ratio:.3f}", "result": result(each, quantity)}
        about["what else changed"] = differing(each.before, each.after)
        rows.append({**where, "card": history.gpu or "CPU", **sides, **about})
    note = summary(found, quantity)
    for name in ("dtype", "card", "what else changed"):  # what is the same in all rows is said once
        if len(same := {row[name] for row in rows}) == 1:
            note += f"; {name}: {value}" if (value := same.pop()) else ""
            rows = [{key: value for key, value in row.items() if key != name} for row in rows]
    if len(changes) > len(rows):
        note += f"; {len(changes) - len(rows)} more are not listed"
    return Table.of(f"{quantity.title}: changes", note, rows)


def readings_table(history: History, quantity: Quantity, zone: tzinfo = UTC) -> Table:
    """All readings of a cell, with its changes; times in the zone."""
    changes = defaultdict(list)
    for each in history.changes:
        changes[each.after.point_id].append(f"{each.ratio:.3f} {result(each, quantity)}")
    rows = []
    for before, reading in zip((None, *history.readings), history.readings, strict=False):
        value = readable(reading.value, quantity.unit)
        spread = " – ".join(
            readable(each, quantity.unit) for each in (reading.p10, reading.p90) if not math.isnan(each)
        )
        about = ["; ".join(changes[reading.point_id]), differing(before, reading) if before else ""]
        at = f"{reading.at.astimezone(zone):%Y-%m-%d %H:%M %Z}"
        rows.append([at, reading.commit, reading.run_id, value, spread, *about])
    columns = ["measured", "commit", "run", quantity.title, "p10 – p90", "change", "what else changed"]
    return Table(f"{quantity.title}: {history.label}", "", columns, rows)


def summary(found: Sequence[History], quantity: Quantity) -> str:
    """The result in a line: "24 cells of 5 runs: 2 slower, 1 slower (creeping), 3 may be noise"."""
    runs = {reading.run_id for history in found for reading in history.readings}
    kinds = [
        "may be noise" if each.doubt else compare.word(each.change, quantity) + " (creeping)" * each.creeping
        for history in found
        for each in history.changes
    ]
    counted = [f"{number} {kind}" for kind, number in sorted(Counter(kinds).items(), key=lambda one: one[0])]
    return f"{len(found)} cells that {len(runs)} runs measured more than once: {', '.join(counted) or 'no change'}"
